"""Prefill and decode agree on what they select with, over SGLang's own bootstrap server."""

import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from seatrial_kernels import report, selection
from seatrial_kernels.patches import pd_contract
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager

Apply = Callable[..., None]
# What SGLang's prefill registers besides the KV dtype, for a server of one rank.
RANK: dict[str, Any] = {
    **{f"{name}_size": 1 for name in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")},
    **{f"{name}_rank": 0 for name in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")},
    "rank_ip": "127.0.0.1",
    "rank_port": 1,
    "page_size": 1,
}


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a bootstrap server that nobody has registered with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = CommonKVBootstrapServer("127.0.0.1", port)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except requests.ConnectionError:
            time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    server.close()


def said(topk: int, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text that a server which selects like this puts behind its KV dtype."""
    selection._process.selection = None
    arguments = SimpleNamespace(disaggregation_mode="decode", enable_metrics=False)
    selection.declare(topk, dtype, rank=0, arguments=arguments)
    monkeypatch.setattr(report, "digest", lambda: kernels)
    arguments = SimpleNamespace(kv_cache_dtype_str="auto")
    pd_contract._say(None, arguments)
    pd_contract._say(None, arguments)  # a second manager of one process says it once
    return str(arguments.kv_cache_dtype_str)


def decode_server(text: str) -> Any:
    """Return as much of SGLang's KV manager as compares itself with a prefill server."""
    manager = object.__new__(CommonKVManager)
    manager.kv_args = SimpleNamespace(page_size=1)
    manager.kv_cache_dtype_str = text
    manager.prefill_info_table = {}
    manager.attn_tp_size = manager.dcp_size = 1
    manager.is_mla_backend = manager.is_hybrid_mla_backend = False
    manager._resolve_rank_mapping = lambda info: None
    return manager


def register(address: str, text: str | None) -> None:
    """Register a prefill server that says ``text`` as its KV dtype, as SGLang's does."""
    row = {**RANK, "kv_cache_dtype": text}
    assert requests.put(f"http://{address}/route", json=row, timeout=5).status_code == 200


def test_a_pair_that_selects_alike_is_accepted(
    apply: Apply, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three words agree; the second question is answered from SGLang's table."""
    apply("pd_contract")
    text = said(1024, "bf16", "0123456789abcdef", monkeypatch)
    assert text == "auto; index_topk=1024 index_key_dtype=bf16 kernels=0123456789abcdef"
    register(address, text)
    manager = decode_server(text)
    assert manager.try_ensure_parallel_info(address) is True
    assert manager.try_ensure_parallel_info(address) is True
    assert manager.prefill_info_table[address].kv_cache_dtype == text


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ((512, "bf16", "0" * 16), "has index_topk 512; this decode server has index_topk 1024"),
        (
            (1024, "fp8_e4m3", "0" * 16),
            "has index_key_dtype fp8_e4m3; this decode server has index_key_dtype bf16",
        ),
        (
            (1024, "bf16", "1" * 16),
            "has kernels 1111111111111111; this decode server has kernels 0000000000000000",
        ),
        (
            (512, "fp8_e4m3", "0" * 16),
            "has index_topk 512, index_key_dtype fp8_e4m3; this decode server has index_topk",
        ),
    ],
    ids=["index_topk", "index_key_dtype", "kernels", "two"],
)
def test_a_pair_that_differs_is_refused(
    apply: Apply,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    theirs: tuple[int, str, str],
    sentence: str,
) -> None:
    """One sentence names the prefill server, what differs on both sides, and what to do."""
    apply("pd_contract")
    register(address, said(*theirs, monkeypatch))
    manager = decode_server(said(1024, "bf16", "0" * 16, monkeypatch))
    with pytest.raises(SystemExit, match="patch pd_contract stops this server") as stopped:
        manager.try_ensure_parallel_info(address)
    told = str(stopped.value)
    assert f"the prefill server at {address} {sentence}" in told
    assert told.endswith("; deploy one release to both")
    assert manager.prefill_info_table == {}


@pytest.mark.parametrize("text", ["auto", None], ids=["unpatched", "silent"])
def test_a_prefill_server_that_says_nothing_is_refused(
    apply: Apply, address: str, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """SGLang lets a missing KV dtype pass; a missing contract does not."""
    apply("pd_contract")
    register(address, text)
    manager = decode_server(said(1024, "bf16", "0" * 16, monkeypatch))
    with pytest.raises(SystemExit, match="does not say its index_topk, index_key_dtype and ker"):
        manager.try_ensure_parallel_info(address)


def test_an_unpatched_decode_server_refuses_a_patched_prefill_server(
    apply: Apply, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's own comparison of the KV dtype."""
    register(address, said(1024, "bf16", "0" * 16, monkeypatch))
    with pytest.raises(RuntimeError, match="KV cache dtype mismatch"):
        decode_server("auto").try_ensure_parallel_info(address)


def test_sglang_s_other_refusals_stay_its_own(
    apply: Apply, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page size that differs raises what it raised; a server that is not there is asked again."""
    apply("pd_contract")
    text = said(1024, "bf16", "0" * 16, monkeypatch)
    manager = decode_server(text)
    assert manager.try_ensure_parallel_info(address) is False  # not registered yet
    register(address, text)
    manager.kv_args.page_size = 64
    with pytest.raises(RuntimeError, match="Page size mismatch"):
        manager.try_ensure_parallel_info(address)


def test_a_server_whose_selection_nobody_declared_stops(
    apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without an indexer that the patches know has nothing to agree on."""
    apply("pd_contract")
    with pytest.raises(SystemExit, match="no attention backend has said its index_topk"):
        pd_contract._say(None, SimpleNamespace(kv_cache_dtype_str="auto"))
