"""Every unit that a release can hold is accepted by systemd and carries the spec's values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial import release, spec

REPOSITORY = Path(__file__).resolve().parents[1]
FLEETS = sorted(path.parent.name for path in REPOSITORY.glob("inventory/*/group_vars"))
BUILD = "0123456789abcdef"
DIGEST = "fedcba9876543210"


def play(target: Path) -> list[dict[str, Any]]:
    """Return a play that renders with the role's own expressions, without a host."""
    role = REPOSITORY / "roles/release"
    return [
        {
            "hosts": "gpu_hosts",
            "connection": "local",
            "gather_facts": False,
            "vars_files": [f"{REPOSITORY}/playbooks/vars/fleet.yml", f"{role}/vars/main.yml"],
            "vars": {
                **yaml.safe_load((role / "defaults/main.yml").read_text()),
                "role_path": str(role),
                "release_spec": "{{ fleet_spec }}",
                "release_digest": DIGEST,
                "release_commit": "c" * 40,
                "release_addresses": "{{ fleet_addresses }}",
                "release_build": {"digest": BUILD, "kernels": {"sha256": "aa"}},
                "__release_files": "{{ __release_rendered | items2dict }}",
            },
            "tasks": [
                {
                    "ansible.builtin.copy": {
                        "content": "{{ __release_files | combine({'release.json': __release_json})"
                        " | to_json }}",
                        "dest": f"{target}/{{{{ inventory_hostname }}}}.json",
                    },
                    "vars": {
                        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
                        "ansible_shell_executable": "/bin/sh",
                    },
                }
            ],
        }
    ]


@pytest.fixture(scope="module", params=FLEETS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the spec of a fleet and ``{host: {file: content}}``."""
    target = tmp_path_factory.mktemp(request.param)
    (target / "play.yml").write_text(yaml.safe_dump(play(target)))
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", REPOSITORY / "inventory" / request.param, target / "play.yml"],
        env={**os.environ, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = spec.load(REPOSITORY / "inventory" / request.param / "group_vars/all/serving_spec.yml")
    files = {path.stem: yaml.safe_load(path.read_text()) for path in target.glob("*.json")}
    return found, files, target


def test_systemd_accepts_every_unit(rendered: Any) -> None:
    """`systemd-analyze verify` on a root that holds the programs the units start."""
    _, hosts, target = rendered
    for host, files in hosts.items():
        root = target / "root" / host
        for program in (
            f"opt/seatrial/builds/{BUILD}/bin/python",
            "opt/seatrial/bin/seatrial-host",
        ):
            path = root / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
        units = root / "etc/systemd/system"
        units.mkdir(parents=True)
        # What the units name and this root does not have.
        for name in (
            "sysinit.target",
            "network-online.target",
            "seatrial-guard.service",
            "seatrial-revert.service",
            "basic.target",
            "shutdown.target",
        ):
            body = "[Service]\nType=oneshot\nExecStart=/opt/seatrial/bin/seatrial-host status\n"
            (units / name).write_text(body if name.endswith("service") else "[Unit]\n")
        names = [Path(name).name for name in files if name.startswith("units/")]
        for name in names:
            (units / name).write_text(files[f"units/{name}"])
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", f"--root={root}", *names],
            capture_output=True,
            text=True,
            check=False,
        )
        complaints = [line for line in done.stderr.splitlines() if "sglang-" in line]
        assert names
        assert not complaints, "\n".join(complaints)


def test_units_carry_what_the_spec_says(rendered: Any) -> None:
    """The override of index_topk, the memory fraction, the limits of context and chunk."""
    found, hosts, _ = rendered
    engines = 0
    for host, files in hosts.items():
        described = release.parse(files["release.json"], host)
        for role, server in described.servers.items():
            if role == "router":
                continue
            engines += 1
            flags = release.flags_of(server.argv)
            assert flags["json-model-override-args"] == found.override()
            assert flags["mem-fraction-static"] == str(found.mem_fraction_static)
            assert flags["context-length"] == str(found.context_length)
            assert flags["chunked-prefill-size"] == str(found.chunked_prefill_size)
            assert server.env["SGLANG_PLUGINS"] == ",".join(found.engine.patches)
    assert engines == sum(
        len(cell.prefill) + len(cell.decode) + len(cell.combined) for cell in found.cells.values()
    )


def test_units_name_resolved_paths_and_their_release(rendered: Any) -> None:
    """No path through `current`: a process never loads half of one release and half of another."""
    _, hosts, _ = rendered
    for files in hosts.values():
        for name, text in files.items():
            if name.startswith("units/"):
                assert "/opt/seatrial/current" not in text
                assert f"SEATRIAL_RELEASE={DIGEST}" in text
                assert f"/opt/seatrial/builds/{BUILD}/bin/python" in text


def test_router_waits_for_servers_as_long_as_its_process_lives(rendered: Any) -> None:
    """A host that is away would use up the starts of the router beside it; a server's wait ends."""
    found, hosts, _ = rendered
    limit = found.timeouts.ready_seconds + found.timeouts.stop_seconds + 10
    for files in hosts.values():
        for name, text in files.items():
            if name.startswith("units/"):
                is_router = name.endswith("sglang-router.service")
                assert f"\nTimeoutStartSec={'infinity' if is_router else limit}\n" in text
                assert ("ready --seconds infinity http" in text) == is_router


def test_units_keep_their_hygiene(rendered: Any) -> None:
    """What section 10 of SGLang's behaviour asks of a unit."""
    found, hosts, _ = rendered
    for files in hosts.values():
        for name, text in files.items():
            if not name.startswith("units/"):
                continue
            for line in (
                "KillMode=mixed",
                "Restart=on-failure",
                "StartLimitBurst=3",
                "OnFailure=seatrial-revert.service",
                "NoNewPrivileges=yes",
                "ProtectSystem=strict",
                "User=seatrial",
                f"TimeoutStopSec={found.timeouts.stop_seconds}",
            ):
                assert f"\n{line}\n" in text, f"{name} lacks {line}"
