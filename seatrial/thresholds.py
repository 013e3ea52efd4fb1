"""Thresholds: how much is asked of a cell and what it must reach, one YAML file per model.

A bound is named ``<metric>_<statistic>_<unit>_<min|max>``. The other keys say how much is asked
(samples, tokens). A key that is missing or unknown is an error: a gate never judges by a default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from seatrial.errors import SeatrialError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""Neither `yes` nor "3" nor .inf: a bound that nothing can miss is a misspelt one."""
Count = Annotated[int, Field(strict=True, ge=1)]
Ratio = Annotated[Number, Field(ge=0, le=1)]
Rate = Annotated[Number, Field(gt=0)]
Seconds = Annotated[Number, Field(gt=0, le=1_000_000)]
Text = Annotated[str, Field(min_length=1)]
Reasons = dict[str, Text]
"""A reason for each gate, or whole group of gates, that is treated in some way."""


class ThresholdsError(SeatrialError):
    """A thresholds file that cannot be read or that lacks what a gate needs."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Origin(_Strict):
    """Where the numbers come from: who set them, when, and from which run."""

    who: Text
    when: date
    run: Text


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

    answer_tokens: Count
    recall_ratio_min: Ratio
    kept_places_ratio_min: Ratio
    around_edge: Annotated[list[Rate], Field(min_length=1)]
    of_context: Annotated[list[Annotated[Ratio, Field(gt=0)]], Field(min_length=1)]
    length_max_tokens: Count
    index_topk_by_hand: Count
    depths: Annotated[list[Ratio], Field(min_length=1)]
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

    answer_tokens: Count
    drop_ratio_max: Annotated[Number, Field(gt=0, lt=1)]
    alpha_ratio: Annotated[Number, Field(gt=0, lt=0.5)]
    pairs: Count


class AgainstLastGood(_Strict):
    """How much slower than the last good release this one may be.

    Attributes:
        rate_drop_ratio_max: allowed drop of a request's tokens per second.
        first_token_rise_ratio_max: allowed rise of the time to its first token.
        noise_ratio: how far two runs of one release have been apart (learned; see `origin`).
    """

    rate_drop_ratio_max: Ratio
    first_token_rise_ratio_max: Annotated[Number, Field(ge=0)]
    noise_ratio: Ratio


class Throughput(_Strict):
    """A load at several levels of concurrency; the highest, asked in repeats, is judged.

    Attributes:
        requests: per level and repeat.
        repeats: how often the highest level is run: from these the noise is learned.
        scrape_seconds: how long to wait for Prometheus to look again.
    """

    requests: Count
    repeats: Count
    concurrency_levels: Annotated[list[Count], Field(min_length=1)]
    prompt_tokens: Count
    answer_tokens: Count
    scrape_seconds: Seconds
    client_agreement_ratio_min: Ratio
    generation_tokens_per_second_min: Rate
    prompt_tokens_per_second_min: Rate
    first_token_p50_ms_max: Rate
    first_token_p99_ms_max: Rate
    inter_token_p50_ms_max: Rate
    inter_token_p99_ms_max: Rate
    queue_p99_ms_max: Rate
    answered_ratio_min: Ratio
    last_good: AgainstLastGood


class Rung(_Strict):
    """So many long prefills at once; with ``is_shared`` all begin with the same text."""

    requests: Count
    prompt_tokens: Count
    is_shared: Annotated[bool, Field(strict=True)]


class Memory(_Strict):
    """Memory under long prefills, against the plan and against the device.

    Attributes:
        source: where samples come from: the host (nvidia-smi, or the engine's processes), or DCGM's
            metrics in Prometheus, whose scrapes are rarer and whose bound is ``samples_hz_min``.
        headroom_mib_min: what must be left of the plan.
        margin_mib_min: what must be left of the device.
        scrape_seconds: how long to wait for Prometheus to look again, for its sources.
    """

    source: Literal["host", "dcgm"]
    samples_hz_min: Rate
    ladder: Annotated[list[Rung], Field(min_length=1)]
    headroom_mib_min: Number
    margin_mib_min: Number
    scrape_seconds: Seconds


class Liveness(_Strict):
    """The cell answers under bursts, beside long prefills, after an idle time, and soundly.

    Attributes:
        probe_seconds_max: within this each one-token probe must be answered.
        prefill_tokens: length of the prefill beside which it is probed.
        bursts: how many requests at once, one burst after the other, over again.
        trend_p_min: below this probability the right answers become fewer with time.
        cancelled_requests: so many clients hang up in the middle of their answers.
        settle_seconds: within this no cancelled request may still run.
    """

    probes: Count
    probe_interval_seconds: Seconds
    probe_seconds_max: Seconds
    probe_answered_ratio_min: Ratio
    prefill_tokens: Count
    burst_requests: Count
    bursts: Annotated[list[Count], Field(min_length=1)]
    burst_pause_seconds: Seconds
    burst_prompt_tokens: Count
    burst_right_ratio_min: Ratio
    trend_p_min: Ratio
    idle_seconds: Seconds
    cancelled_requests: Count
    settle_seconds: Seconds


class Answers(_Strict):
    """All answers of all gates, looked at for loops, spray, lost characters and torn ends."""

    sound_ratio_min: Ratio


class Soak(_Strict):
    """The same for long: rounds of bursts with pauses, and what memory does meanwhile."""

    seconds: Seconds
    bursts: Annotated[list[Count], Field(min_length=1)]
    burst_pause_seconds: Seconds
    prompt_tokens: Count
    right_ratio_min: Ratio
    trend_p_min: Ratio
    memory_growth_mib_per_1000_requests_max: Number


class Transfer(_Strict):
    """The KV cache crosses from prefill to decode intact.

    Attributes:
        lengths: prompt tokens of the canaries.
        samples: canaries per length.
    """

    lengths: Annotated[list[Count], Field(min_length=1)]
    samples: Count
    concurrency: Count
    canary_ratio_min: Ratio
    agreement_ratio_min: Ratio


class Alike(_Strict):
    """Greedy prompts that a cell of the other kind (combined, or not) must answer alike."""

    lengths: Annotated[list[Count], Field(min_length=1)]
    prompts: Count
    alike_ratio_min: Ratio


class Kernels(_Strict):
    """The kernels' self-test in the installed build. ``seconds`` is how long it may take."""

    seconds: Seconds
    passed_ratio_min: Ratio


class Thresholds(_Strict):
    """One thresholds file. A section that is absent makes its gates INVALID when they run.

    Attributes:
        request_seconds: how long any one request may take.
        concurrency: how many requests of gates that do not measure time are in flight at once.
        budget_seconds: how long each group of gates should take; printed, never judged.
        critical: gates after which, unless they pass, nothing more is measured.
        shadow: gates that run and are reported, and never decide.
        not_applicable: gates that cannot apply to this model.
        not_applicable_without_last_good: the same where nothing is known of a last good release.
        not_applicable_to_combined: the same for a cell without prefill and decode of their own.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    model: str
    origin: Origin
    request_seconds: Seconds
    concurrency: Count
    budget_seconds: dict[str, Seconds]
    identity: Identity | None = None
    readiness: Readiness | None = None
    window: Window | None = None
    recall: Recall | None = None
    comparison: Comparison | None = None
    throughput: Throughput | None = None
    memory: Memory | None = None
    liveness: Liveness | None = None
    soak: Soak | None = None
    answers: Answers | None = None
    transfer: Transfer | None = None
    alike: Alike | None = None
    kernels: Kernels | None = None
    critical: Reasons
    shadow: Reasons
    not_applicable: Reasons
    not_applicable_without_last_good: Reasons
    not_applicable_to_combined: Reasons

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name in self.critical:
            if name in self.shadow or name in self.not_applicable:
                raise ValueError(
                    f"{name} is critical, so it cannot be under shadow or not_applicable too"
                )
        return self

    @property
    def names(self) -> list[str]:
        """The gates and groups that the file names, each of which should exist."""
        return [
            *self.critical,
            *self.shadow,
            *self.not_applicable,
            *self.not_applicable_without_last_good,
            *self.not_applicable_to_combined,
            *self.budget_seconds,
        ]

    def section(self, name: str) -> Any:
        """Return the section ``name``.

        Raises:
            ThresholdsError: the file has no such section.
        """
        section = getattr(self, name)
        if section is None:
            raise ThresholdsError(f"The thresholds for {self.model} have no section {name}; add it")
        return section


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    problem="a key should be a word", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


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
        # A loader made from yaml.SafeLoader, which makes nothing but plain data.
        value = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506
        return Thresholds.model_validate(value)
    except OSError as error:
        raise ThresholdsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ThresholdsError(f"{path}: should be YAML: {said}") from None
    except ValidationError as error:
        lines = [_sentence(path, dict(problem)) for problem in error.errors()]
        raise ThresholdsError("\n".join(dict.fromkeys(lines))) from None


def check_choice(folder: Path, name: str, select: Sequence[str]) -> None:
    """See that the selected groups of gates can judge by the thresholds, before anything stops.

    ``folder`` is ``gates/`` of the checkout: a group is a file ``test_<group>.py`` in it.

    Raises:
        ThresholdsError: there is no such group, or no such thresholds, or they lack a group's.
    """
    known = sorted(file.stem.removeprefix("test_") for file in folder.glob("test_*.py"))
    unknown = [group for group in select if group not in known]
    if unknown:
        raise ThresholdsError(
            f"gates.select: should be among {', '.join(known)}, has {', '.join(unknown)}"
        )
    found = load(folder / "thresholds", name)
    for group in select:
        if group not in found.not_applicable:
            found.section(group)


def _sentence(path: Path, problem: dict[str, Any]) -> str:
    """Say what is wrong with one key."""
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    said = {
        "missing": "is missing; a gate does not judge by a default",
        "extra_forbidden": "is not a key of a thresholds file; is it misspelt?",
        "date_from_datetime_parsing": f"should be a day like 2026-11-29, is {problem['input']}",
    }.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return f"{path.name}: {where}: {said}"
