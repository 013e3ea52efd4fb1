"""Patch ``cpu_dsa``: the attention backend of that name, the CPU engine's sparse attention.

Subject:     SGLang's sparse attention (DSA) exists for accelerators only.
Why:         a rehearsal without a GPU must lose a needle for the reason production does: the
             indexer did not select it.
Upstream:    not sent, because it serves a hand-wired model that rehearses a rollout.
Applies-to:  sglang 0.5.23
Remove-when: SGLang selects sparsely on a CPU.
Gate:        kernels/tests/test_cpu_dsa.py, and the rehearsal's window cases

Uses SGLang's public registration for the backend. The hook on the model configuration checks the
indexer's values before anything is allocated, and keeps as many index layers as the key dtype
needs, so that the KV pool, the P/D transfer and the memory plan really grow with it.
"""

from typing import TYPE_CHECKING, Any

from seatrial_kernels import report, upstream
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.sparse_attention.settings import IndexSettings
from seatrial_kernels.upstream import Hook

if TYPE_CHECKING:
    from seatrial_kernels.sparse_attention.backend import CpuSparseAttention

NAME = "cpu_dsa"


def apply() -> None:
    """Register the backend and hook the reading of the model configuration.

    Raises
    ------
    PatchError
        When SGLang is another version or has no such function.
    """
    upstream.install(NAME, HOOKS, report.HOOKS)
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _with_index_layers(config: Any, *_args: Any, **_kwargs: Any) -> None:
    try:
        settings = IndexSettings.of(config)
    except PatchError as error:
        stop(NAME, error)
    config.num_hidden_layers = settings.index_layers.stop


def _create(runner: Any) -> "CpuSparseAttention":
    from seatrial_kernels.sparse_attention.backend import CpuSparseAttention

    try:
        return CpuSparseAttention(runner)
    except PatchError as error:
        stop(NAME, error)


_MODULE = "sglang.srt.layers.attention.torch_native_backend"
HOOKS = {
    "0.5.23": (
        Hook(
            "sglang.srt.utils.hf_transformers.config.get_config",
            "782c7b986feeba5c",
            "after",
            _with_index_layers,
        ),
        # What the backend builds on.
        Hook(f"{_MODULE}.TorchNativeAttnBackend.__init__", "092efe0f8e06ce17", "read"),
        Hook(f"{_MODULE}.TorchNativeAttnBackend.forward_extend", "49e689b928133fa7", "read"),
        Hook(f"{_MODULE}.TorchNativeAttnBackend.forward_decode", "4b2ba0ecc0298fc7", "read"),
    ),
}
