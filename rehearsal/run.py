"""The rehearsal: a real rollout on test hosts of this machine, and what a bad merge comes to.

``make rehearsal [SCENARIO=bad-topk] [KEEP=1]`` runs this. It clones the work tree, boots the
hosts, and types what people type: ``ansible-playbook``. A scenario is one more commit and deploy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypedDict

import yaml

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent
sys.path.insert(0, str(SOURCE))

from seatrial import ledger

HOSTS = HERE / "hosts.sh"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "seatrial"
# Which rehearsal hosts of this machine are meant, as hosts.sh says.
BERTH = os.environ.get("SEATRIAL_BERTH", "")
STATE = Path(f"/var/lib/seatrial-rehearsal{BERTH}")
WORK = CACHE / "rehearsal"
REPOSITORY = WORK / "repository"
API_KEY_FILE = WORK / "api_key"
LEDGER = Path.home() / ".local/state/seatrial/rehearsal/ledger.jsonl"
SPEC = Path("inventory/rehearsal/group_vars/all/serving_spec.yml")
ENTRY = "http://10.77.0.10:8080"
# The phases of a rollout that wait for SGLang, and not for Ansible.
WAITING = {"engines starting": ("activate", "revert"), "gates": ("gate", "answers")}
IDENTITY = ("-c", "user.name=Rehearsal", "-c", "user.email=rehearsal@localhost")


class Scenario(TypedDict):
    """A bad merge: its message, what it edits in the spec, and what should come of it."""

    merge: str
    edit: dict[str, object]
    expect: str


class Play(NamedTuple):
    """A run of a playbook, and when it was."""

    playbook: str
    begin: datetime
    end: datetime


def main() -> int:
    """Boot, deploy, merge what the scenario says, deploy again, tell, and clean up."""
    given = parse()
    scenario = scenarios()[given.scenario] if given.scenario else None
    started = time.monotonic()
    plays: list[Play] = []
    status = 1
    make_api_key()
    try:
        say("clone the work tree")
        clone(SOURCE, REPOSITORY)
        subprocess.run([HOSTS, "down"], check=True)  # what an earlier rehearsal kept
        say("boot the hosts and roll the release out (ansible-playbook playbooks/rehearse.yml)")
        status = ansible(
            plays, "playbooks/rehearse.yml", "-e", f"rehearse_api_key_file={API_KEY_FILE}"
        )
        if status == 0:
            say("ask the entry for an answer")
            status = ask_the_entry()
        if status == 0 and scenario:
            say(f"merge: {scenario['merge']} ({edit_of(scenario)}); expected: {scenario['expect']}")
            commit(REPOSITORY, scenario["merge"], scenario["edit"])
            say("roll it out (ansible-playbook deploy.yml)")
            status = ansible(plays, "deploy.yml")
            say("ask the entry for an answer")
            status = status or 3
            ask_the_entry()
    finally:
        tell(status, plays, time.monotonic() - started)
        if given.keep:
            print(how_to_look_around())
        else:
            say("take the hosts down")
            subprocess.run([HOSTS, "down"], check=False)
    return status


def parse() -> argparse.Namespace:
    """Read the command line; hold the lock that lets one rehearsal run on this machine."""
    parser = argparse.ArgumentParser(description="A real rollout on test hosts of this machine.")
    parser.add_argument("--scenario", choices=[*scenarios()], help="a bad merge to try afterwards")
    parser.add_argument("--keep", action="store_true", help="leave the hosts up")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.alone:
        os.execv(HOSTS, [str(HOSTS), "alone", sys.executable, *sys.argv, "--alone"])  # noqa: S606
    return given


def scenarios() -> dict[str, Scenario]:
    """Return the bad merges by name."""
    found: dict[str, Scenario] = yaml.safe_load((HERE / "scenarios.yml").read_text())
    return found


def clone(source: Path, target: Path) -> None:
    """Make ``target`` a clone of the checkout; what is not committed there becomes a commit here.

    A release is named by a commit, so a rehearsal of unfinished work needs one too.
    """
    subprocess.run(["rm", "-rf", target], check=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    git("clone", "--quiet", source, target)
    listed = git("-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = [name for name in listed.split("\0") if name]
    present = [name for name in names if (source / name).is_file()]
    copy = subprocess.run(
        ["tar", "-C", source, "-cf", "-", "--null", "-T", "-"],
        input="\0".join(present).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in git("-C", target, "ls-files", "-z").split("\0"):
        if name and name not in present:
            (target / name).unlink()
    subprocess.run(["tar", "-C", target, "-xf", "-"], input=copy.stdout, check=True)
    git("-C", target, "add", "-A")
    if git("-C", target, "status", "--porcelain"):
        git("-C", target, *IDENTITY, "commit", "--quiet", "-m", "Snapshot of uncommitted changes")


def commit(repository: Path, message: str, edit: Mapping[str, object]) -> None:
    """Change single values of the serving spec, keeping its comments, and commit."""
    path = repository / SPEC
    text = path.read_text()
    for key, value in edit.items():
        text, count = re.subn(rf"(?m)^(  {key}: )\S+", rf"\g<1>{value}", text)
        if count != 1:
            raise SystemExit(f"{SPEC}: should have one line '  {key}: ...', has {count}")
    path.write_text(text)
    git("-C", repository, *IDENTITY, "commit", "--quiet", "-a", "-m", message)


def make_api_key() -> None:
    """Draw the key that the entry asks for, once for all rehearsals."""
    API_KEY_FILE.parent.mkdir(parents=True, exist_ok=True)
    drawn = API_KEY_FILE.with_name(f"{API_KEY_FILE.name}.{os.getpid()}")
    drawn.touch(mode=0o600)
    drawn.write_text(secrets.token_urlsafe(24) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(drawn, API_KEY_FILE)
    drawn.unlink()


def ansible(plays: list[Play], playbook: str, *words: str) -> int:
    """Run a playbook of the clone as people do, note its times, and return its exit status."""
    begin = ledger.now()
    program = Path(sys.executable).with_name("ansible-playbook")
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = [str(program), "-i", "inventory/rehearsal", playbook, *words]
    status = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
    plays.append(Play(playbook, begin, ledger.now()))
    return status


def ask_the_entry() -> int:
    """Send one plain request through the entry, as a user would; print what came back."""
    body = '{"model": "rehearsal", "messages": [{"role": "user", "content": "The secret code is'
    body += ' HELLO-7. What is the secret code?"}], "max_tokens": 16, "temperature": 0}'
    done = subprocess.run(
        [
            *(
                HOSTS,
                "in",
                "curl",
                "--silent",
                "--show-error",
                "--fail-with-body",
                "--max-time",
                "60",
            ),
            *("--header", f"Authorization: Bearer {API_KEY_FILE.read_text().strip()}"),
            *("--header", "Content-Type: application/json", "--data", body),
            f"{ENTRY}/v1/chat/completions",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    answer = re.search(r'"content":\s*"([^"]*)"', done.stdout)
    print(f"    {answer.group(1) if answer else done.stdout + done.stderr}")
    return done.returncode


def tell(status: int, plays: list[Play], seconds: float) -> None:
    """Print what a person wants to know at the end: the last rollout, and where the time went."""
    events = ledger.read(LEDGER)
    for one in plays:
        rollouts = dict.fromkeys(e.rollout for e in events if one.begin <= e.time <= one.end)
        for rollout in rollouts:
            print("\n" + ledger.summary(ledger.read(LEDGER, rollout)))
    print()
    for one in plays:
        phases = ledger.phases([e for e in events if one.begin <= e.time <= one.end])
        waited = {
            name: sum(phase.seconds for phase in phases if phase.name in names)
            for name, names in WAITING.items()
        }
        total = (one.end - one.begin).total_seconds()
        shares = "".join(f", {name} {spent:.0f} s" for name, spent in waited.items() if spent)
        rest = total - sum(waited.values())
        print(f"{one.playbook}: {total:.0f} s{shares}, all else {rest:.0f} s")
    print(f"rehearsal: exit status {status} after {seconds:.0f} s\n")


def how_to_look_around() -> str:
    """Return lines to type while the hosts stay up."""
    key = f'"Authorization: Bearer $(cat {API_KEY_FILE})"'
    question = '{"model": "rehearsal", "messages": [{"role": "user", "content": "Hello?"}]}'
    return f"""
The hosts are up. Things to try (rehearsal/hosts.sh in ... runs a command in their network):

  export PATH="{Path(sys.executable).parent}:$PATH"
  rehearsal/hosts.sh in curl -H {key} \\
    -H 'Content-Type: application/json' -d '{question}' {ENTRY}/v1/chat/completions
  rehearsal/hosts.sh ssh gpu-a journalctl -u sglang-prefill -n 20
  rehearsal/hosts.sh ssh gpu-a /opt/seatrial/bin/seatrial-host status
  (cd {REPOSITORY} && ansible-playbook -i inventory/rehearsal playbooks/gate.yml)
  (cd {REPOSITORY} && ansible-playbook -i inventory/rehearsal rollback.yml)
  rehearsal/hosts.sh in .venv/bin/fab --list
  rehearsal/hosts.sh down
"""


def edit_of(scenario: Scenario) -> str:
    """Name the edit of a scenario in words."""
    return ", ".join(f"{key}: {value}" for key, value in scenario["edit"].items())


def git(*words: object) -> str:
    """Run git and return what it prints."""
    done = subprocess.run(
        ["git", *(str(word) for word in words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def say(words: str) -> None:
    """Print a step of the story."""
    print(f"\n=== {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
