"""Patch ``cpu_engine``: SGLang's CPU engine, as the prefill server of a P/D pair too.

Subject:     mooncake's KV sender takes its page indices from pinned memory, behind a CUDA event.
Why:         a CPU build has neither: the first request of a prefill server ends the process.
Upstream:    not sent, because upstream does not support P/D serving on CPUs.
Applies-to:  sglang 0.5.23
Remove-when: ``disaggregation/prefill.py`` asks for a CUDA device before it takes that path.
Gate:        kernels/tests/test_cpu_engine.py, and the rehearsal's first request through cell one

The other half of the patch, the stand-ins, is in ``startup.py``: it must be there earlier.
"""

import sys
from types import ModuleType

from seatrial_kernels import upstream
from seatrial_kernels.cpu_engine import startup
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "cpu_engine"
SENDER = "sglang.srt.disaggregation.mooncake.conn"
# The function that reads the switch.
SEND_CHUNK = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
# Checked when the sender is loaded: only a prefill server loads either.
HOOKS = {"0.5.23": (Hook(SEND_CHUNK, "b294ac9e0abdf27e", "read"),)}


def apply() -> None:
    """Turn the switch off as soon as a process loads mooncake's sender, if it ever does.

    Raises
    ------
    PatchError
        When SGLang is another version or the stand-ins are not installed.
    """
    upstream.require_version(*HOOKS)
    if startup.SglKernelFinder not in sys.meta_path:
        raise PatchError("seatrial_kernels.pth did not run; it should be beside the package")
    upstream.when_imported(SENDER, _without_pinned_memory)


def _without_pinned_memory(sender: ModuleType) -> None:
    try:
        upstream.install(NAME, HOOKS)
    except PatchError as error:
        stop(NAME, error)
    sender.MooncakeKVSender.supports_host_tensor_indices = False
