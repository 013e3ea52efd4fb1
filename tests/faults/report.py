"""Writes docs/faults.md from what a run has seen."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.fleet import WORK
from tests.faults.stage import Row

PAGE = Path(__file__).resolve().parents[2] / "docs/faults.md"
KEPT = WORK / "rows.json"
INTRODUCTION = """\
# What a fault comes to

Written by `make scenarios` ({when}, {cores} cores, {minutes:.0f} minutes); do not edit.
`make test` runs the most telling cases. The hosts are the rehearsal's, and everything on them is
real: `deploy.yml`, its roles and gates, systemd, sshd, HAProxy, Prometheus. *light* is the engine
of [`rehearsal/light`](../rehearsal/light) in SGLang's place, so that a rollout takes a minute;
*real* is SGLang on CPUs. The faults stand in
[`tests/faults/cases.py`](../tests/faults/cases.py), each a few lines.

While a case runs, a probe asks the entry five times a second (SGLang: once). After **every** case
this was true:

- no answer had two releases behind it (the light engine names the release of router, prefill and
  decode in each answer; with the real one, hosts and entry are looked at instead);
- no request failed, but those sent to a cell that the fault itself had taken down;
- the fleet ran `last_good`, or the new release with every gate passed; what a dead run had left
  split was reported by the next run, and repaired;
- the ledger could be read, and every rollout in it had an end;
- both cells answered a plain request, and nothing was left running, mounted, locked or undecided.

*Seconds* are from the strike until both cells serve one release again: by the hosts alone, by the
struck run, or by the next one, whichever the case is about. A next run starts at once here; a
person takes longer. They were measured on a machine that did other work too.
"""
HEADER = (
    "| fault | strikes at | ends with | seconds | asked | failed | engine |\n"
    "| --- | --- | --- | ---: | ---: | ---: | --- |"
)
NOTES = """\
## What is simulated

- All hosts share this machine's kernel and its clock: a jump of the clock is what the host's own
  Python programs see, not what the kernel does.
- A cable that is out, a frozen host and a power failure are those of network namespaces and control
  groups; the disk of a host that loses power loses nothing that was written.
- There is no GPU, so nothing holds GPU memory; a port that stays taken stands in for it.
"""


def write(rows: Iterable[Row], seconds: float) -> None:
    """Keep the rows, beside those of the other engine, and write the page."""
    fresh = [row._asdict() for row in rows]
    engines = {row["engine"] for row in fresh}
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"rows": [], "seconds": {}}
    kept["rows"] = [row for row in kept["rows"] if row["engine"] not in engines] + fresh
    kept["seconds"] |= dict.fromkeys(engines, seconds)
    KEPT.write_text(json.dumps(kept))
    PAGE.write_text(page([Row(**row) for row in kept["rows"]], sum(kept["seconds"].values())))


def page(rows: list[Row], seconds: float) -> str:
    """Return the text of the page."""
    introduction = INTRODUCTION.format(
        when=datetime.now(UTC).strftime("%d %b %Y"), cores=os.cpu_count(), minutes=seconds / 60
    )
    lines = [
        f"| {row.fault} | {row.phase} | {row.end} | {row.seconds:.0f} | {row.requests} "
        f"| {row.failed} | {row.engine} |"
        for row in sorted(rows, key=lambda row: row.engine != "light")
    ]
    asked, failed = sum(row.requests for row in rows), sum(row.failed for row in rows)
    total = (
        f"{len(rows)} cases, {asked} requests, {failed} of them failed; half of the cases were "
        f"over within {statistics.median(row.seconds for row in rows):.0f} s."
    )
    return "\n".join([introduction, HEADER, *lines, "", total, "", NOTES])
