"""No answer to any gate was degenerate: one place looks at all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from seatrial.thresholds import Answers
from seatrial.verdict import Recorder, words

pytestmark = [pytest.mark.answers, pytest.mark.each_launch]


def test_answers_of_all_gates_are_sound(gate: Recorder, run: Any, bounds: Answers) -> None:
    """No answer was a loop, spray, lost characters, or torn off without a reason."""
    seen = list(run.answers)
    faulty = [one for one in seen if one.faults]
    kinds = Counter(fault for one in faulty for fault in one.faults)
    counted = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
    first = f" First in `{words(faulty[0].gate)}`: {faulty[0].said!r}." if faulty else ""
    measured, bound = gate.record(
        (len(seen) - len(faulty)) / len(seen) if seen else float("nan"),
        at_least=bounds.sound_ratio_min,
        unit="of answers sound",
        samples=len(seen),
        message=f"{counted}.{first}" if faulty else "",
        next_step=(
            "A degenerate answer is a fault of kernels, caches or sampling, rarely of the model: "
            "compare patches, index_key_dtype and backends with last_good."
        ),
    )
    assert measured >= bound
