"""Print what the comparison with last good decides, and for how many requests, by simulation.

    python -m tests.paired_drop_table

The tables of docs/measurements.md; a minute of one core.
"""

from seatrial.statistics import fixed_pairs
from tests.test_paired_drop import ROLLOUTS, _rollouts

ROWS = (
    # Losses and gains as shares of the pairs, in units of the allowed drop.
    (0.0, 0.0),
    (0.1, 0.1),
    (0.25, 0.25),
    (0.5, 0.5),
    (1.0, 1.0),
    (0.5, 0.0),
    (1.0, 0.0),
    (1.2, 0.2),
    (1.5, 0.0),
    (2.0, 0.0),
    (2.2, 0.2),
    (3.0, 0.0),
    (5.0, 0.0),
)


def main() -> None:
    """Print a table for the rehearsal's and for the production thresholds' allowance."""
    for allowed in (0.1, 0.05):
        fixed = fixed_pairs(allowed, 2 * allowed)
        print(
            f"\nallowed drop {allowed:.0%}; a fixed run asks {fixed}; {ROLLOUTS} rollouts a row\n"
        )
        print("| drop | lost, gained | PASS | FAIL | INCONCLUSIVE | requests | of a fixed run |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for lost, gained in ROWS:
            verdicts, asked = _rollouts(allowed, lost * allowed, gained * allowed, fixed)
            shares = " | ".join(
                f"{verdicts[verdict] / ROLLOUTS:.1%}"
                for verdict in ("PASS", "FAIL", "INCONCLUSIVE")
            )
            print(
                f"| {(lost - gained) * allowed:.1%} | {lost * allowed:.1%}, {gained * allowed:.1%} "
                f"| {shares} | {asked:.0f} | {asked / fixed:.0%} |"
            )


if __name__ == "__main__":
    main()
