"""Patch ``pd_contract``: prefill and decode refuse each other unless they select alike.

Subject:     a decode server compares page size, KV dtype and KV layout with its prefill server.
Why:         it does not compare index_topk, the index keys' dtype or the kernels. A pair that
             differs serves wrong answers: keys are read in another dtype than they were written in,
             or the two halves of a request select differently.
Upstream:    not sent, because two of the three are this project's own.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: SGLang's handshake carries the layout of the index keys and the model's overrides.
Gate:        kernels/tests/plugin/test_pd_contract.py, and the rehearsal's cell of two hosts

What must agree travels behind the KV dtype, the one text that both versions send and compare for
equality. So a server without this patch, on either side, is refused too.
"""

import re
from collections.abc import Callable
from typing import Any

from seatrial_kernels import plugin, report, selection, upstream
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "pd_contract"
SEPARATOR = "; "
# What SGLang says when the two texts differ.
REFUSAL = re.compile(r"prefill server has kv_cache_dtype=(.*), but decode server has", re.DOTALL)


def contract() -> str:
    """Return what both ends must agree on, as ``name=value`` words.

    Raises
    ------
    PatchError
        When nothing in this process has said what it selects with.
    """
    now = selection.current()
    if now is None:
        raise PatchError(
            "no attention backend has said its index_topk; this model has no indexer that it knows"
        )
    return (
        f"index_topk={now.index_topk} index_key_dtype={now.index_key_dtype} "
        f"kernels={report.digest()}"
    )


def difference(theirs: str, ours: str, address: str) -> str:
    """Return one sentence on how two texts ``dtype; name=value ...`` differ."""
    _, _, said = theirs.partition(SEPARATOR)
    if not said:
        return (
            f"the prefill server at {address} does not say its index_topk, index_key_dtype and "
            "kernels: it runs without pd_contract; deploy one release to both"
        )
    their_words, our_words = _words(theirs), _words(ours)
    differing = [
        name
        for name in {**our_words, **their_words}
        if their_words.get(name) != our_words.get(name)
    ]
    prefill = ", ".join(f"{name} {their_words.get(name, 'unsaid')}" for name in differing)
    decode = ", ".join(f"{name} {our_words.get(name, 'unsaid')}" for name in differing)
    return (
        f"the prefill server at {address} has {prefill}; this decode server has {decode}; "
        "deploy one release to both"
    )


def _words(text: str) -> dict[str, str]:
    dtype, _, said = text.partition(SEPARATOR)
    return {"kv_cache_dtype": dtype, **dict(word.split("=", 1) for word in said.split())}


def _say(_manager: Any, arguments: Any, *_rest: Any, **_named: Any) -> None:
    """Put the contract behind the KV dtype, before the manager reads and registers it."""
    try:
        said = f"{SEPARATOR}{contract()}"
    except PatchError as error:
        stop(NAME, error)
    if not arguments.kv_cache_dtype_str.endswith(said):
        arguments.kv_cache_dtype_str += said


def _compare(original: Callable[..., bool], manager: Any, address: str) -> bool:
    """Stop this decode server, with a sentence of our own, when its prefill server differs."""
    ours = manager.kv_cache_dtype_str
    try:
        is_known = original(manager, address)
    except RuntimeError as error:
        refused = REFUSAL.search(str(error))
        if refused is None:
            raise
        stop(NAME, PatchError(difference(refused[1], ours, address)))
    if is_known:
        theirs = manager.prefill_info_table[address].kv_cache_dtype or ""
        if theirs != ours:  # SGLang lets a missing one pass
            stop(NAME, PatchError(difference(theirs, ours, address)))
    return is_known


_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
HOOKS = {
    "0.5.23": (
        Hook(f"{_MANAGER}.__init__", "c8fa50b0edf85916", "before", _say),
        Hook(f"{_MANAGER}.register_to_bootstrap", "b574b2ab313f0918", "read"),
        Hook(f"{_MANAGER}.try_ensure_parallel_info", "6dbd764f5bc85c53", "around", _compare),
    ),
    "0.5.17": (
        Hook(f"{_MANAGER}.__init__", "a03b2d2e0eb49829", "before", _say),
        Hook(f"{_MANAGER}.register_to_bootstrap", "3ea4f0705b8adabe", "read"),
        Hook(f"{_MANAGER}.try_ensure_parallel_info", "008c3168d6b58540", "around", _compare),
    ),
}


def apply() -> None:
    """Register the hooks, and on a GPU those that read what the server selects with.

    Raises
    ------
    PatchError
        When SGLang is not as expected.
    """
    upstream.install(NAME, HOOKS)
    if "cpu_dsa" not in plugin.selected():
        upstream.install(NAME, selection.HOOKS)
    upstream.install(NAME, report.HOOKS)
