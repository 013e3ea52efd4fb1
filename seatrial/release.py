"""Releases: the rendered content for one host, and ``release.json``, the gates' contract."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.errors import SeatrialError
from seatrial.spec import Scalar, ServingSpec

UNITS = {
    "prefill": "sglang-prefill.service",
    "decode": "sglang-decode.service",
    "combined": "sglang-combined.service",
    "router": "sglang-router.service",
}
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class ReleaseError(SeatrialError):
    """A release cannot be made, or a file that should describe one does not."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReleasedModel(_Strict):
    """The weights that the release serves."""

    name: str
    path: str
    revision: str


class ReleasedServer(_Strict):
    """One process of the release: what its command line and environment must be."""

    argv: list[str]
    env: dict[str, str]
    port: int


class Release(_Strict):
    """The content of ``release.json``."""

    schema_: Literal[1] = Field(alias="schema")
    digest: Digest
    commit: str
    build: Digest
    sglang: str
    platform: str
    model: ReleasedModel
    spec_sha256: str
    index_topk: int
    index_key_dtype: str
    patches: list[str]
    kernels_sha256: str
    units: dict[str, str]
    servers: dict[str, ReleasedServer]


class Command(NamedTuple):
    """What a rendered unit starts."""

    argv: list[str]
    environment_files: list[str]


