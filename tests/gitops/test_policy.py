"""What a merge may bring: real commits against the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.gitops import policy, signatures
from seatrial.gitops.policy import PolicyError
from seatrial.gitops.repository import Repository
from seatrial.gitops.settings import Protected, Signers
from tests.gitops.people import Person, allow, run

SPEC = "inventory/toy/group_vars/all/serving_spec.yml"
THRESHOLDS = "gates/thresholds/toy.yml"
BOUNDS: dict[str, Any] = {
    "origin": {"who": "us"},
    "request_seconds": 10,
    "window": {"a": {"samples": 5, "recall_ratio_min": 0.6}, "lengths": [1, 2]},
    "throughput": {"queue_p99_ms_max": 100.0},
    "critical": {"readiness": "why"},
    "shadow": {"test_rates": "why"},
    "not_applicable": {},
}
GATES: dict[str, Any] = {"thresholds": "toy", "select": ["window", "memory"], "cold_launches": 1}
PATHS = ["gates/", "ansible.cfg"]


def with_(value: dict[str, Any], path: str, changed: object) -> dict[str, Any]:
    """Return a copy of ``value`` with one key changed, or taken out if it is None."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(value))
    *folders, name = path.split(".")
    place = copy
    for folder in folders:
        place = place[folder]
    place[name] = changed
    if changed is None:
        del place[name]
    return copy


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("window.a.recall_ratio_min", 0.5),
        ("window.a.recall_ratio_min", float("nan")),
        ("window.a.recall_ratio_min", "0.6"),
        ("window.a.samples", 3),
        ("window.lengths", [1]),
        ("window", None),
        ("throughput.queue_p99_ms_max", 101.0),
        ("request_seconds", 20),
        ("critical.readiness", None),
        ("shadow.test_needles", "it fails so often"),
        ("not_applicable.window", "it fails so often"),
    ],
)
def test_what_is_easier_to_pass_is_found(path: str, changed: object) -> None:
    """The key is named. Of a change whose direction nobody knows it is thought."""
    found = list(policy.easier(BOUNDS, with_(BOUNDS, path, changed)))
    assert len(found) == 1
    assert found[0].startswith(path)


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("origin.who", "them"),
        ("window.a.recall_ratio_min", 0.7),
        ("window.a.samples", 9),
        ("throughput.queue_p99_ms_max", 50.0),
        ("throughput.first_token_p99_ms_max", 50.0),
        ("critical.window", "why"),
        ("shadow.test_rates", None),
        ("shadow.test_rates", "the same in other words"),
        ("soak", {"seconds": 3}),
    ],
)
def test_what_is_harder_to_pass_or_new_is_not_loosened(path: str, changed: object) -> None:
    """Tightening a bound beside the change that it judges is welcome."""
    assert list(policy.easier(BOUNDS, with_(BOUNDS, path, changed))) == []


@pytest.mark.parametrize(
    ("path", "is_needed"),
    [
        (SPEC, True),
        ("templates/sglang.env.j2", True),
        ("kernels/README.md", True),
        ("some/new/file", True),
        ("requirements/control.lock", True),
        ("inventory/other/hosts.yml", False),
        ("inventory/toy/README.md", False),
        ("docs/rollout.md", False),
        ("README.md", False),
        ("roles/cell/README.md", False),
        ("tests/test_spec.py", False),
        (THRESHOLDS, False),
    ],
)
def test_only_what_a_host_could_notice_needs_a_rollout(path: str, is_needed: bool) -> None:
    """What nobody has thought of is thought to matter."""
    assert policy.needs_rollout([path], "toy") == ([path] if is_needed else [])


def test_a_docs_only_commit_has_the_same_content_and_a_gate_another() -> None:
    """A commit on top of a bad one that changes documents is the bad one again."""
    files = {SPEC: "a", "docs/x.md": "b", THRESHOLDS: "c"}
    same = policy.content({**files, "docs/x.md": "B"}, "toy")
    assert policy.content(files, "toy") == same
    assert policy.content({**files, THRESHOLDS: "C"}, "toy") != same


