"""Writes docs/faults.md from what runs of the matrix have seen: `python -m tests.faults.report`."""

from __future__ import annotations

import json
import os
import statistics
from datetime import UTC, datetime
from pathlib import Path

from rehearsal import run as rehearsal
from tests.faults.cases import CASES
from tests.faults.stage import Row

PAGE = Path(__file__).resolve().parents[2] / "docs/faults.md"
KEPT = rehearsal.CACHE / "fault-rows"
"""A file for each case that passed when it was run last; the same for all berths."""
INTRODUCTION = """\
# What a fault comes to

Written by `python -m tests.faults.report` from runs of the matrix ({when}, {cores} cores).
`make scenarios` runs all of it, `make test` the most telling cases. The hosts are the rehearsal's,
and everything on them is real: `deploy.yml`, its roles and gates, systemd, sshd, HAProxy,
Prometheus. *light* is the engine of [`rehearsal/light`](../rehearsal/light) in SGLang's place, so
that a rollout takes a minute; *real* is SGLang on CPUs. The faults stand in
[`tests/faults/cases.py`](../tests/faults/cases.py), each a few lines.

While a case runs, a probe asks the entry five times a second (SGLang: once). After **every** case
that passed when it was run last, this was true; one that did not says so:

- no answer had two releases behind it (the light engine names the release of router, prefill and
  decode in each answer; with the real one, hosts and entry are looked at instead);
- no request failed, but those sent to a cell that the fault itself had taken down;
- the fleet ran `last_good`, or the new release with every gate passed; what a dead run had left
  split was reported by the next run, and repaired;
- the ledger could be read, and every rollout in it had an end;
- both cells answered a plain request, and nothing was left running, mounted, locked or undecided.

*Seconds* are from the strike until both cells serve one release again: by the hosts alone, by the
struck run, or by the next one, whichever the case is about. A next run starts at once here; a
person takes longer. Several fleets were rehearsed at once, on a machine that did other work too.
"""
HEADER = (
    "| fault | strikes at | ends with | seconds | asked | failed | engine |\n"
    "| --- | --- | --- | ---: | ---: | ---: | --- |"
)
COUNTS = ("requests", "failed")
NOTES = """\
## What is simulated

- All hosts share this machine's kernel and its clock: a jump of the clock is what the host's own
  Python programs see, not what the kernel does.
- A cable that is out, a frozen host and a power failure are those of network namespaces and control
  groups; the disk of a host that loses power loses nothing that was written.
- There is no GPU, so nothing holds GPU memory; a port that stays taken stands in for it.
"""


def keep(row: Row) -> None:
    """Keep what a case came to, until it is run again."""
    KEPT.mkdir(parents=True, exist_ok=True)
    _file(row.engine, row.name).write_text(json.dumps(row._asdict()))


def forget(engine: str, name: str) -> None:
    """Forget what a case came to: it is run again, and may not pass."""
    _file(engine, name).unlink(missing_ok=True)


def _file(engine: str, name: str) -> Path:
    return KEPT / f"{engine} {name}.json"


def write() -> str:
    """Write the page from the rows that are kept; return its sum."""
    files = sorted(KEPT.glob("*.json"))
    times = sorted(datetime.fromtimestamp(file.stat().st_mtime, UTC) for file in files)
    days = dict.fromkeys(f"{time:%d %b %Y}" for time in (times[0], times[-1]))
    rows = {file.stem: Row(**json.loads(file.read_text())) for file in files}
    PAGE.write_text(page(rows, " to ".join(days)))
    return total(rows)


def page(rows: dict[str, Row], when: str) -> str:
    """Return the text of the page; a case without a row stands there as such."""
    introduction = INTRODUCTION.format(when=when, cores=os.cpu_count())
    known = {f"light {case.name}": (case.fault, case.phase) for case in CASES.values()}
    known |= {name: (row.fault, row.phase) for name, row in rows.items() if row.name not in CASES}
    real = [case for case in CASES.values() if case.is_for_real]
    known |= {f"real {case.name}": (case.fault, case.phase) for case in real}
    lines = []
    for name, (fault, phase) in known.items():
        row = rows.get(name)
        if row is None:
            lines.append(
                f"| {fault} | {phase} | no run passed yet | | | | {name.partition(' ')[0]} |"
            )
        else:
            lines.append(
                f"| {fault} | {phase} | {row.end} | {row.seconds:.0f} | {row.requests} "
                f"| {row.failed} | {row.engine} |"
            )
    return "\n".join([introduction, HEADER, *lines, "", total(rows), "", NOTES])


def total(rows: dict[str, Row]) -> str:
    """Return what all rows come to, in a sentence."""
    asked, failed = (sum(getattr(row, key) for row in rows.values()) for key in COUNTS)
    half = statistics.median(row.seconds for row in rows.values())
    return (
        f"{len(rows)} cases were run, with {asked} requests, of which {failed} failed; half of the "
        f"cases were over within {half:.0f} s."
    )


if __name__ == "__main__":
    print(f"{write()}\n{PAGE}")
