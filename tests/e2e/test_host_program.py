"""A host switches releases, survives a reboot, and comes back by itself: on a real systemd.

The engine is a small web server here; the units have the shape of the real ones.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTS = REPOSITORY / "rehearsal/hosts.sh"
PROGRAM = "/opt/seatrial/bin/seatrial-host"
GOOD, NEW, BROKEN = "1" * 16, "2" * 16, "3" * 16
UNIT = """\
[Unit]
Description=A light engine of release {digest}
After=seatrial-guard.service
Requires=seatrial-guard.service
StartLimitBurst=3
StartLimitIntervalSec=120
OnFailure=seatrial-revert.service

[Service]
Type=exec
ExecStartPre=/opt/seatrial/bin/seatrial-host barrier --seconds 5 --port 31999
ExecStart={command}
ExecStartPost=/opt/seatrial/bin/seatrial-host ready --seconds 20 http://127.0.0.1:31999/
Restart=on-failure
RestartSec=0.2
KillMode=mixed
TimeoutStopSec=5

[Install]
WantedBy=multi-user.target
"""
SERVE = (
    "/usr/bin/python3 -m http.server --bind 127.0.0.1 "
    "--directory /opt/seatrial/releases/{digest} 31999"
)


def on_host(*words: str, check: bool = True) -> str:
    """Run a command on the host and return what it prints."""
    done = subprocess.run(
        [HOSTS, "ssh", "gpu-c", *words], capture_output=True, text=True, check=False
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def host(*words: str, check: bool = True) -> dict[str, Any]:
    """Run the host's own program and return its answer."""
    answer = on_host(PROGRAM, *words, check=check)
    return json.loads(answer) if answer.strip() else {}


def served() -> str:
    """Return the release whose process answers, or nothing."""
    return on_host("curl -s --max-time 5 http://127.0.0.1:31999/name", check=False).strip()


def until(condition: Any, seconds: float = 40) -> bool:
    """Wait until the condition holds; whether it came to hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False


@pytest.fixture(scope="module", autouse=True)
def light_releases(rehearsal_hosts: Path) -> Iterator[None]:
    """Stage three light releases on one host: two that serve, and one that crashes."""
    units = {
        unit: (REPOSITORY / f"templates/{unit}.j2")
        .read_text()
        .replace("{{ cell_root }}", "/opt/seatrial")
        for unit in (f"seatrial-{name}.service" for name in ("guard", "revert", "deadman"))
    }
    files = {
        **{
            f"/opt/seatrial/bin/{path.name}": path.read_text()
            for path in (REPOSITORY / "roles/cell/files").glob("seatrial*")
        },
        **{f"/etc/systemd/system/{name}": text for name, text in units.items()},
    }
    for digest in (GOOD, NEW, BROKEN):
        command = "/bin/false" if digest == BROKEN else SERVE.format(digest=digest)
        release = f"/opt/seatrial/releases/{digest}"
        files[f"{release}/units/sglang-light.service"] = UNIT.format(digest=digest, command=command)
        files[f"{release}/release.json"] = json.dumps({"digest": digest, "servers": {}})
        files[f"{release}/name"] = digest
        files[f"{release}/build/build.json"] = "{}"
    files["/opt/seatrial/state/.keep"] = ""
    script = (
        "import json,sys,os\n"
        "for path, text in json.load(sys.stdin).items():\n"
        "    os.makedirs(os.path.dirname(path), exist_ok=True)\n"
        "    open(path, 'w').write(text)\n"
    )
    subprocess.run(
        [HOSTS, "ssh", "gpu-c", f'python3 -c "{script}"'],
        input=json.dumps(files),
        text=True,
        check=True,
    )
    on_host(f"chmod 755 {PROGRAM}; systemctl daemon-reload; systemctl enable --now seatrial-guard")
    yield
    on_host(
        f"{PROGRAM} deactivate; rm -f /opt/seatrial/last_good /opt/seatrial/state/pending.json; "
        "rm -rf " + " ".join(f"/opt/seatrial/releases/{digest}" for digest in (GOOD, NEW, BROKEN))
    )
    del rehearsal_hosts


def test_a_release_is_activated_confirmed_and_promoted() -> None:
    """The way of every good rollout; a second activation changes nothing."""
    assert host("arm", GOOD, "300")["changed"]
    assert host("activate", GOOD)["changed"]
    assert host("wait", "30")["active"]
    assert served() == GOOD
    process = host("status")["units"]["sglang-light.service"]["MainPID"]
    assert not host("activate", GOOD)["changed"]
    host("confirm", GOOD)
    assert host("promote", GOOD)["changed"]
    found = host("status")
    assert found["current"] == found["last_good"] == GOOD
    assert found["pending"] is None
    assert found["units"]["sglang-light.service"]["MainPID"] == process


def test_a_reboot_starts_the_promoted_release_again() -> None:
    """The linked units are enabled."""
    reboot()
    assert until(lambda: served() == GOOD)


def test_a_reboot_with_the_decision_pending_starts_last_good() -> None:
    """The guard decides before any engine starts."""
    host("arm", NEW, "300")
    host("activate", NEW)
    assert until(lambda: served() == NEW)
    reboot()
    assert until(lambda: served() == GOOD)
    assert host("status")["pending"] is None


def test_a_host_that_is_told_nothing_reverts_by_itself() -> None:
    """The dead man's timer."""
    host("arm", NEW, "4")
    host("activate", NEW)
    assert until(lambda: served() == NEW)
    assert until(lambda: served() == GOOD)
    assert "nobody confirmed in time" in on_host("cat /opt/seatrial/state/journal.jsonl")