def release_digest(
    spec: ServingSpec, build: str, addresses: Mapping[str, str], sources: Iterable[Path]
) -> str:
    """Name a release by everything it is rendered from (16 hex digits of a SHA-256).

    The same on every host of a fleet; a commit that touches none of its inputs makes the same name.

    Parameters
    ----------
    addresses
        The address of every GPU host, by inventory name: units name them.
    sources
        The templates, and the role's own variables that fill them.
    """
    hasher = hashlib.sha256()
    plain = {"spec": spec.sha256(), "build": build, "addresses": dict(addresses)}
    hasher.update(json.dumps(plain, sort_keys=True).encode())
    for path in sorted(sources, key=lambda path: path.name):
        hasher.update(f"\n{path.name}\n".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


def command_of(unit: str) -> Command:
    """Read the command line and environment files out of a rendered unit.

    systemd joins lines that end in a backslash, splits at blanks outside of quotes, and reads
    ``%%`` and ``$$`` as the plain character (systemd.service(5), "Command lines").

    Raises
    ------
    ReleaseError
        If the unit has not exactly one ``ExecStart``.
    """
    lines = unit.replace("\\\n", " ").splitlines()
    starts = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    if len(starts) != 1:
        raise ReleaseError(f"a unit should have one ExecStart, this one has {len(starts)}")
    argv = [part.replace("%%", "%").replace("$$", "$") for part in shlex.split(starts[0])]
    files = [
        line.removeprefix("EnvironmentFile=")
        for line in lines
        if line.startswith("EnvironmentFile=")
    ]
    return Command(argv, files)


def environment_of(text: str) -> dict[str, str]:
    """Read ``NAME="value"`` lines of a rendered environment file."""
    result = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            result[name] = "".join(shlex.split(value))
    return result


def systemd_quote(value: Scalar) -> str:
    """Quote one word for a unit's command line.

    Single quotes keep JSON readable on the host; ``%`` and ``$`` are systemd's own characters.
    """
    text = str(value).replace("%", "%%").replace("$", "$$")
    return shlex.quote(text)


def flag_words(args: Mapping[str, Any]) -> list[str]:
    """Turn an argument dictionary into ready words, one flag with its value each.

    ``true`` is a bare flag, ``false`` leaves it out, a list is several values, a dictionary JSON.
    """
    words = []
    for flag, value in args.items():
        if value is False:
            continue
        if value is True:
            words.append(f"--{flag}")
        elif isinstance(value, list):
            words.append(" ".join([f"--{flag}", *(systemd_quote(item) for item in value)]))
        elif isinstance(value, dict):
            words.append(f"--{flag} {systemd_quote(json.dumps(value, sort_keys=True))}")
        else:
            words.append(f"--{flag} {systemd_quote(value)}")
    return words


def describe(
    spec: ServingSpec,
    files: Mapping[str, str],
    *,
    digest: str,
    commit: str,
    build: Mapping[str, Any],
) -> str:
    """Return the text of ``release.json`` for one host.

    Parameters
    ----------
    files
        The rendered content: ``units/<unit>`` and ``env/<role>.env``. The command lines are read
        out of the units, so what the gates compare is what systemd starts.
    build
        The content of the build's ``build.json``.
    """
    servers, units = {}, {}
    for role, unit in UNITS.items():
        text = files.get(f"units/{unit}")
        if text is None:
            continue
        units[unit] = hashlib.sha256(text.encode()).hexdigest()
        servers[role] = ReleasedServer(
            argv=command_of(text).argv,
            env=environment_of(files[f"env/{role}.env"]),
            port=spec.server(role).port,
        )
    release = Release(
        schema=1,
        digest=digest,
        commit=commit,
        build=build["digest"],
        sglang=spec.engine.sglang,
        platform=spec.engine.platform,
        model=ReleasedModel(**spec.model.model_dump()),
        spec_sha256=spec.sha256(),
        index_topk=spec.index_topk,
        index_key_dtype=spec.index_key_dtype,
        patches=list(spec.engine.patches),
        kernels_sha256=build["kernels"]["sha256"],
        units=units,
        servers=servers,
    )
    return json.dumps(release.model_dump(by_alias=True), indent=2, sort_keys=True) + "\n"


def parse(text: str, source: str) -> Release:
    """Read the text of a ``release.json`` that came from ``source``.

    Raises
    ------
    ReleaseError
        If it is not the JSON that the schema asks for.
    """
    try:
        return Release.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ReleaseError(
            f"{source}: {where}: {first['msg']}; stage the release again with deploy.yml"
        ) from None


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, names_only: bool = False
) -> list[str]:
    """Say what differs between two ``release.json``, one short phrase each, as people name it.

    With ``names_only`` the values of environment variables stay out.
    """
    if not old or not new:
        return ["everything: there was no release before"] if new else []
    found = [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in ("index_topk", "index_key_dtype", "sglang", "build", "patches", "model")
        if old.get(key) != new.get(key)
    ]
    servers, others = old.get("servers", {}), new.get("servers", {})
    for role in sorted({*servers, *others}):
        before, after = servers.get(role, {}), others.get(role, {})
        ours, theirs = flags_of(before.get("argv", [])), flags_of(after.get("argv", []))
        found += [
            f"{role} --{flag} {ours.get(flag, 'absent')} -> {theirs.get(flag, 'absent')}"
            for flag in sorted({*ours, *theirs})
            if ours.get(flag) != theirs.get(flag) and flag != "json-model-override-args"
        ]
        ours, theirs = before.get("env", {}), after.get("env", {})
        found += [
            f"{role} environment {name}"
            if names_only
            else f"{role} {name} {ours.get(name, 'absent')} -> {theirs.get(name, 'absent')}"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
    return found or ["the templates alone"]


def flags_of(argv: list[str]) -> dict[str, str]:
    """Return ``{flag: its values}`` of a command line."""
    result: dict[str, str] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag = word.removeprefix("--")
            result[flag] = ""
        elif flag:
            result[flag] = f"{result[flag]} {word}".strip()
    return result


def commit_of(repository: Path) -> str:
    """Return the commit (40 hex digits) that the clean work tree of ``repository`` is at.

    Raises
    ------
    ReleaseError
        If it is no git work tree, has no commit, or has changes that are not committed.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(repository), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(
                f"{repository}: should be a git work tree with a commit: {done.stderr.strip()}"
            )
        return done.stdout

    commit = git("rev-parse", "HEAD").strip()
    dirty = git("status", "--porcelain").splitlines()
    if dirty:
        shown = ", ".join(line[3:] for line in dirty[:5])
        raise ReleaseError(
            f"{repository}: should have no uncommitted change, has {len(dirty)} ({shown}); "
            "commit them or take them back: a release is named by a commit"
        )
    return commit
