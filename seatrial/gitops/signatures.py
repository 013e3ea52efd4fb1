"""Who signed a commit or a tag, asked of git, ssh-keygen and gpg.

The allowed signers lie on the control host. A commit says itself when it was made, and git checks
an SSH key against that time: a key whose time is over could sign with an old date. So a key must be
good at the commit's own time and now.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from seatrial.errors import SeatrialError
from seatrial.gitops.repository import Repository, RepositoryError
from seatrial.gitops.settings import Signers

SSH_GOOD = re.compile(r'^Good "git" signature for (.+) with \S+ key (\S+)$', re.MULTILINE)
SSH_KEY = re.compile(r'^Good "git" signature with \S+ key (\S+)$', re.MULTILINE)
PGP_STATUS = re.compile(r"^\[GNUPG:\] (\S+) ?(.*)$", re.MULTILINE)
ADDRESS = re.compile(rb"^(.*?) ?<([^<>]*)> -?\d+ [+-]\d{4}$")
# What gpg says of a signature that stands, but not for us. See gnupg's doc/DETAILS.
PGP_REFUSALS = {
    "BADSIG": "whose signature does not fit its content",
    "EXPKEYSIG": "with a GPG key whose time is over",
    "REVKEYSIG": "with a GPG key that was revoked",
    "EXPSIG": "with a signature whose time is over",
    "NO_PUBKEY": "with a GPG key that is not among the allowed signers",
    "ERRSIG": "with a signature that gpg cannot check",
}
SECONDS = 30


class SignatureError(SeatrialError):
    """It is not signed by an allowed signer; the message says what it is signed by."""


class Signer(NamedTuple):
    """Who signed: the address to call them by, all their addresses, and the key."""

    name: str
    addresses: frozenset[str]
    key: str


class _Object(NamedTuple):
    """What matters of a signed commit or tag."""

    what: Literal["commit", "tag"]
    name: str
    shown: str
    signature: str
    people: dict[str, str]
    target: str


def of_commit(repository: Repository, commit: str, signers: Signers) -> Signer:
    """Return who signed ``commit``, if they may, and it is their own.

    Raises:
        SignatureError: it is not signed, not by an allowed signer, or names somebody else.
    """
    found = _commit(commit, repository.read("commit", commit))
    signer = _signer(repository, found, signers)
    if not signer.addresses & {address.lower() for address in signers.sign_for_others}:
        for role, address in found.people.items():
            if address not in signer.addresses:
                raise SignatureError(
                    f"{found.shown} names {address or 'nobody'} as its {role}, and is signed by "
                    f"{signer.name}: whoever signs must be who commits; merge it with a commit of "
                    "your own"
                )
    return signer


def of_tag(repository: Repository, name: str, commit: str, signers: Signers) -> Signer:
    """Return who signed the annotated tag ``name`` on ``commit``.

    Raises:
        SignatureError: as for a commit; or the tag was made under another name.
    """
    found = _tag(name, repository.read("tag", name))
    signer = _signer(repository, found, signers)
    if found.target != commit or found.people["name"] != name.removeprefix("refs/tags/"):
        raise SignatureError(f"{found.shown} was made as {found.people['name']} on {found.target}")
    if found.people["tagger"] not in signer.addresses:
        tagger = found.people["tagger"] or "nobody"
        raise SignatureError(f"{found.shown} names {tagger}, and is signed by {signer.name}")
    return signer


def _signer(repository: Repository, found: _Object, signers: Signers) -> Signer:
    if not found.signature:
        raise SignatureError(
            f"{found.shown} is not signed: sign it (git {found.what} -S) and push again"
            if found.what == "commit"
            else f"{found.shown} is not signed: make it again with git tag -s"
        )
    if found.signature.startswith("-----BEGIN SSH SIGNATURE-----"):
        return _by_ssh(repository, found, signers.ssh)
    if found.signature.startswith("-----BEGIN PGP SIGNATURE-----"):
        return _by_gpg(repository, found, signers.gpg_home)
    raise SignatureError(f"{found.shown} is signed in a way that is neither SSH nor GPG")


def _by_ssh(repository: Repository, found: _Object, allowed: Path | None) -> Signer:
    if allowed is None:
        raise SignatureError(f"{found.shown} is signed by SSH, and no SSH signers are allowed")
    if not allowed.is_file():
        raise SignatureError(f"{allowed}: should hold the allowed signers, and is not there")
    said = repository.verify(
        found.what,
        found.name,
        {},
        *("-c", f"gpg.ssh.allowedSignersFile={allowed}", "-c", "gpg.ssh.program=ssh-keygen"),
    )
    good = SSH_GOOD.search(said.err)
    if said.status or not good:
        key, why = SSH_KEY.search(said.err), _reason(said.err)
        if why:
            raise SignatureError(
                f"{found.shown} is signed with a key that was not good then: {why}"
            )
        if not key:
            raise SignatureError(
                f"{found.shown} carries an SSH signature that does not fit its content"
            )
        raise SignatureError(
            f"{found.shown} is signed with the SSH key {key[1]}, which is not in {allowed}"
        )
    name, key_id = good[1], good[2]
    with tempfile.NamedTemporaryFile("w", suffix=".sig") as file:
        file.write(found.signature)
        file.flush()
        present = _ask("ssh-keygen", "-Y", "find-principals", "-s", file.name, "-f", str(allowed))
    names = present.stdout.split("\n") if present.returncode == 0 else []
    if name not in names:
        why = _reason(present.stderr) or "it is not among the allowed signers"
        raise SignatureError(
            f"{found.shown} is signed by {name} with a key that is not good now: {why}"
        )
    return Signer(name, frozenset(one.lower() for one in names if one), key_id)


def _by_gpg(repository: Repository, found: _Object, home: Path | None) -> Signer:
    if home is None:
        raise SignatureError(f"{found.shown} is signed by GPG, and no GPG signers are allowed")
    said = repository.verify(
        found.what,
        found.name,
        {"GNUPGHOME": str(home)},
        *("-c", "gpg.program=gpg", "-c", "gpg.minTrustLevel=undefined"),
    )
    status = dict(PGP_STATUS.findall(said.err))
    for word, why in PGP_REFUSALS.items():
        if word in status:
            key = status[word].split()[0] if status[word] else ""
            raise SignatureError(f"{found.shown} is signed {why} ({key or 'unknown'})")
    if said.status or "GOODSIG" not in status or "VALIDSIG" not in status:
        raise SignatureError(f"{found.shown} carries a GPG signature that gpg does not accept")
    key = status["VALIDSIG"].split()[-1]
    addresses = _gpg_addresses(home, key)
    if not addresses:
        raise SignatureError(
            f"{found.shown} is signed with the GPG key {key}, which has no address"
        )
    return Signer(addresses[0], frozenset(addresses), key)


def _gpg_addresses(home: Path, key: str) -> list[str]:
    """Return the addresses in the key's user ids, without those that were revoked or are over."""
    listed = _ask("gpg", "--homedir", str(home), "--batch", "--with-colons", "--list-keys", key)
    if listed.returncode:
        raise RepositoryError(f"{home}: gpg cannot list the key {key} ({listed.stderr.strip()})")
    fields = [line.split(":") for line in listed.stdout.splitlines()]
    ids = [one[9] for one in fields if one[0] == "uid" and one[1] not in ("r", "e", "i")]
    return [found[1].lower() for one in ids if (found := re.search(r"<([^<>]+)>\s*$", one))]


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RepositoryError(f"{words[0]} gave no answer within {SECONDS} s") from None