def test_a_revert_that_cannot_be_done_is_tried_until_it_can() -> None:
    """When systemd will not reload for a while, the installed service goes on trying."""
    drop_in = "/run/systemd/system/seatrial-deadman.service.d"
    stub = '#!/bin/sh\n[ "$1" != daemon-reload ] || exit 1\nexec /usr/bin/systemctl "$@"\n'
    setting = "[Service]\nEnvironment=PATH=/run/stub:/usr/sbin:/usr/bin:/sbin:/bin\nRestartSec=2\n"
    on_host(
        f"mkdir -p /run/stub {drop_in}; printf '{stub}' >/run/stub/systemctl; "
        f"chmod 755 /run/stub/systemctl; printf '{setting}' >{drop_in}/x.conf; "
        "systemctl daemon-reload"
    )
    host("arm", NEW, "3")
    host("activate", NEW)
    assert until(lambda: "revert failed" in on_host("tail -1 /opt/seatrial/state/journal.jsonl"))
    on_host(f"rm -r /run/stub {drop_in}; systemctl daemon-reload")
    assert until(lambda: served() == GOOD, 60)
    assert until(lambda: host("status")["pending"] is None)
    assert not host("status")["dead_man"]


def test_a_crash_loop_uses_its_budget_up_and_ends_in_last_good() -> None:
    """Three starts, then `failed`, then the revert: no loop for a night."""
    host("arm", BROKEN, "300")
    host("activate", BROKEN)
    assert "sglang-light.service" in host("wait", "20")["failed"]
    assert until(lambda: host("status", check=False).get("current") == GOOD)
    assert until(lambda: served() == GOOD)


def test_confirming_what_does_not_run_is_refused() -> None:
    """A host that reverted by itself cannot be told that the new release stays."""
    done = subprocess.run(
        [HOSTS, "ssh", "gpu-c", PROGRAM, "confirm", NEW],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"runs {GOOD}, not an undecided {NEW}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_last_good_stays_down() -> None:
    """No loops: it is down, and the host's journal says so."""
    on_host(f"sed -i 's,^ExecStart=.*,ExecStart=/bin/false,' /opt/seatrial/releases/{GOOD}/units/*")
    on_host("systemctl daemon-reload; systemctl restart --no-block sglang-light")
    assert until(lambda: "stays as it is" in on_host("tail -1 /opt/seatrial/state/journal.jsonl"))
    assert host("status")["units"]["sglang-light.service"]["ActiveState"] == "failed"


def test_a_release_that_is_not_there_is_refused_and_nothing_stops() -> None:
    """One sentence that says what to do."""
    done = subprocess.run(
        [HOSTS, "ssh", "gpu-c", PROGRAM, "activate", "f" * 16],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "stage it with deploy.yml" in done.stderr


def test_deactivating_leaves_no_unit_enabled() -> None:
    """What a revert means before the first promotion."""
    host("deactivate")
    found = host("status")
    assert found["current"] == ""
    assert not found["units"]
    assert "sglang-light" not in on_host("systemctl list-unit-files --no-pager")


def reboot() -> None:
    """Reboot the host and wait until it answers again."""
    before = on_host("cat /proc/sys/kernel/random/boot_id; stat -c %Z /proc/1")
    on_host("systemctl reboot", check=False)
    assert until(
        lambda: (
            on_host("cat /proc/sys/kernel/random/boot_id; stat -c %Z /proc/1", check=False)
            not in ("", before)
        ),
        60,
    )