class Fleet:
    """A repository with a spec and thresholds, at a commit that serves."""

    def __init__(self, folder: Path, alice: Person, bob: Person) -> None:
        self.work, self.origin = folder / "work", folder / "origin.git"
        self.alice, self.bob = alice, bob
        folder.mkdir()
        run("git", "init", "-q", "--bare", self.origin)
        run("git", "init", "-q", "-b", "main", self.work)
        allow(folder / "signers", *(f"{one.address} {one.key}" for one in (alice, bob)))
        self.signers = Signers(ssh=folder / "signers", gpg_home=None, sign_for_others=[])
        self.repository = Repository(folder / "state", str(self.origin), "main", 30)
        self.serves = self.commit(index_topk=1024, bounds=BOUNDS, gates=GATES)

    def commit(
        self,
        index_topk: int | None = None,
        bounds: dict[str, Any] | None = None,
        gates: dict[str, Any] | None = None,
        who: Person | None = None,
    ) -> str:
        """Commit a change of what is named, and return the commit."""
        spec = self.work / SPEC
        spec.parent.mkdir(parents=True, exist_ok=True)
        known = yaml.safe_load(spec.read_text())["serving_spec"] if spec.exists() else {}
        known |= {"index_topk": index_topk} if index_topk else {}
        known |= {"gates": gates} if gates else {}
        spec.write_text(yaml.safe_dump({"serving_spec": known}))
        if bounds:
            (self.work / THRESHOLDS).parent.mkdir(parents=True, exist_ok=True)
            (self.work / THRESHOLDS).write_text(yaml.safe_dump(bounds))
        return (who or self.alice).commit(self.work)

    def put(self, name: str, text: str) -> None:
        """Write a file of the work tree."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def changes(self) -> list[policy.Change]:
        """Return what the branch brings since what serves."""
        run("git", "push", "-q", "--force", "--tags", self.origin, "HEAD:main", cwd=self.work)
        self.repository.fetch()
        head = self.repository.head()
        return policy.changes(self.repository, self.serves, head, "toy", PATHS)

    def approver(self, *approvers: str) -> str:
        """Return who approved it."""
        changes = self.changes()
        head = self.repository.head()
        signer = signatures.of_commit(self.repository, head, self.signers)
        rules = Protected(paths=PATHS, approvers=list(approvers))
        return policy.approver(self.repository, changes, signer, rules, self.signers)


@pytest.fixture
def fleet(tmp_path: Path, alice: Person, bob: Person) -> Fleet:
    """Return a fleet that serves its first commit."""
    return Fleet(tmp_path / "r", alice, bob)


LOOSE = with_(BOUNDS, "window.a.recall_ratio_min", 0.1)


@pytest.mark.parametrize(
    "loosened",
    [
        {"bounds": LOOSE},
        {"gates": with_(GATES, "select", ["memory"])},
        {"gates": with_(GATES, "cold_launches", 0)},
        {"gates": with_(GATES, "thresholds", "easy")},
    ],
    ids=["a bound", "a gate less", "a launch less", "another file"],
)
def test_gates_loosened_with_the_change_they_would_fail_are_refused(
    fleet: Fleet, loosened: dict[str, Any]
) -> None:
    """In one commit, and with an approval too; the sentence names both."""
    commit = fleet.commit(index_topk=512, **loosened)
    fleet.bob.approve(fleet.work, commit)
    with pytest.raises(PolicyError, match=rf"loosens the gates .*together with {SPEC}\. Push"):
        policy.refuse_loosened(fleet.changes())


def test_gates_loosened_in_one_merge_of_two_commits_are_refused(fleet: Fleet) -> None:
    """The merge is what is judged, not the commits that it hides."""
    fleet.alice.git(fleet.work, "switch", "-q", "-c", "topic")
    fleet.commit(bounds=LOOSE)
    fleet.commit(index_topk=512)
    fleet.alice.git(fleet.work, "switch", "-q", "main")
    fleet.alice.git(fleet.work, "merge", "-q", "--no-ff", "-S", "-m", "Merge", "topic")
    with pytest.raises(PolicyError, match="loosens the gates"):
        policy.refuse_loosened(fleet.changes())


def test_gates_loosened_in_a_merge_before_may_judge_the_change(fleet: Fleet) -> None:
    """Two merges, one after the other, also when both are pushed at once."""
    fleet.commit(bounds=LOOSE)
    fleet.commit(index_topk=512)
    policy.refuse_loosened(fleet.changes())


def test_gates_tightened_with_a_change_are_not_loosened(fleet: Fleet) -> None:
    """Nor does a new gate loosen, or a changed batch size in the same file."""
    tight = with_(BOUNDS, "window.a.recall_ratio_min", 0.9)
    fleet.put("gates/test_new.py", "x")
    fleet.commit(index_topk=2048, bounds=tight)
    changes = fleet.changes()
    policy.refuse_loosened(changes)
    assert changes[0].loosened == []


def test_a_gate_whose_code_changes_comes_alone(fleet: Fleet) -> None:
    """Nobody but a person can say whether it asks less now."""
    fleet.put("gates/test_old.py", "assert True")
    fleet.serves = fleet.commit()
    fleet.put("gates/test_old.py", "assert False")
    fleet.commit(index_topk=512)
    with pytest.raises(PolicyError, match=r"gates/test_old\.py changes, together with"):
        policy.refuse_loosened(fleet.changes())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gates/conftest.py", "pass"),
        ("gates/pytest.ini", "[pytest]"),
        ("conftest.py", "pass"),
        ("tox.ini", "[pytest]"),
        ("pyproject.toml", '[tool.pytest]\naddopts = ["--collect-only"]'),
    ],
)
def test_what_every_gate_reads_comes_alone(fleet: Fleet, name: str, text: str) -> None:
    """A new file that pytest reads first could let all of them pass."""
    fleet.put(name, text)
    fleet.commit(index_topk=512)
    with pytest.raises(PolicyError, match=f"loosens the gates .*{name} changes"):
        policy.refuse_loosened(fleet.changes())


def test_a_project_file_that_tells_pytest_nothing_new_may_come_with_a_change(fleet: Fleet) -> None:
    """Dependencies stand there, too."""
    fleet.put("pyproject.toml", "[project]\nversion = '2'")
    fleet.commit(index_topk=512)
    assert fleet.changes()[0].loosened == []


def test_loosened_gates_that_were_taken_back_are_not_held_against_what_follows(
    fleet: Fleet,
) -> None:
    """The refusal asks for that; the bad commit stays in the branch's history."""
    fleet.commit(index_topk=512, bounds=LOOSE, gates=with_(GATES, "select", ["memory"]))
    with pytest.raises(PolicyError, match="loosens the gates"):
        policy.refuse_loosened(fleet.changes())
    fleet.commit(index_topk=2048, bounds=BOUNDS, gates=GATES)
    policy.refuse_loosened(fleet.changes())
    assert fleet.approver() == ""


