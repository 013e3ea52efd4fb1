"""``python -m seatrial.gitops --fleet NAME``: one pass of the fleet's reconciler.

Exit status: 0, the fleet serves what the branch says; 3, it does not, for a reason that was said;
75, another reconciler has the lock; 1, the reconciler itself cannot work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seatrial.errors import SeatrialError
from seatrial.gitops import quiet

BROKEN = 1
SETTINGS = Path("/etc/seatrial/gitops")


def main(words: list[str]) -> int:
    """Do what the command line says."""
    given = parse(words)
    path = given.settings or SETTINGS / f"{given.fleet}.yml"
    if not given.drift:
        known = quiet.is_quiet(given.fleet, path)
        if known is not None:
            return known
    # pydantic, YAML and the rest come in only now: they cost more than a quiet poll may.
    from seatrial.gitops import reconcile  # noqa: PLC0415

    try:
        return reconcile.one_pass(path, given.fleet, is_drift=given.drift)
    except SeatrialError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return BROKEN


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m seatrial.gitops", description="One pass of a fleet's reconciler."
    )
    parser.add_argument("--fleet", required=True, help="the folder of inventory/ that names it")
    parser.add_argument("--settings", type=Path, help=f"instead of {SETTINGS}/<fleet>.yml")
    parser.add_argument("--drift", action="store_true", help="look for drift instead")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
