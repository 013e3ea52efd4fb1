"""Everybody is told, in their own words; a failing channel stops nobody; no secret is told."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from seatrial.gitops import forge, note, settings, tell
from seatrial.gitops.state import Announcement

UNKNOWN = "is no address that apprise knows"
TOKEN = "planted-1f2e3d4c-token"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SENTENCE = (
    "Cell one: gate a_needle_at_start_of_5200_tokens_is_recalled: FAIL: measured 0 recall, bound "
    ">= 0.60. Changed since last_good: index_topk 1024 -> 512. Release 009a33c2ea8ca8cc serves "
    "again."
)
REVERTED = Announcement(
    time=datetime(2026, 11, 29, 20, 0, tzinfo=UTC),
    fleet="rehearsal",
    kind="reverted",
    sentence=SENTENCE,
    commit=COMMIT,
    gate="a_needle_at_start_of_5200_tokens_is_recalled",
    measured=0.0,
    bound=0.6,
    unit="recall",
    rollout="20261129T195800-01234567",
    report="/var/lib/seatrial-gitops/.local/state/seatrial/rehearsal/reports/20261129T195800-01234567",
    signer="ann@example.org",
    began=datetime(2026, 11, 29, 19, 58, tzinfo=UTC),
)


class Machine:
    """Another machine that is told something: keeps what came, answers as it is told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda on: reply(on, 200)
        machine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                machine.heard.append((self.path, headers, json.loads(body)))
                machine.answer(self)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.server.server_port}"


def reply(on: BaseHTTPRequestHandler, status: int, text: str = "{}") -> None:
    """Answer a request."""
    on.send_response(status)
    on.send_header("Content-Length", str(len(text)))
    on.end_headers()
    on.wfile.write(text.encode())


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Return a machine that listens."""
    made = Machine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def of(told: dict[str, Any]) -> settings.Settings:
    """Return settings of which only the telling matters."""
    nobody = {
        "notify_urls_file": None,
        "report_url": None,
        "forge": None,
        "metrics_file": None,
        "grafana": None,
    }
    return settings.parse(
        {
            "schema": 1,
            "fleet": "rehearsal",
            "repository": {"url": "/srv/x.git", "branch": "main", "seconds": 5, "notes": True},
            "signers": {"ssh": "/etc/signers", "gpg_home": None, "sign_for_others": []},
            "protected": {"paths": [], "approvers": []},
            "windows": [],
            "approval": None,
            "drift": {"heal": False},
            "tell": {**nobody, **told},
            "state_dir": "/nowhere",
            "rollout_seconds": 60,
            "vault_password_file": None,
        },
        "a test",
    )


def secret(tmp_path: Path, text: str = TOKEN) -> str:
    """Return a file that holds the secret."""
    path = tmp_path / f"secret-{len(list(tmp_path.iterdir()))}"
    path.write_text(text + "\n")
    return str(path)


def of_forge(kind: str, url: str, token_file: str) -> dict[str, Any]:
    """Return settings that set commit statuses."""
    return {
        "forge": {
            "kind": kind,
            "api": url,
            "repository": "fleet/serving",
            "token_file": token_file,
            "context": "seatrial/rehearsal",
        },
        "report_url": "https://reports.example.org/{rollout}/",
    }


@pytest.mark.parametrize(
    ("kind", "path", "header", "state"),
    [
        (
            "github",
            f"/repos/fleet/serving/statuses/{COMMIT}",
            ("authorization", "Bearer "),
            "failure",
        ),
        (
            "gitea",
            f"/repos/fleet/serving/statuses/{COMMIT}",
            ("authorization", "token "),
            "failure",
        ),
        ("gitlab", f"/projects/fleet%2Fserving/statuses/{COMMIT}", ("private-token", ""), "failed"),
    ],
)
def test_a_forge_is_told_in_its_own_words(
    machine: Machine, tmp_path: Path, kind: str, path: str, header: tuple[str, str], state: str
) -> None:
    """Path, header, name of the state, a description that is not too long, and the link."""
    told = of(of_forge(kind, machine.url, secret(tmp_path)))
    assert tell.announce(told, REVERTED) == []
    [(asked, headers, body)] = machine.heard
    assert asked == path
    assert headers[header[0]] == header[1] + TOKEN
    assert body["state"] == state
    assert body["context"] == "seatrial/rehearsal"
    assert body["target_url"] == "https://reports.example.org/20261129T195800-01234567/"
    assert len(body["description"]) <= 140
    assert body["description"].endswith(" …")


@pytest.mark.parametrize("kind", ["degraded", "drift", "trouble"])
def test_what_judges_no_commit_sets_no_status(machine: Machine, tmp_path: Path, kind: Any) -> None:
    """A commit keeps its verdict when the fleet drifts."""
    told = REVERTED.model_copy(update={"kind": kind})
    assert tell.announce(of(of_forge("github", machine.url, secret(tmp_path))), told) == []
    assert machine.heard == []


def test_gitlab_that_knows_the_status_already_is_no_failure(
    machine: Machine, tmp_path: Path
) -> None:
    """A resumed rollout says `running` twice; GitLab answers 400 then."""
    words = "Cannot transition status via :run from :running"
    machine.answer = lambda on: reply(on, 400, json.dumps({"message": words}))
    assert tell.announce(of(of_forge("gitlab", machine.url, secret(tmp_path))), REVERTED) == []


def test_a_forge_that_says_no_is_named_with_what_to_do(machine: Machine, tmp_path: Path) -> None:
    """Without the token."""
    machine.answer = lambda on: reply(on, 403)
    [said] = tell.announce(of(of_forge("github", machine.url, secret(tmp_path))), REVERTED)
    assert said.startswith("commit status: ")
    assert "answered 403; it needs a token in " in said
    assert TOKEN not in said


def test_a_redirect_does_not_carry_the_token_away(machine: Machine, tmp_path: Path) -> None:
    """The token is for the address in the settings alone."""
    other = Machine()

    def away(on: BaseHTTPRequestHandler) -> None:
        on.send_response(307)
        on.send_header("Location", f"{other.url}/elsewhere")
        on.send_header("Content-Length", "0")
        on.end_headers()

    machine.answer = away
    [said] = tell.announce(of(of_forge("gitlab", machine.url, secret(tmp_path))), REVERTED)
    assert "answered 307" in said
    assert other.heard == []


def test_a_notification_says_the_sentence_and_where_the_report_is(
    machine: Machine, tmp_path: Path
) -> None:
    """Through apprise, to its plain JSON service."""
    address = machine.url.replace("http://", "json://") + f"/chat/{TOKEN}"
    told = of({"notify_urls_file": secret(tmp_path, f"# the team's chat\n{address}")})
    assert tell.announce(told, REVERTED) == []
    [(_, _, body)] = machine.heard
    assert body["title"] == "seatrial rehearsal: reverted 0123456789ab"
    assert body["message"].splitlines() == [
        SENTENCE,
        "Gate a_needle_at_start_of_5200_tokens_is_recalled: measured 0 recall, bound >= 0.6",
        f"Report: {REVERTED.report}",
    ]
    assert body["type"] == "failure"


def test_grafana_gets_a_region_from_begin_to_end(machine: Machine, tmp_path: Path) -> None:
    """So that a panel shows what a rollout did to it."""
    told = of({"grafana": {"url": machine.url, "token_file": secret(tmp_path)}})
    assert tell.announce(told, REVERTED) == []
    [(path, headers, body)] = machine.heard
    assert path == "/api/annotations"
    assert headers["authorization"] == f"Bearer {TOKEN}"
    assert body["timeEnd"] - body["time"] == 120_000
    assert body["tags"] == ["seatrial", "rehearsal", "reverted"]


def test_one_failing_channel_stops_no_other(machine: Machine, tmp_path: Path) -> None:
    """A chat that is gone, a forge without its token: the annotation is drawn all the same."""
    dead = Machine()
    dead.server.server_close()
    address = dead.url.replace("http://", "json://") + f"/{TOKEN}"
    told = of(
        {
            **of_forge("github", machine.url, str(tmp_path / "missing")),
            "notify_urls_file": secret(tmp_path, f"{address}\nno-such-service://{TOKEN}"),
            "grafana": {"url": machine.url, "token_file": secret(tmp_path)},
        }
    )
    said = tell.announce(told, REVERTED)
    assert [path for path, _, _ in machine.heard] == ["/api/annotations"]
    assert said == [
        f"notifications: of 2 addresses, number 1 (JSON) was not accepted, 2 {UNKNOWN}",
        f"commit status: {tmp_path}/missing: cannot be read (No such file or directory)",
    ]


def test_a_channel_that_hangs_holds_nobody_up(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left behind and named."""
    monkeypatch.setattr(tell, "TELL_SECONDS", 0.5)
    hold = threading.Event()

    def hang(_: BaseHTTPRequestHandler) -> None:
        hold.wait(10)

    machine.answer = hang
    began = time.monotonic()
    said = tell.announce(
        of({"grafana": {"url": machine.url, "token_file": secret(tmp_path)}}), REVERTED
    )
    hold.set()
    assert said == ["Grafana: no answer within 0.5 s"]
    assert time.monotonic() - began < 3


