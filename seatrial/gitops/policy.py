"""What a commit may bring, and what of it the hosts would notice.

Gates judge a change, so they must not be loosened together with it: a merge may do either. What
loosens them, and what the settings protect, a second person approves.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import yaml

from seatrial.errors import SeatrialError
from seatrial.gitops import signatures
from seatrial.gitops.repository import Repository, Step
from seatrial.gitops.settings import Protected, Signers

# No host and no gate reads these. What is not named here is thought to matter: deploy.yml then
# finds out by itself whether anything moves.
UNSEEN = (
    "docs/*",
    "tests/*",
    "kernels/tests/*",
    "kernels/benchmarks/*",
    "kernels/compile_gate/*",
    "roles/*/README.md",
    "inventory/*/README.md",
    ".ci/*",
)
UNSEEN_AT_ROOT = ("*.md", "Makefile", "LICENSE*", ".gitignore", ".editorconfig", ".yamllint")
GATES = "gates/"
THRESHOLDS = "gates/thresholds/"
# At the root, pytest reads these before it reads a gate.
PYTEST = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini")
PYTEST_TOO = "pyproject.toml"
# Beside the gates, a new file that ends so is read by all of them.
READ_BY_ALL = (".py", ".ini", ".toml", ".cfg")
# Of the serving spec, what only steers or judges a rollout.
JUDGES, STEERS = "gates", ("gates", "rollout", "timeouts")
# Of a thresholds file, what decides nothing.
TELLS = ("schema", "model", "origin", "budget_seconds")
SHOWN = 4


class PolicyError(SeatrialError):
    """The commit brings together what must come apart."""


class Change(NamedTuple):
    """What one merge loosens, what it touches that is protected, and what it moves on hosts."""

    before: str
    commit: str
    loosened: list[str]
    protected: list[str]
    judged: list[str]


def is_unseen(path: str, fleet: str) -> bool:
    """Whether neither a host of the fleet nor its gates would notice a change of the file."""
    if path.startswith("inventory/"):
        return not path.startswith(f"inventory/{fleet}/") or path.endswith("/README.md")
    if "/" not in path:
        return any(fnmatch(path, pattern) for pattern in UNSEEN_AT_ROOT)
    return any(fnmatch(path, pattern) for pattern in UNSEEN)


def needs_rollout(paths: Sequence[str], fleet: str) -> list[str]:
    """Return those of the changed files that a host could notice."""
    return [path for path in paths if not path.startswith(GATES) and not is_unseen(path, fleet)]


def content(files: Mapping[str, str], fleet: str) -> str:
    """Return a digest of everything in a commit that hosts or gates can see."""
    seen = sorted(f"{path}\0{what}\0" for path, what in files.items() if not is_unseen(path, fleet))
    return hashlib.sha256("".join(seen).encode(errors="surrogateescape")).hexdigest()


def refuse_links(files: Mapping[str, str], fleet: str, commit: str) -> None:
    """Refuse a commit that leaves to something outside of it what hosts and gates read.

    Raises:
        PolicyError: naming the links and submodules.
    """
    found = [
        path
        for path, what in files.items()
        if not what.startswith("100") and not is_unseen(path, fleet)
    ]
    if found:
        raise PolicyError(
            f"{commit[:12]} holds links or submodules: {_some(found)}. What they lead to would "
            "change unseen: put the files themselves there, and push again"
        )


def changes(
    repository: Repository, old: str, new: str, fleet: str, paths: Sequence[str]
) -> list[Change]:
    """Return what each merge since ``old`` brings that somebody must look at twice.

    What a later one has taken back is not brought.
    """
    whole = Step(old, new, repository.changed(old, new))
    stays = set(whole.paths)
    found = [
        _change(
            repository, step._replace(paths=[p for p in step.paths if p in stays]), fleet, paths
        )
        for step in repository.steps(old, new)
    ]
    is_loosened = bool(_change(repository, whole, fleet, paths).loosened)
    return found if is_loosened else [one._replace(loosened=[]) for one in found]


def refuse_loosened(changes: Sequence[Change]) -> None:
    """Refuse a merge that loosens gates and changes what they judge.

    Raises:
        PolicyError: naming both, and how to go on.
    """
    for one in changes:
        if one.loosened and one.judged:
            raise PolicyError(
                f"{one.commit[:12]} loosens the gates that would judge it: {_some(one.loosened)}, "
                f"together with {_some(one.judged)}. Push a commit that takes the change back, let "
                "the gates change alone and approved, and merge the change after that"
            )


def approver(
    repository: Repository,
    changes: Sequence[Change],
    signer: signatures.Signer,
    rules: Protected,
    signers: Signers,
) -> str:
    """Return who approved what needs a second person; empty if nothing does.

    A tag on a merge approves it and what came before it.

    Raises:
        PolicyError: nobody has; the message says what to do, and which tags do not count and why.
    """
    asked = [one for one in changes if one.loosened or one.protected]
    if not asked:
        return ""
    people = {who for one in asked for who in repository.people(one.before, one.commit)}
    doubts: list[str] = []
    later = [one.commit for one in changes[changes.index(asked[-1]) :]]
    for commit in later:
        for tag in repository.approvals(commit):
            try:
                found = signatures.of_tag(repository, tag, commit, signers)
                _may_approve(found, signer, people, rules)
                _refuse_forge(found, signers)
            except SeatrialError as error:
                doubts.append(str(error))
            else:
                return found.name
    what = _some([*asked[-1].loosened, *asked[-1].protected])
    short = asked[-1].commit[:12]
    raise PolicyError(
        f"{short} needs a second person's approval ({what}): another allowed signer types "
        f"git tag -s approve/{short} {short} -m approved && git push origin approve/{short}"
        + (f". What is there does not count: {'; '.join(doubts)}" if doubts else "")
    )


def _may_approve(
    found: signatures.Signer, signer: signatures.Signer, people: set[str], rules: Protected
) -> None:
    if found.key == signer.key or found.addresses & signer.addresses:
        raise PolicyError(f"{found.name} approves what they signed themselves")
    if found.addresses & people:
        raise PolicyError(f"{found.name} approves what they wrote themselves")
    listed = {address.lower() for address in rules.approvers}
    if listed and not found.addresses & listed:
        raise PolicyError(f"{found.name} is not among the approvers in the settings")


def _refuse_forge(found: signatures.Signer, signers: Signers) -> None:
    if found.addresses & {address.lower() for address in signers.sign_for_others}:
        raise PolicyError(f"{found.name} signs for others, and is nobody's second person")


def _change(repository: Repository, step: Step, fleet: str, protected: Sequence[str]) -> Change:
    spec = f"inventory/{fleet}/group_vars/all/serving_spec.yml"
    # Asked of git only where it may differ: a branch may be thousands of commits ahead.
    commits = (step.before, step.commit) if spec in step.paths else ()
    old, new = (_spec(repository, commit, spec) for commit in commits) if commits else (None, None)
    judged = [path for path in needs_rollout(step.paths, fleet) if path != spec]
    if spec in step.paths and (
        old is None or new is None or _without(old, STEERS) != _without(new, STEERS)
    ):
        judged.append(spec)
    return Change(
        step.before,
        step.commit,
        [*_loosened(repository, step, old or {}, new or {}), *_loosened_programs(repository, step)],
        [path for path in step.paths if any(_is_under(path, one) for one in protected)],
        judged,
    )


def _loosened(
    repository: Repository, step: Step, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what of the spec's gates and of their thresholds became easier to pass."""
    before, after = _mapping(old.get(JUDGES)), _mapping(new.get(JUDGES))
    groups, kept = before.get("select"), after.get("select")
    gone = [
        name
        for name in (groups if isinstance(groups, list) else [])
        if name not in (kept if isinstance(kept, list) else [])
    ]
    yield from (f"gates.select loses {name}" for name in gone)
    if _is_less(after.get("cold_launches"), before.get("cold_launches")):
        yield "gates.cold_launches is lower"
    names = (before.get("thresholds"), after.get("thresholds"))
    files = {path for path in step.paths if path.startswith(THRESHOLDS)}
    pairs = {(path, path) for path in files}
    if names[0] != names[1]:
        pairs.add((f"{THRESHOLDS}{names[0]}.yml", f"{THRESHOLDS}{names[1]}.yml"))
    for ours, theirs in sorted(pairs):
        first, second = _yaml(repository, step.before, ours), _yaml(repository, step.commit, theirs)
        if first is None:
            continue  # nobody was judged by it before
        where = theirs.removeprefix(THRESHOLDS)
        if second is None:
            yield f"{where} is gone or cannot be read"
        else:
            yield from (f"{where}: {said}" for said in easier(first, second))


