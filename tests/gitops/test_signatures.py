"""Who may order a rollout: real keys, real signatures, and what is wrong with them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.gitops import signatures
from seatrial.gitops.repository import Repository, RepositoryError
from seatrial.gitops.settings import Signers
from seatrial.gitops.signatures import SignatureError
from tests.gitops.people import Person, allow, gpg_person, run, ssh_person

LONG_AGO = "2020-06-01T12:00:00Z"


class Signed:
    """A repository that somebody pushed to, and the signers that are allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work, self.origin = folder / "work", folder / "origin.git"
        self.allowed = folder / "signers"
        run("git", "init", "-q", "--bare", "-b", "main", self.origin)
        run("git", "init", "-q", "-b", "main", self.work)
        self.gpg_home: Path | None = None
        self.sign_for_others: list[str] = []

    @property
    def signers(self) -> Signers:
        """The settings."""
        return Signers(
            ssh=self.allowed if self.allowed.exists() else None,
            gpg_home=self.gpg_home,
            sign_for_others=self.sign_for_others,
        )

    @property
    def repository(self) -> Repository:
        """What the reconciler sees of it."""
        found = Repository(self.folder / "state", str(self.origin), "main", 30)
        run("git", "push", "-q", "--force", "--tags", self.origin, "HEAD:main", cwd=self.work)
        found.fetch()
        return found

    def of_head(self) -> signatures.Signer:
        """Return who signed the branch's commit."""
        repository = self.repository
        return signatures.of_commit(repository, repository.head(), self.signers)


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    """Return a repository without a commit."""
    (tmp_path / "r").mkdir()
    return Signed(tmp_path / "r")


def test_a_commit_of_an_allowed_ssh_key_names_its_signer(signed: Signed, alice: Person) -> None:
    """The signer is the principal; the key is the one that ssh-keygen shows."""
    allow(signed.allowed, f"{alice.address} {alice.key}")
    alice.commit(signed.work)
    found = signed.of_head()
    assert found.name == alice.address
    assert found.key.startswith("SHA256:")


def test_a_commit_of_an_allowed_gpg_key_names_its_signer(signed: Signed, keys: Path) -> None:
    """The key's user ids say whose it is."""
    carol = gpg_person(keys / "carol", "carol")
    signed.gpg_home = keys / "carol"
    carol.commit(signed.work)
    assert signed.of_head() == (carol.address, frozenset({carol.address}), carol.key)


def test_a_merge_signed_by_an_allowed_key_passes_whatever_it_merges(
    signed: Signed, alice: Person, mallory: Person
) -> None:
    """Who signs the merge answers for it."""
    allow(signed.allowed, f"{alice.address} {alice.key}")
    alice.commit(signed.work)
    mallory.git(signed.work, "switch", "-q", "-c", "topic")
    mallory.commit(signed.work, "Topic", "--no-gpg-sign")
    alice.git(signed.work, "switch", "-q", "main")
    alice.git(signed.work, "merge", "-q", "--no-ff", "-S", "-m", "Merge topic", "topic")
    assert signed.of_head().name == alice.address


Spoil = Callable[[Signed, Person, Person], None]


def unsigned(signed: Signed, alice: Person, mallory: Person) -> None:
    """Alice forgets to sign."""
    alice.commit(signed.work, "Change", "--no-gpg-sign")


def unknown(signed: Signed, alice: Person, mallory: Person) -> None:
    """Somebody signs whom nobody allowed."""
    mallory.commit(signed.work)


def borrowed_name(signed: Signed, alice: Person, mallory: Person) -> None:
    """Somebody commits as Alice, and signs with another key."""
    mallory.commit(signed.work, **names("COMMITTER", alice), **names("AUTHOR", alice))


def tampered(signed: Signed, alice: Person, mallory: Person) -> None:
    """The message of a signed commit is changed, its signature is kept."""
    alice.commit(signed.work, "Good")
    raw = run("git", "cat-file", "commit", "HEAD", cwd=signed.work)
    words = ("git", "hash-object", "-t", "commit", "-w", "--stdin")
    spoilt = run(*words, cwd=signed.work, data=raw.replace("Good", "Evil") + "\n")
    run("git", "reset", "-q", "--hard", spoilt, cwd=signed.work)


