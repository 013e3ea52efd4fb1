"""A load of many requests at once, and what its users saw.

Own, and short, after looking at what exists. sglang.bench_serving needs SGLang, and so torch, where
the gates run. guidellm 0.8.1 is 97 distributions, torch and CUDA's libraries among them; aiperf
0.13.0 is 139 (`pip install --dry-run` on the control machine, which has under 60 in all). Both send
synthetic or dataset prompts whose lengths their own tokenizer counts, where a gate needs the
server's count and prompts that resemble use. locust 2.47.0 is 38, and knows no token in a stream.
None of them hands back each request's answer, and an answer that nobody looked at can be garbage at
full speed. What they have and this has not: open-loop arrival at a rate. A gate asks at fixed
concurrency, which a rollout can repeat exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from seatrial.engine import Answer, EngineError

T = TypeVar("T")


@dataclass(frozen=True)
class Load(Generic[T]):
    """The requests of one load, in the order in which they were asked.

    Attributes:
        answers: what came back; None for a request that failed.
        problems: a sentence for each request that failed.
        seconds: from the first request to the last answer.
    """

    answers: list[T | None]
    problems: list[str]
    seconds: float

    @property
    def whole(self) -> list[T]:
        """The answers of the requests that did not fail."""
        return [answer for answer in self.answers if answer is not None]


def first_token_seconds(answers: Iterable[Answer]) -> list[float]:
    """Return how long each streamed answer took to its first token."""
    return [one.first_seconds for one in answers if one.first_seconds is not None]


def gap_seconds(answers: Iterable[Answer]) -> list[float]:
    """Return all times between one token and the next, of all streamed answers."""
    return [gap for answer in answers for gap in answer.gap_seconds]


def at_once(requests: Sequence[Callable[[], T]], concurrency: int) -> Load[T]:
    """Ask all, so many at a time; a request that fails is kept as a problem, not raised."""
    problems: list[str] = []

    def one(request: Callable[[], T]) -> T | None:
        try:
            return request()
        except EngineError as error:
            problems.append(str(error))
            return None

    start = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, requests))
    return Load(answers, problems, time.monotonic() - start)


@dataclass
class Bursts(Generic[T]):
    """The sizes of bursts, over and over, until so many requests were sent."""

    sizes: Sequence[int]
    pause_seconds: float
    loads: list[Load[T]] = field(default_factory=list)

    def send(self, requests: Iterable[Callable[[], T]], until: Callable[[], bool]) -> None:
        """Send burst after burst with pauses between, until there is nothing left or it is time."""
        left = iter(requests)
        while not until():
            for size in self.sizes:
                burst = list(islice(left, size))
                if not burst:
                    return
                self.loads.append(at_once(burst, len(burst)))
                time.sleep(self.pause_seconds)

    @property
    def replies(self) -> list[T | None]:
        """What came back, in the order in which it was asked for."""
        return [answer for load in self.loads for answer in load.answers]

    @property
    def problems(self) -> list[str]:
        """A sentence for each request that failed."""
        return [problem for load in self.loads for problem in load.problems]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least observation that ``share`` of them do not exceed; NaN without any.

    No interpolation: with 16 requests the 99th percentile is the slowest one, and says so.
    """
    if not values:
        return math.nan
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
