"""What the roles `entry` and `monitoring` lay down fits the serving spec of every fleet."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
FLEETS = sorted(path.parent.name for path in REPOSITORY.glob("inventory/*/group_vars"))
ENGINES = ("prefill", "decode", "combined")


class Fleet(NamedTuple):
    """A fleet's spec and addresses, and the files that its entry and its Prometheus get."""

    spec: dict[str, Any]
    addresses: dict[str, str]
    haproxy: Path
    prometheus: dict[str, Any]

    def targets(self, job: str) -> dict[str, dict[str, str]]:
        """Return ``{address:port: labels}`` of one scrape job."""
        found = next(c for c in self.prometheus["scrape_configs"] if c["job_name"] == job)
        return {
            target: entry["labels"]
            for entry in found["static_configs"]
            for target in entry["targets"]
        }


def render(role: str, template: str, target: Path, **variables: Any) -> dict[str, Any]:
    """Return a play that renders a template with the role's own expressions on this machine."""
    folder = REPOSITORY / "roles" / role
    return {
        "hosts": role,
        "connection": "local",
        "gather_facts": False,
        "vars_files": [f"{folder}/vars/main.yml"],
        "vars": {
            **yaml.safe_load((folder / "defaults/main.yml").read_text()),
            "role_path": str(folder),
            **variables,
        },
        "tasks": [
            {
                "ansible.builtin.template": {
                    "src": f"{REPOSITORY}/templates/{template}.j2",
                    "dest": f"{target}/{template}",
                    "mode": "0644",
                },
                "vars": {
                    "ansible_python_interpreter": "{{ ansible_playbook_python }}",
                    "ansible_shell_executable": "/bin/sh",
                },
            }
        ],
    }


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Return a fleet with both files rendered by Ansible."""
    target = tmp_path_factory.mktemp(request.param)
    keys = target / "api_keys"
    keys.write_text("a-key\n")
    plays = [
        render("entry", "haproxy.cfg", target, entry_api_keys_file=str(keys)),
        render(
            "monitoring",
            "prometheus.yml",
            target,
            monitoring_entry_hosts="{{ groups['entry'] }}",
            monitoring_control_hosts="{{ groups['control'] }}",
            address_of="{{ dict(groups['all'] | zip(groups['all'] | map('extract', hostvars,"
            " 'seatrial_address'))) }}",
        ),
    ]
    plays[1]["tasks"].append(
        {
            "ansible.builtin.copy": {
                "content": "{{ {'spec': serving_spec, 'addresses': address_of} | to_json }}",
                "dest": f"{target}/fleet.json",
                "mode": "0644",
            },
            "vars": plays[1]["tasks"][0]["vars"],
        }
    )
    (target / "play.yml").write_text(yaml.safe_dump(plays))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            "-i",
            REPOSITORY / "inventory" / request.param,
            target / "play.yml",
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    known = yaml.safe_load((target / "fleet.json").read_text())
    return Fleet(
        known["spec"],
        known["addresses"],
        target / "haproxy.cfg",
        yaml.safe_load((target / "prometheus.yml").read_text()),
    )


def test_haproxy_accepts_the_entry(fleet: Fleet) -> None:
    """HAProxy's own check of the whole configuration."""
    done = subprocess.run(
        ["/usr/sbin/haproxy", "-c", "-f", fleet.haproxy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_who_hangs_up_is_gone_for_the_cell_too(fleet: Fleet, tmp_path: Path) -> None:
    """Else a cell that once was silent has less of the load as long as the entry waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as cell, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        text = re.sub(
            r"(?m)^  (user|group|chroot|log|stats|server-state|monitor|option httpchk).*",
            "",
            fleet.haproxy.read_text().partition("frontend metrics")[0],
        )
        text = re.sub(r"bind :\d+", f"bind 127.0.0.1:{port}", text)
        text = re.sub(r"(?m)^  (default-server|http-check|load-server-state).*", "", text)
        text = re.sub(r"(?m)^(  server \w+) \S+", rf"\1 127.0.0.1:{cell.getsockname()[1]}", text)
        config = tmp_path / "haproxy.cfg"
        config.write_text(text)
        with subprocess.Popen(["/usr/sbin/haproxy", "-db", "-f", config]) as entry:
            try:
                with connected(port) as client:
                    head = "POST /generate HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n"
                    client.sendall(f"{head}Authorization: Bearer a-key\r\n\r\n{{}}".encode())
                    asked, _ = cell.accept()
                    asked.settimeout(10)
                    assert asked.recv(65536).startswith(b"POST /generate")
                with asked, contextlib.suppress(ConnectionResetError):
                    assert asked.recv(65536) == b""
            finally:
                entry.terminate()


def connected(port: int) -> socket.socket:
    """Return a connection to a port of this machine, as soon as somebody listens there."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_every_cell_is_a_server_at_its_router(fleet: Fleet) -> None:
    """The entry knows the cells of the spec, and no other."""
    port = fleet.spec["roles"]["router"]["port"]
    servers = [
        line.split()[1:]
        for line in fleet.haproxy.read_text().splitlines()
        if line.strip().startswith("server ")
    ]
    assert servers == [
        [name, f"{fleet.addresses[cell['router']]}:{port}"]
        for name, cell in fleet.spec["cells"].items()
    ]


def test_a_cell_starts_closed(fleet: Fleet) -> None:
    """Only an `admit` opens a cell."""
    line = next(s for s in fleet.haproxy.read_text().splitlines() if "default-server" in s)
    assert "disabled" in line.split()


def test_every_engine_is_scraped_as_itself(fleet: Fleet) -> None:
    """Each engine of the spec is one target, labelled with its cell, role and host."""
    assert fleet.targets("engine") == {
        f"{fleet.addresses[host]}:{fleet.spec['roles'][role]['port']}": {
            "cell": name,
            "role": role,
            "host": host,
        }
        for name, cell in fleet.spec["cells"].items()
        for role in ENGINES
        for host in cell.get(role, [])
    }


def test_every_router_is_scraped_on_its_metrics_port(fleet: Fleet) -> None:
    """Each cell's router is one target."""
    port = fleet.spec["roles"]["router"]["metrics_port"]
    assert fleet.targets("router") == {
        f"{fleet.addresses[cell['router']]}:{port}": {
            "cell": name,
            "role": "router",
            "host": cell["router"],
        }
        for name, cell in fleet.spec["cells"].items()
    }


def test_every_host_of_a_cell_is_scraped_as_a_machine(fleet: Fleet) -> None:
    """node-exporter of each host, with the cell that the host belongs to."""
    labels = {entry["host"]: entry.get("cell") for entry in fleet.targets("node").values()}
    for name, cell in fleet.spec["cells"].items():
        for host in {cell["router"], *(h for role in ENGINES for h in cell.get(role, []))}:
            assert labels[host] == name


def test_the_control_host_is_scraped_where_the_inventory_says_so(fleet: Fleet) -> None:
    """Its node-exporter tells what the reconciler does."""
    controllers = [
        entry for entry in fleet.targets("node").values() if entry["host"] == "controller"
    ]
    assert controllers == [{"role": "node", "host": "controller"}]


def test_a_scrape_never_outlasts_its_interval(fleet: Fleet) -> None:
    """Prometheus refuses a configuration whose time-out is longer than the interval."""
    settings = fleet.prometheus["global"]
    interval, timeout = (int(settings[f"scrape_{key}"][:-1]) for key in ("interval", "timeout"))
    assert timeout <= interval
