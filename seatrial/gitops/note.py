"""What stands in git about a rollout: the note on its commit, in ``refs/notes/rollouts``.

A block of ``key: value`` lines for programs, an empty line, the sentence for people.
"""

from __future__ import annotations

from seatrial.gitops.state import Announcement


def text(told: Announcement) -> str:
    """Return the note, ending in a newline."""
    facts = {
        "seatrial": told.kind,
        "fleet": told.fleet,
        "time": told.time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "signer": told.signer,
        "rollout": told.rollout,
        "gate": told.gate,
        "measured": measured(told),
        "serves": told.serves,
        "report": told.report,
    }
    lines = [f"{key}: {value}" for key, value in facts.items() if value]
    return "\n".join([*lines, "", told.sentence, ""])


def measured(told: Announcement) -> str:
    """Return what the deciding gate measured against its bound; empty if none decided."""
    if told.measured is None or told.bound is None:
        return ""
    sign = ">=" if told.bound_is == "min" else "<="
    unit = f" {told.unit}" if told.unit else ""
    return f"{told.measured:g}{unit}, bound {sign} {told.bound:g}"
