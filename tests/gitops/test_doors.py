"""Hook and webhook wake the reconciler for what is authentic, and for nothing else."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import requests

from tests.gitops.doors import FLEET, UNITS, render

SECRET = "planted-5c1d7f0e9b-webhook"
BODY = b'{"ref": "refs/heads/main", "after": "0123456789012345678901234567890123456789"}'


@dataclass
class Door:
    """HAProxy and `webhook` as the units start them, on loopback."""

    url: str
    knock: Path
    haproxy: subprocess.Popen[bytes]
    webhook: subprocess.Popen[bytes]
    log: Path

    def post(self, body: bytes = BODY, **headers: str) -> requests.Response:
        """Deliver, and return the answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return requests.post(
            self.url, data=body, headers={"Content-Type": "application/json", **named}, timeout=10
        )

    def was_knocked(self) -> bool:
        """Whether the reconciler was woken since the last time this was asked."""
        try:
            self.knock.unlink()
        except FileNotFoundError:
            return False
        return True


def signature(body: bytes, secret: str = SECRET) -> str:
    """Return what GitHub and Gitea make of a body."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def free_port() -> int:
    """Return a port that nobody uses on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def opened(kind: str, target: Path) -> Iterator[Door]:
    """Open a door for deliveries of one kind of forge."""
    outer, inner = free_port(), free_port()
    render(
        target,
        gitops_webhook_kind=kind,
        gitops_webhook_secret=SECRET,
        gitops_webhook_bind=f"127.0.0.1:{outer}",
        gitops_webhook_inner_port=inner,
    )
    log = target / "log"
    with log.open("wb") as out:
        webhook = start(
            [
                *("webhook", "-ip", "127.0.0.1", "-port", str(inner), "-nopanic"),
                *("-hooks", str(target / "seatrial-gitops-hooks.json")),
            ],
            out,
        )
        haproxy = start(
            ["/usr/sbin/haproxy", "-W", "-f", str(target / "seatrial-gitops-door.cfg")], out
        )
    try:
        for port in (outer, inner):
            await_port(port, log)
        url = f"http://127.0.0.1:{outer}/hooks/{FLEET}"
        yield Door(url, target / "knock/wake", haproxy, webhook, log)
    finally:
        for process in (haproxy, webhook):
            process.terminate()
            process.wait(10)