def _loosened_programs(repository: Repository, step: Step) -> Iterator[str]:
    """Yield changed gates: nobody but a person can say whether their code asks less now."""
    for path in step.paths:
        name = path.removeprefix(GATES)
        if path.startswith(GATES) and not path.startswith(THRESHOLDS):
            is_new_gate = not repository.file(step.before, path) and (
                name.startswith("test_") or not name.endswith(READ_BY_ALL)
            )
            if not is_new_gate and not name.endswith(".md"):
                yield f"{path} changes"
        elif path in PYTEST:
            yield f"{path} changes"
        elif path == PYTEST_TOO and len({_pytest(repository, one) for one in step[:2]}) > 1:
            yield f"{path} changes what pytest does"


def _pytest(repository: Repository, commit: str) -> str:
    """Return what ``pyproject.toml`` tells pytest, as text to compare."""
    try:
        value = tomllib.loads((repository.file(commit, PYTEST_TOO) or b"").decode())
    except ValueError:
        return "no TOML"
    return str(_mapping(value.get("tool")).get("pytest"))


def easier(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield how the thresholds ``new`` may be easier to pass than ``old``.

    A bound's name says its direction; of anything else that changes nobody knows, so it counts.
    """
    for key in dict.fromkeys((*old, *new)):
        where = f"{path}.{key}" if path else str(key)
        if not path and key in TELLS:
            continue
        before, after = old.get(key), new.get(key)
        if before == after or (key not in old and not _excuses(where)):
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from easier(before, after, where)
        elif not _is_harder(where, before, after):
            yield f"{where} {_short(before)} -> {_short(after)}"


def _excuses(where: str) -> bool:
    """Whether an entry that is added here lets something pass."""
    return where.partition(".")[0] in (
        "shadow",
        "not_applicable",
        "not_applicable_without_last_good",
        "not_applicable_to_combined",
    )


def _is_harder(where: str, before: Any, after: Any) -> bool:
    if _excuses(where) and (after is None or before is not None):
        return True  # an excuse less, or the same one in other words
    if where.endswith(("_min", ".samples", ".pairs", ".requests", ".repeats")):
        return _is_less(before, after)
    return where.endswith("_max") and _is_less(after, before)


def _is_less(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return numbers and not math.isnan(one) and not math.isnan(other) and one < other


def _spec(repository: Repository, commit: str, path: str) -> dict[str, Any] | None:
    spec = (_yaml(repository, commit, path) or {}).get("serving_spec")
    return spec if isinstance(spec, dict) else None


def _yaml(repository: Repository, commit: str, path: str) -> dict[str, Any] | None:
    """Return a YAML file's mapping as plain data; None if it is not there or is none."""
    raw = repository.file(commit, path)
    try:
        value = yaml.safe_load(raw) if raw is not None else None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return None  # PyYAML lets out what converting a value raises, such as the 99th of May
    return value if isinstance(value, dict) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _without(value: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _is_under(path: str, rule: str) -> bool:
    folder = rule.rstrip("/")
    return path == folder or path.startswith(f"{folder}/")


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _some(items: Sequence[str]) -> str:
    more = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {more} more" if more > 0 else "")