@pytest.mark.parametrize(
    "text",
    [
        "serving_spec: {gates: '{{ gates }}'}",
        "serving_spec: {gates: {thresholds: toy, select: }}",
        "serving_spec: {gates: {select: window}}",
        "serving_spec: {index_topk: 2001-99-99}",
        "serving_spec: {index_topk: !!int x}",
        "serving_spec: " + "[" * 3000,
    ],
)
def test_a_spec_of_any_shape_is_judged_and_what_mends_it_passes(fleet: Fleet, text: str) -> None:
    """A slip of the pen must not stop the reconciler, now or at the next commit."""
    fleet.put(SPEC, text)
    fleet.alice.commit(fleet.work)
    with pytest.raises(PolicyError, match=r"gates\.select loses window"):
        policy.refuse_loosened(fleet.changes())
    fleet.put(SPEC, yaml.safe_dump({"serving_spec": {"index_topk": 512, "gates": GATES}}))
    fleet.alice.commit(fleet.work)
    policy.refuse_loosened(fleet.changes())


@pytest.mark.parametrize("rule", ["gates", "gates/"])
def test_a_folder_is_protected_with_and_without_its_slash(rule: str) -> None:
    """And a file that takes its place, and not its neighbour."""
    paths = ("gates/a/b", "gates", "gates.md", "agates/x")
    assert [policy._is_under(path, rule) for path in paths] == [True, True, False, False]