def expired(signed: Signed, alice: Person, mallory: Person) -> None:
    """The key was good once, and the commit says that it was made then."""
    allow(signed.allowed, f'{alice.address} valid-before="20210101" {alice.key}')
    alice.commit(signed.work, **dates(LONG_AGO))


def expired_and_says_so(signed: Signed, alice: Person, mallory: Person) -> None:
    """The key was good once, and the commit is of today."""
    allow(signed.allowed, f'{alice.address} valid-before="20210101" {alice.key}')
    alice.commit(signed.work)


def not_yet_valid(signed: Signed, alice: Person, mallory: Person) -> None:
    """The commit says that it is older than the key."""
    allow(signed.allowed, f'{alice.address} valid-after="20210101" {alice.key}')
    alice.commit(signed.work, **dates(LONG_AGO))


def for_files_only(signed: Signed, alice: Person, mallory: Person) -> None:
    """The key may sign files, not commits."""
    allow(signed.allowed, f'{alice.address} namespaces="file" {alice.key}')
    alice.commit(signed.work)


def forged_committer(signed: Signed, alice: Person, mallory: Person) -> None:
    """An allowed signer commits under another's name."""
    alice.commit(signed.work, **names("COMMITTER", mallory))


def forged_author(signed: Signed, alice: Person, mallory: Person) -> None:
    """An allowed signer says that another wrote it."""
    alice.commit(signed.work, **names("AUTHOR", mallory))


def two_signatures(signed: Signed, alice: Person, mallory: Person) -> None:
    """A commit carries a second signature."""
    alice.commit(signed.work)
    raw = run("git", "cat-file", "commit", "HEAD", cwd=signed.work)
    header = re.search(r"gpgsig (.|\n)*?\n(?! )", raw)
    assert header
    doubled = raw.replace(header[0], header[0] + header[0].replace("gpgsig", "gpgsig-sha256"))
    words = ("git", "hash-object", "-t", "commit", "-w", "--stdin")
    spoilt = run(*words, cwd=signed.work, data=f"{doubled}\n")
    run("git", "reset", "-q", "--hard", spoilt, cwd=signed.work)


def names(role: str, person: Person) -> dict[str, str]:
    """Return an environment in which git takes ``person`` for author or committer."""
    return {f"GIT_{role}_NAME": person.address, f"GIT_{role}_EMAIL": person.address}


def dates(when: str) -> dict[str, str]:
    """Return an environment in which git takes ``when`` for now."""
    return {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (unsigned, "is not signed: sign it"),
        (unknown, "is signed with the SSH key SHA256:.*, which is not in "),
        (borrowed_name, "is signed with the SSH key SHA256:.*, which is not in "),
        (tampered, "carries an SSH signature that does not fit its content"),
        (expired, "is signed by alice@.* a key that is not good now: has expired"),
        (expired_and_says_so, "a key that was not good then: has expired"),
        (not_yet_valid, "a key that was not good then: is not yet valid"),
        (for_files_only, "is not permitted for use in signature namespace"),
        (forged_committer, "names mallory@.* as its committer, and is signed by alice@"),
        (forged_author, "names mallory@.* as its author, and is signed by alice@"),
        (two_signatures, "carries 2 signatures"),
    ],
)
def test_what_nobody_ordered_is_refused(
    signed: Signed, alice: Person, mallory: Person, spoil: Spoil, said: str
) -> None:
    """Each with a sentence that says what is wrong."""
    allow(signed.allowed, f"{alice.address} {alice.key}")
    spoil(signed, alice, mallory)
    with pytest.raises(SignatureError, match=said):
        signed.of_head()


@pytest.mark.parametrize(
    ("expires", "made", "said"),
    [
        ("never", "", "is not among the allowed signers"),
        ("1y", "20200101T000000", "with a GPG key whose time is over"),
    ],
    ids=["unknown", "expired"],
)
def test_a_gpg_key_that_is_unknown_or_over_is_refused(
    signed: Signed, keys: Path, expires: str, made: str, said: str
) -> None:
    """Also when the signature is from the time when the key was good."""
    name = f"dave{bool(made)}".lower()
    dave = gpg_person(keys / name, name, expires, made)
    signed.gpg_home = keys / name
    if not made:
        signed.gpg_home = keys / "nobody"
        signed.gpg_home.mkdir(mode=0o700)
    dave.commit(signed.work, **(dates(LONG_AGO) if made else {}))
    with pytest.raises(SignatureError, match=said):
        signed.of_head()


