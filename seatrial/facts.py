"""Facts that should be so: how many were compared, and a sentence for each that is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from seatrial.verdict import Recorder

SHOWN = 6


@dataclass
class Facts:
    """Facts that were compared, and the sentences about those that do not agree."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def agree(self, what: str, found: object, expected: object) -> None:
        """Compare one fact and show both values if they differ."""
        self.hold(found == expected, f"{what} is {found}, released is {expected}")

    def hold(self, is_true: bool, otherwise: str) -> None:
        """Count one fact, with the sentence to say if it is false."""
        self.compared += 1
        if not is_true:
            self.wrong.append(otherwise)

    def judge(self, gate: Recorder, agreement_min: float) -> tuple[float, float]:
        """Record which share of the facts agrees, and return it with its bound.

        Raises:
            InvalidMeasurementError: no fact was compared.
        """
        more = len(self.wrong) - SHOWN
        shown = "; ".join(self.wrong[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return gate.record(
            (self.compared - len(self.wrong)) / self.compared if self.compared else float("nan"),
            at_least=agreement_min,
            unit="of facts agree",
            samples=self.compared,
            message=f"{len(self.wrong)} of {self.compared} differ: {shown}." if shown else "",
            next_step=(
                "Deploy the release again; if it differs again, something else changes the host."
            ),
        )
