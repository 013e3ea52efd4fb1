"""The cell file is read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial import cell
from seatrial.cell import CellError


def content(**change: Any) -> dict[str, Any]:
    """Return the content of a cell file with a prefill server and a router."""
    servers = [
        {
            "role": role,
            "host": "gpu-a",
            "address": "10.77.0.11",
            "url": f"http://10.77.0.11:{port}",
            "unit": f"sglang-{role}.service",
        }
        for role, port in (("prefill", 30000), ("router", 8000))
    ]
    value = {
        "schema": 1,
        "name": "one",
        "router_url": "http://10.77.0.11:8000",
        "servers": servers,
        "prometheus_url": "http://10.77.0.10:9090",
        "thresholds": "rehearsal",
    }
    return value | change


def written(folder: Path, value: object) -> Path:
    """Write a cell file."""
    path = folder / "cell.json"
    path.write_text(json.dumps(value))
    return path


def test_servers_are_found_by_role(tmp_path: Path) -> None:
    """Engines are all servers but the router; each has its name in Prometheus."""
    found = cell.load(written(tmp_path, content()))
    assert [server.instance for server in found.engines] == ["10.77.0.11:30000"]
    assert [server.label for server in found.with_roles("router")] == ["router on gpu-a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_ulr": "http://a:1"}, "router_ulr: Extra inputs are not permitted"),
        ({"router_url": "a:1"}, "router_url: String should match pattern"),
        ({"servers": [{"role": "prefil"}]}, "servers.0.role: Input should be 'prefill'"),
    ],
)
def test_wrong_key_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A key is named by its path."""
    with pytest.raises(CellError) as caught:
        cell.load(written(tmp_path, content(**change)))
    assert message in str(caught.value)


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """The path is in the sentence."""
    with pytest.raises(CellError, match=r"nothing.json: should be a cell file: No such file"):
        cell.load(tmp_path / "nothing.json")


def test_by_hand_needs_only_a_url() -> None:
    """What is not known is None, and no server is invented."""
    found = cell.by_hand("http://127.0.0.1:30000", "any-server")
    assert (found.servers, found.release, found.spec, found.plan) == ([], None, None, None)