def test_a_revoked_gpg_key_is_refused(signed: Signed, keys: Path) -> None:
    """What it signed before, too: nobody knows who signed it."""
    erin = gpg_person(keys / "erin", "erin")
    signed.gpg_home = keys / "erin"
    erin.commit(signed.work)
    assert signed.of_head().name == erin.address
    certificate = keys / f"erin/openpgp-revocs.d/{erin.key}.rev"
    words = ("gpg", "--homedir", signed.gpg_home, "--batch", "--import")
    run(*words, data=certificate.read_text().replace(":-----BEGIN", "-----BEGIN"))
    with pytest.raises(SignatureError, match="with a GPG key that was revoked"):
        signed.of_head()


@pytest.mark.parametrize("cause", ["no ssh-keygen", "no room"])
def test_a_signature_that_nobody_could_look_at_is_no_verdict(
    signed: Signed, alice: Person, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would be final, and name a fault that the commit does not have."""
    allow(signed.allowed, f"{alice.address} {alice.key}")
    alice.commit(signed.work)
    repository = signed.repository
    (tmp_path / "git").symlink_to(shutil.which("git") or "")
    if cause == "no room":
        monkeypatch.setenv("TMPDIR", str(tmp_path / "away"))
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RepositoryError, match="its signature cannot be looked at"):
        signatures.of_commit(repository, repository.head(), signed.signers)


def test_a_kind_of_signature_that_is_not_allowed_is_refused(
    signed: Signed, alice: Person, keys: Path
) -> None:
    """A fleet that allows GPG keys takes no SSH key."""
    signed.gpg_home = keys
    alice.commit(signed.work)
    with pytest.raises(SignatureError, match="is signed by SSH, and no SSH signers are allowed"):
        signed.of_head()


def test_a_forge_that_may_signs_for_others(signed: Signed, alice: Person, mallory: Person) -> None:
    """A merge button commits for whoever pressed it."""
    allow(signed.allowed, f"{alice.address} {alice.key}")
    signed.sign_for_others = [alice.address]
    alice.commit(signed.work, **names("AUTHOR", mallory), **names("COMMITTER", mallory))
    assert signed.of_head().name == alice.address


def test_one_person_may_have_several_addresses_and_keys(
    signed: Signed, keys: Path, alice: Person
) -> None:
    """A line for each key; the addresses of a line are one person's."""
    other = ssh_person(keys / signed.folder.parent.name, "alice")
    both = f"{alice.address},alice@work.example"
    allow(signed.allowed, f"{both} {alice.key}", f"{both} {other.key}")
    other.commit(signed.work, GIT_COMMITTER_EMAIL="alice@work.example")
    assert signed.of_head().addresses == {alice.address, "alice@work.example"}


def test_an_approval_names_its_signer(signed: Signed, alice: Person, bob: Person) -> None:
    """A signed tag on the commit."""
    allow(signed.allowed, *(f"{one.address} {one.key}" for one in (alice, bob)))
    commit = alice.commit(signed.work)
    tag = bob.approve(signed.work, commit)
    repository = signed.repository
    assert repository.approvals(commit) == [f"refs/tags/{tag}"]
    found = signatures.of_tag(repository, f"refs/tags/{tag}", commit, signed.signers)
    assert found.name == bob.address


def test_an_approval_under_another_name_or_of_another_is_refused(
    signed: Signed, alice: Person, bob: Person, mallory: Person
) -> None:
    """A tag that is moved, is not signed, or says that somebody else made it."""
    allow(signed.allowed, *(f"{one.address} {one.key}" for one in (alice, bob)))
    commit = alice.commit(signed.work)
    bob.approve(signed.work, commit, "old")
    run("git", "update-ref", "refs/tags/approve/new", "refs/tags/approve/old", cwd=signed.work)
    bob.approve(signed.work, commit, "unsigned", "-a")
    bob.approve(signed.work, commit, "forged", **names("COMMITTER", alice))
    mallory.approve(signed.work, commit, "unknown")
    repository = signed.repository
    for name, said in (
        ("new", "was made as approve/old"),
        ("unsigned", "is not signed"),
        ("forged", "names alice@example.org, and is signed by bob@example.org"),
        ("unknown", "which is not in"),
    ):
        with pytest.raises(SignatureError, match=said):
            signatures.of_tag(repository, f"refs/tags/approve/{name}", commit, signed.signers)
