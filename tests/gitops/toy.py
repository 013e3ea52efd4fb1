"""The toy fleet's playbooks: one host, which is a file; the ledger is the real one.

    toy.py deploy|rollback|look TREE [RELEASE]

What the real playbooks do, as far as a reconciler can tell: deploy closes dead rollouts, begins,
goes through phases, judges, and ends promoted or reverted; a file `hold-<phase>` in HOME makes it
wait there. The spec says what goes wrong: `index_topk` below 1024 fails a gate.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from seatrial import ledger
from seatrial.report import GateResult, Report
from seatrial.verdict import Verdict

HOME = Path(os.environ["HOME"])
HOST = HOME / "host.json"
STATE = HOME / ".local/state/seatrial/toy"
LEDGER = STATE / "ledger.jsonl"
GOOD = 1024


def main(verb: str, tree: Path, more: str = "") -> str:
    """Do what the playbook asks for, and return a sentence if it failed."""
    spec = yaml.safe_load((tree / "inventory/toy/group_vars/all/serving_spec.yml").read_text())
    wanted: dict[str, Any] = spec["serving_spec"]
    commit = git(tree, "rev-parse", "HEAD")
    if git(tree, "status", "--porcelain"):
        return "the work tree is not clean"
    if "wrong" in wanted:
        return "wrong: should be absent: the serving spec has no such key"
    release = hashlib.sha256(str(wanted["index_topk"]).encode()).hexdigest()[:16]
    if verb == "look":
        return look(commit, release, Path(more) / "reports/drift/drift.json")
    if verb == "rollback":
        return roll("rollback", more or host()["last_good"], GOOD)
    return roll(commit, release, wanted["index_topk"])


def roll(commit: str, release: str, index_topk: int) -> str:
    """Move the host to a release, or back."""
    if (HOME / "locked").exists():
        return "toy: the fleet is locked by bob on elsewhere for rollout abc. Wait for its end"
    now, events = host(), ledger.read(LEDGER)
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{commit[:8]}"
    for dead in ledger.unfinished(events):
        say(dead, "end", outcome="died", reason="")
    if now["current"] == now["last_good"] == release:
        return ""
    say(name, "begin", commit=commit, release=release, previous=now["last_good"], found="")
    phase(name, "drain")
    put(current=release, moves=now["moves"] + 1)
    phase(name, "activate")
    phase(name, "gate")
    if index_topk < GOOD:
        say(name, "gates", report=report(index_topk).model_dump(by_alias=True, mode="json"))
        reason = f"window: FAIL. Release {now['last_good']} serves again."
        is_back = not (HOME / "no-way-back").exists()
        if is_back:
            put(current=now["last_good"])
        outcome = "reverted" if now["last_good"] and is_back else "failed"
        say(name, "end", outcome=outcome, reason=reason)
        return reason
    phase(name, "promote")
    put(last_good=release)
    phase(name, "record")
    closed = (HOME / "closed").read_text() if (HOME / "closed").exists() else ""
    say(name, "end", outcome="promoted", reason="", closed=closed)
    return closed


def look(commit: str, release: str, path: Path) -> str:
    """Write what differs, as drift.yml does."""
    now = host()
    difference = {
        "kind": "release",
        "host": "toy",
        "what": "current",
        "git": release,
        "found": now["current"],
        "todo": "ansible-playbook deploy.yml",
    }
    changed = now["current"] != release
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "commit": commit,
        "release": release,
        "differences": [difference] if changed else [],
        "changes": {"toy": ["index_topk 1 -> 2"]} if changed else {},
    }
    path.write_text(json.dumps(found))
    return "drift: it differs" if changed else ""


def report(index_topk: int) -> Report:
    """Return what the gates measured."""
    gate = GateResult(
        id="test_needle_is_recalled",
        group="window",
        claim="A needle is recalled.",
        verdict=Verdict.FAIL,
        measured=index_topk / 10240,
        bound=0.1,
        unit="recalled",
        samples=5,
    )
    return Report(
        verdict=Verdict.FAIL,
        cell="one",
        release=None,
        commit=None,
        thresholds="toy",
        seed=1,
        started="",
        seconds=1.0,
        budget_seconds={},
        server_arguments={},
        gates=[gate],
        not_selected=[],
        next="",
    )


def phase(rollout: str, name: str) -> None:
    """Record a phase, and wait in it for as long as somebody wants."""
    ledger.append(
        LEDGER,
        ledger.Event(time=ledger.now(), rollout=rollout, event="phase", cell="one", phase=name),
    )
    while (HOME / f"hold-{name}").exists():
        time.sleep(0.05)


def say(rollout: str, event: Any, **data: Any) -> None:
    """Add a line to the ledger."""
    ledger.append(LEDGER, ledger.Event(time=ledger.now(), rollout=rollout, event=event, data=data))


def host() -> dict[str, Any]:
    """Return what the host runs, and how often it was moved."""
    known: dict[str, Any] = {"current": "", "last_good": "", "moves": 0}
    return known | (json.loads(HOST.read_text()) if HOST.exists() else {})


def put(**changes: Any) -> None:
    """Change the host."""
    HOST.write_text(json.dumps(host() | changes))


def git(tree: Path, *words: str) -> str:
    """Ask git."""
    command = ["git", "-C", str(tree), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    failure = main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    print(failure)
    sys.exit(1 if failure else 0)