def _commit(name: str, raw: bytes) -> _Object:
    header = raw.partition(b"\n\n")[0].decode(errors="surrogateescape").split("\n")
    fields: list[tuple[str, str]] = []
    for line in header:
        if line.startswith(" ") and fields:
            fields[-1] = (fields[-1][0], f"{fields[-1][1]}\n{line[1:]}")
        else:
            key, _, value = line.partition(" ")
            fields.append((key, value))
    signatures = [value for key, value in fields if key.startswith("gpgsig")]
    if len(signatures) > 1:
        raise SignatureError(
            f"{name[:12]} carries {len(signatures)} signatures, and should carry one"
        )
    people = {key: _address(value) for key, value in fields if key in ("author", "committer")}
    signature = f"{signatures[0]}\n" if signatures else ""
    return _Object("commit", name, name[:12], signature, people, name)


def _tag(name: str, raw: bytes) -> _Object:
    head, _, body = raw.decode(errors="surrogateescape").partition("\n\n")
    fields = dict(line.partition(" ")[::2] for line in head.split("\n"))
    start = re.search(r"^-----BEGIN (SSH|PGP) SIGNATURE-----$", body, re.MULTILINE)
    people = {"tagger": _address(fields.get("tagger", "")), "name": fields.get("tag", "")}
    shown = f"the tag {name.removeprefix('refs/tags/')}"
    signature = body[start.start() :] if start else ""
    return _Object("tag", name, shown, signature, people, fields.get("object", ""))


def _address(person: str) -> str:
    found = ADDRESS.match(person.encode(errors="surrogateescape"))
    return found[2].decode(errors="replace").lower() if found else ""


def _reason(said: str) -> str:
    """Return what ssh-keygen says about a key that it knows and does not accept."""
    found = re.search(
        r": key ((?:has expired|is not yet valid|is not permitted).*)$", said, re.MULTILINE
    )
    return found[1] if found else ""
