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


class Asked(_Strict):
    """How long prompts are, and how many."""

    prompt_tokens: Count
    samples: Count


class Recall(_Strict):
    """Needles at all lengths and depths, between distractors, in chats, behind a cached prefix.

    Attributes:
        concurrency: requests at once.
        answer_tokens: how much room an answer gets.
        recall_ratio_min: the share of needles to recall, of all that one gate asks for.
        kept_places_ratio_min: the share of lengths, depths and residues that lose no needles.
        around_edge: lengths, as multiples of the longest prompt whose entries are all selected.
        of_context: lengths, as shares of the context.
        length_max_tokens: no prompt is longer, whatever the context is.
        index_topk_by_hand: the selection to assume where neither a spec nor the server tells.
        depths: where needles stand, 0 (start) to 1 (end).
        samples: needles for each length and depth.
        confirm_samples: fresh needles for a place that lost one, to tell a fault from an accident.
        residues: a prompt of each length from ``prompt_tokens`` on, one token longer each.
        covered_residues_ratio_min: the share of the residues that must have been hit.
        cached_ratio_min: the share of a prompt that must come from the cache where that is wanted.
    """

    concurrency: Count
    answer_tokens: Count
    recall_ratio_min: Ratio
    kept_places_ratio_min: Ratio
    around_edge: list[Rate]
    of_context: list[Ratio]
    length_max_tokens: Count
    index_topk_by_hand: Count
    depths: list[Ratio]
    samples: Count
    confirm_samples: Count
    residues: Asked
    covered_residues_ratio_min: Ratio
    named: Asked
    near: Asked
    chat: Asked
    corpus: Asked
    cached: Asked
    cached_ratio_min: Ratio


class Comparison(_Strict):
    """This release against the last good one, on the questions that the last good one was asked.

    Attributes:
        drop_ratio_max: how much recall may drop.
        alpha_ratio: the share of wrong decisions that is accepted, in each direction.
        pairs: questions to ask at most.
    """

    concurrency: Count
    answer_tokens: Count
    drop_ratio_max: Annotated[float, Field(gt=0, lt=1)]
    alpha_ratio: Annotated[float, Field(gt=0, lt=0.5)]
    pairs: Count


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
        not_applicable_without_last_good: the same where nothing is known of a last good release.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    model: str
    origin: Origin
    request_seconds: Seconds
    identity: Identity | None = None
    readiness: Readiness | None = None
    window: Window | None = None
    recall: Recall | None = None
    comparison: Comparison | None = None
    throughput: Throughput | None = None
    memory: Memory | None = None
    not_applicable: dict[str, str]
    not_applicable_by_hand: dict[str, str]
    not_applicable_without_last_good: dict[str, str]

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
