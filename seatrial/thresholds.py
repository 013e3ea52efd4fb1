"""Thresholds: how much is asked of a cell and what it must reach, one YAML file per model.

A bound is named ``<metric>_<statistic>_<unit>_<min|max>``. The other keys say how much is asked
(samples, tokens). A key that is missing or unknown is an error: a gate never judges by a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.errors import SeatrialError

Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class ThresholdsError(SeatrialError):
    """A thresholds file that cannot be read or that lacks what a gate needs."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Origin(_Strict):
    """Where the numbers come from."""

    who: str
    when: str
    run: str


class Identity(_Strict):
    """The running servers are the release."""

    agreement_ratio_min: Ratio
    probe_prompt_tokens: Count


class Readiness(_Strict):
    """The cell answers."""

    ready_servers_ratio_min: Ratio
    answer_tokens: Count
    answered_tokens_min: Count


class NeedleCase(_Strict):
    """One of the four needle cases: how long the prompts are, how many, which share is recalled."""

    prompt_tokens: Count
    samples: Count
    recall_ratio_min: Ratio


class RepeatedNeedleCase(NeedleCase):
    """A case in which the needle stands several times."""

    copies: Count


class Window(_Strict):
    """The four needle cases. ``answer_tokens`` is how much room an answer gets."""

    answer_tokens: Count
    a: NeedleCase
    b: NeedleCase
    c: RepeatedNeedleCase
    d: NeedleCase


class Throughput(_Strict):
    """A short load. ``scrape_seconds`` is how long to wait for Prometheus to look again."""

    requests: Count
    concurrency: Count
    prompt_tokens: Count
    answer_tokens: Count
    scrape_seconds: Seconds
    client_agreement_ratio_min: Ratio
    generation_tokens_per_second_min: Rate
    prompt_tokens_per_second_min: Rate


class Memory(_Strict):
    """Memory under long prefills, against the plan."""

    requests: Count
    prompt_tokens: Count
    headroom_mib_min: float


class Thresholds(_Strict):
    """One thresholds file. A section that is absent makes its gates INVALID when they run.

    Attributes:
        request_seconds: how long any one request may take.
        not_applicable: gates (or whole groups) that cannot apply to this model, with the reason.
        not_applicable_by_hand: the same where only a URL is known, no host and no Prometheus.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    model: str
    origin: Origin
    request_seconds: Seconds
    identity: Identity | None = None
    readiness: Readiness | None = None
    window: Window | None = None
    throughput: Throughput | None = None
    memory: Memory | None = None
    not_applicable: dict[str, str]
    not_applicable_by_hand: dict[str, str]

    def section(self, name: str) -> Any:
        """Return the section ``name``.

        Raises:
            ThresholdsError: the file has no such section.
        """
        section = getattr(self, name)
        if section is None:
            raise ThresholdsError(f"The thresholds for {self.model} have no section {name}; add it")
        return section


def load(folder: Path, name: str) -> Thresholds:
    """Read ``<folder>/<name>.yml``, or the file ``name`` itself if it ends in ``.yml``.

    Raises:
        ThresholdsError: there is no such file, it is no YAML, or a key is wrong, one line per key.
    """
    path = Path(name) if name.endswith(".yml") else folder / f"{name}.yml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yml"))) or "none"
        raise ThresholdsError(f"There are no thresholds {name}; by name there are: {known}")
    try:
        return Thresholds.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ThresholdsError(f"{path}: should be YAML: {error}") from None
    except ValidationError as error:
        lines = [_sentence(path, dict(problem)) for problem in error.errors()]
        raise ThresholdsError("\n".join(dict.fromkeys(lines))) from None


def _sentence(path: Path, problem: dict[str, Any]) -> str:
    """Say what is wrong with one key."""
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    said = {
        "missing": "is missing; a gate does not judge by a default",
        "extra_forbidden": "is not a key of a thresholds file; is it misspelt?",
    }.get(problem["type"], problem["msg"])
    return f"{path.name}: {where}: {said}"