def test_links_and_submodules_are_refused_where_a_host_would_follow_them() -> None:
    """What they lead to is in another fleet, outside the commit, or not seen as a change."""
    files = {"inventory/toy/a": "120000 blob x", "b": "160000 commit x", "c": "100755 blob x"}
    with pytest.raises(PolicyError, match=r"links or submodules: inventory/toy/a, b\. What"):
        policy.refuse_links(files, "toy", "c" * 40)
    policy.refuse_links({"docs/a": "120000 blob x", "c": "100644 blob x"}, "toy", "c" * 40)


def test_a_plain_change_needs_nobody_else(fleet: Fleet) -> None:
    """Most merges are one."""
    fleet.commit(index_topk=512)
    assert fleet.approver() == ""


def test_what_is_protected_waits_for_another_signer(fleet: Fleet) -> None:
    """The sentence is what to type; with the tag it goes on."""
    fleet.put("ansible.cfg", "x")
    commit = fleet.commit()
    with pytest.raises(
        PolicyError, match=rf"second person.*ansible\.cfg.*git tag -s approve/{commit[:12]}"
    ):
        fleet.approver()
    fleet.bob.approve(fleet.work, commit)
    assert fleet.approver() == fleet.bob.address


def test_loosened_gates_wait_for_another_signer_wherever_they_are(fleet: Fleet) -> None:
    """The spec is not among the protected paths, and its gates are."""
    fleet.commit(gates=with_(GATES, "select", ["memory"]))
    with pytest.raises(PolicyError, match=r"gates\.select loses window"):
        fleet.approver()


def test_an_approval_of_a_later_commit_covers_what_came_before(fleet: Fleet) -> None:
    """One tag on the branch's commit is enough."""
    fleet.put("ansible.cfg", "x")
    fleet.commit()
    fleet.bob.approve(fleet.work, fleet.commit(index_topk=512))
    assert fleet.approver() == fleet.bob.address


def test_an_approval_of_an_earlier_commit_does_not_cover_what_came_after(fleet: Fleet) -> None:
    """What is protected changed again."""
    fleet.put("ansible.cfg", "x")
    fleet.bob.approve(fleet.work, fleet.commit())
    fleet.put("ansible.cfg", "y")
    fleet.commit()
    with pytest.raises(PolicyError, match="second person"):
        fleet.approver()


def test_nobody_approves_their_own(fleet: Fleet, mallory: Person) -> None:
    """Not who signed it, not who wrote a part of it, nobody who is not allowed or not asked."""
    fleet.put("ansible.cfg", "x")
    fleet.commit(who=fleet.bob)
    fleet.put("ansible.cfg", "y")
    commit = fleet.commit()
    fleet.alice.approve(fleet.work, commit, "alice")
    fleet.bob.approve(fleet.work, commit, "bob")
    mallory.approve(fleet.work, commit, "mallory")
    with pytest.raises(PolicyError) as refused:
        fleet.approver()
    assert "alice@example.org approves what they signed themselves" in str(refused.value)
    assert "bob@example.org approves what they wrote themselves" in str(refused.value)
    assert "the tag approve/mallory is signed with the SSH key" in str(refused.value)


def test_a_forge_that_signs_for_others_is_nobody_s_second_person(fleet: Fleet) -> None:
    """It signs for whoever pressed its button, perhaps the same person."""
    fleet.put("ansible.cfg", "x")
    fleet.bob.approve(fleet.work, fleet.commit())
    fleet.signers = fleet.signers.model_copy(update={"sign_for_others": [fleet.bob.address]})
    with pytest.raises(PolicyError, match="signs for others, and is nobody's second person"):
        fleet.approver()


def test_only_who_is_named_approves_if_somebody_is(fleet: Fleet) -> None:
    """The settings may narrow it down."""
    fleet.put("ansible.cfg", "x")
    fleet.bob.approve(fleet.work, fleet.commit())
    with pytest.raises(PolicyError, match="is not among the approvers in the settings"):
        fleet.approver("carol@example.org")
    assert fleet.approver("Bob@example.org") == fleet.bob.address