def test_no_channel_s_failure_tells_a_secret(
    machine: Machine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither what is returned, nor what libraries log, nor what is printed."""
    machine.answer = lambda on: reply(on, 500, TOKEN)
    address = machine.url.replace("http://", f"json://user:{TOKEN}@")
    told = of(
        {
            **of_forge("github", machine.url, secret(tmp_path)),
            "notify_urls_file": secret(tmp_path, f"{address}\nslack://{TOKEN}"),
            "grafana": {"url": machine.url, "token_file": secret(tmp_path)},
        }
    )
    with caplog.at_level(logging.DEBUG):
        said = tell.announce(told, REVERTED)
    assert len(said) == 3
    out, err = capfd.readouterr()
    assert TOKEN not in " ".join([*said, caplog.text, out, err])


def test_a_note_is_facts_for_programs_and_a_sentence_for_people() -> None:
    """`git notes --ref rollouts show` is read by both."""
    head, _, sentence = note.text(REVERTED).partition("\n\n")
    facts = dict(line.split(": ", 1) for line in head.splitlines())
    assert facts["seatrial"] == "reverted"
    assert facts["gate"] == "a_needle_at_start_of_5200_tokens_is_recalled"
    assert facts["measured"] == "0 recall, bound >= 0.6"
    assert facts["signer"] == "ann@example.org"
    assert sentence == SENTENCE + "\n"


def test_a_short_sentence_is_not_cut() -> None:
    """What fits is said whole."""
    assert forge.shortened("Promoted.") == "Promoted."