@pytest.fixture(scope="module")
def github(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Open a door for GitHub and Gitea, which sign alike."""
    with opened("github", tmp_path_factory.mktemp("github")) as door:
        yield door


@pytest.fixture(scope="module")
def gitlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Open a door for GitLab."""
    with opened("gitlab", tmp_path_factory.mktemp("gitlab")) as door:
        yield door


def start(words: list[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a server."""
    return subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def await_port(port: int, log: Path) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}: {log.read_text()}")


def test_an_authentic_delivery_of_github_wakes_and_its_replay_does_not(github: Door) -> None:
    """The same content has the same signature; it was heard once."""
    body = b'{"delivery": 1}'
    assert github.post(body, X_Hub_Signature_256=f"sha256={signature(body)}").status_code == 200
    assert github.was_knocked()
    again = github.post(body, X_Hub_Signature_256=f"sha256={signature(body)}")
    assert (again.status_code, again.text) == (
        409,
        "refused, 409: this delivery was accepted before\n",
    )
    assert not github.was_knocked()


def test_a_replay_in_another_dress_is_refused(github: Door) -> None:
    """Without prefix, under Gitea's name, doubled, listed, in capitals: the same delivery."""
    body = b'{"delivery": 2}'
    known = signature(body)
    assert github.post(body, X_Hub_Signature_256=f"sha256={known}").status_code == 200
    assert github.was_knocked()
    other = "0" * 64
    for headers in (
        {"X_Hub_Signature_256": known},
        {"X_Gitea_Signature": known},
        {"X_Hub_Signature_256": f"sha256={other}", "X_Gitea_Signature": known},
        {"X_Hub_Signature_256": f"sha256={other},sha256={known}"},
        {"X_Hub_Signature_256": f"sha256={known.upper()}"},
    ):
        assert github.post(body, **headers).status_code in (401, 403, 409), headers
    assert not github.was_knocked()


def test_an_authentic_delivery_of_gitea_wakes(github: Door) -> None:
    """Gitea writes the signature without a prefix."""
    body = b'{"delivery": 3}'
    assert github.post(body, X_Gitea_Signature=signature(body)).status_code == 200
    assert github.was_knocked()


def test_a_wrong_secret_is_refused_with_a_sentence(github: Door) -> None:
    """And does not spoil the same delivery when it comes with the right one."""
    body = b'{"delivery": 4}'
    wrong = github.post(body, X_Hub_Signature_256=f"sha256={signature(body, 'another secret')}")
    assert wrong.status_code == 403
    assert wrong.text == f"refused, 403: the shared secret is not the one of fleet {FLEET}\n"
    assert not github.was_knocked()
    assert github.post(body, X_Hub_Signature_256=f"sha256={signature(body)}").status_code == 200
    assert github.was_knocked()


def test_a_body_that_was_changed_is_refused(github: Door) -> None:
    """A signature belongs to one body."""
    signed = signature(b'{"delivery": 5}')
    assert (
        github.post(b'{"delivery": 6}', X_Hub_Signature_256=f"sha256={signed}").status_code == 403
    )
    assert not github.was_knocked()


def test_gitlab_wakes_by_its_secret_and_once_for_each_event(gitlab: Door) -> None:
    """GitLab sends the secret as it is, and a key that is new with each event."""
    event = {"X_Gitlab_Token": SECRET, "Idempotency_Key": "2b8dd5c5-91b5-4b55-9d05-2a0b0f2f7a01"}
    assert gitlab.post(BODY, **event).status_code == 200
    assert gitlab.was_knocked()
    assert gitlab.post(BODY, **event).status_code == 409
    new = "2b8dd5c5-91b5-4b55-9d05-2a0b0f2f7a02"
    assert gitlab.post(X_Gitlab_Token="wrong", Idempotency_Key=new).status_code == 403
    assert gitlab.post(X_Gitlab_Token=SECRET).status_code == 401
    assert not gitlab.was_knocked()


def test_ten_megabytes_are_refused_unread(github: Door) -> None:
    """By their announced length, before a byte of them is kept."""
    body = b"x" * 10_000_000
    with socket.create_connection(door_address(github)) as line:
        path = f"/hooks/{FLEET}"
        head = f"POST {path} HTTP/1.1\r\nHost: door\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode())
        line.settimeout(10)
        answer = line.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert "a delivery has at most 1048576 bytes" in answer
    assert not github.was_knocked()


def test_a_delivery_without_length_is_refused(github: Door) -> None:
    """Chunks would hide how much comes."""
    answer = requests.post(github.url, data=iter([b"{}"]), timeout=10)
    assert answer.status_code == 411
    assert not github.was_knocked()


@pytest.mark.parametrize("path", ["", "/", "/hooks", "/hooks/other", "/hooks/..%2f"])
def test_nothing_else_is_offered(github: Door, path: str) -> None:
    """One path, one method."""
    root = github.url.removesuffix(f"/hooks/{FLEET}")
    assert requests.post(root + path, data=BODY, timeout=10).status_code == 404
    assert requests.get(github.url, timeout=10).status_code == 404
    assert not github.was_knocked()


def test_an_unsigned_delivery_is_refused(github: Door) -> None:
    """Said as such, for whoever forgot to enter the secret at the forge."""
    assert github.post().status_code == 401
    assert not github.was_knocked()


def test_the_secret_is_in_no_argument_environment_or_log(github: Door) -> None:
    """After all that was delivered; in the answers neither."""
    answer = github.post(X_Gitlab_Token=SECRET, X_Hub_Signature_256="sha256=" + "a" * 64)
    assert SECRET not in answer.text
    children = subprocess.run(
        ["pgrep", "-P", str(github.haproxy.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    for pid in (github.haproxy.pid, github.webhook.pid, *children):
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    said = github.log.read_text()
    assert "refused, 4" in said
    assert SECRET not in said


def door_address(door: Door) -> tuple[str, int]:
    """Return the address at which the door listens."""
    host, port = door.url.removeprefix("http://").split("/")[0].split(":")
    return host, int(port)


# --- the hook of a bare repository ---


@dataclass
class Bare:
    """A bare repository with the role's hook, and a clone that pushes to it."""

    clone: Path
    knock: Path

    def git(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run git in the clone."""
        identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
        return subprocess.run(
            ["git", "-C", self.clone, *identity, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"},
        )


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render what the role lays down where there is a bare repository."""
    target = tmp_path_factory.mktemp("rendered")
    render(target, gitops_bare_repository="/srv/git/fleet.git", gitops_branch="main")
    return target


@pytest.fixture
def bare(tmp_path: Path, rendered: Path) -> Bare:
    """Return a bare repository whose hook knocks in ``tmp_path``."""
    repository, knock = tmp_path / "fleet.git", tmp_path / "knock"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", repository], check=True)
    hook = (rendered / "seatrial-gitops-post-receive").read_text()
    place = str(rendered / "knock")
    assert place in hook
    (repository / "hooks/post-receive").write_text(hook.replace(place, str(knock)))
    (repository / "hooks/post-receive").chmod(0o755)
    knock.mkdir()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", repository, clone], check=True, capture_output=True)
    made = Bare(clone, knock / "wake")
    made.git("commit", "-q", "--allow-empty", "-m", "first")
    return made


def test_a_push_to_the_tracked_branch_knocks_and_tells_the_pusher(bare: Bare) -> None:
    """With the command that shows what came of it."""
    said = bare.git("push", "origin", "HEAD:main").stderr
    assert bare.knock.exists()
    assert f"remote: seatrial: fleet {FLEET} looks at main now" in said
    assert "refs/notes/rollouts" in said


def test_the_push_of_an_approval_knocks(bare: Bare) -> None:
    """Whoever approved does not wait for the next poll either."""
    bare.git("tag", "approve/0123456789ab")
    bare.git("push", "origin", "approve/0123456789ab")
    assert bare.knock.exists()


def test_a_push_to_another_ref_does_not_knock(bare: Bare) -> None:
    """Neither a branch beside it, nor the notes that the reconciler itself pushes."""
    said = bare.git("push", "origin", "HEAD:topic", "HEAD:refs/notes/rollouts").stderr
    assert not bare.knock.exists()
    assert "seatrial" not in said


def test_a_push_is_taken_even_if_nobody_can_be_woken(bare: Bare) -> None:
    """The timer looks anyway, and the pusher is told so."""
    bare.knock.parent.rmdir()
    said = bare.git("push", "origin", "HEAD:main").stderr
    assert "could not wake the reconciler" in said
    assert "by itself every 30 s" in said


# --- units and settings ---


def test_systemd_accepts_every_unit(rendered: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` on a root that holds the programs the units start."""
    settings = (rendered / "seatrial-gitops@.service").read_text()
    venv = settings.split("ExecStart=")[1].split("/bin/python")[0]
    programs = [f"{venv}/bin/python", "/usr/bin/rm", "/usr/bin/webhook", "/usr/sbin/haproxy"]
    for program in programs:
        path = tmp_path / program.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    targets = ("sysinit", "basic", "shutdown", "network-online", "network", "time-sync", "timers")
    for name in (*targets, "paths", "time-set", "multi-user"):
        (folder / f"{name}.target").write_text("[Unit]\n")
    for unit in UNITS:
        (folder / unit).write_text((rendered / unit).read_text())
    done = subprocess.run(
        [
            *("systemd-analyze", "verify", "--man=no", f"--root={tmp_path}"),
            *(unit.replace("@", f"@{FLEET}") for unit in UNITS),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_knock_is_taken_back_before_the_branch_is_looked_at(rendered: Path) -> None:
    """Else one that comes in between would be lost, or heard for ever."""
    lines = (rendered / "seatrial-gitops@.service").read_text().splitlines()
    order = [line.split("=")[0] for line in lines if line.startswith("ExecStart")]
    assert order == ["ExecStartPre", "ExecStart"]
    wake = "/run/seatrial-gitops/%i/wake"
    assert f"ExecStartPre=/usr/bin/rm -f {wake}" in lines
    assert f"PathExists={wake}" in (rendered / "seatrial-gitops@.path").read_text().splitlines()


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"gitops_url": ""}, "repository.url"),
        ({"gitops_url": "https://ann:hunter2@git.example.org/f.git"}, "should carry no password"),
        ({"gitops_protected_paths": ["roles/*"]}, "protect nothing"),
        ({"gitops_signers": []}, "nobody could sign"),
        ({"gitops_windows": [{"kind": "deny"}]}, "windows.0"),
    ],
)
def test_settings_that_the_reconciler_refuses_are_refused_before_they_are_written(
    tmp_path: Path, inputs: dict[str, object], sentence: str
) -> None:
    """By the role, with the reconciler's own sentence."""
    with pytest.raises(RuntimeError, match="inputs of role gitops: ") as refused:
        render(tmp_path, **inputs)
    assert sentence in " ".join(str(refused.value).split())


def test_secrets_are_named_by_file_in_the_settings(tmp_path: Path) -> None:
    """A token given to the role is in nothing that others can read."""
    token = "planted-77ab-token"
    settings = render(
        tmp_path,
        gitops_notify_urls=[f"json://localhost/{token}"],
        gitops_forge={"kind": "gitea", "api": "https://g.example.org/api/v1", "repository": "o/n"},
        gitops_forge_token=token,
        gitops_grafana_url="https://grafana.example.org",
        gitops_grafana_token=token,
    )
    told = settings["tell"]
    assert told["notify_urls_file"] == f"/etc/seatrial/gitops/{FLEET}.notify"
    assert told["forge"]["token_file"] == f"/etc/seatrial/gitops/{FLEET}.forge"
    assert told["grafana"]["token_file"] == f"/etc/seatrial/gitops/{FLEET}.grafana"
    (tmp_path / "play.yml").unlink()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or token not in path.read_text()
