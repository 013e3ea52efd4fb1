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

SENDER = "sglang.srt.disaggregation.mooncake.conn"
# The function that reads the switch, and the sha256 of its source text.
SEND_CHUNK = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
SEND_CHUNK_SHA256 = "f9458879c49b3eeb8c6eaf4a3c0b9ccd4f3d00de8ab7f9474d5cc3e340bd3645"


def apply() -> None:
    """Turn the switch off as soon as a process loads mooncake's sender, if it ever does.

    Raises
    ------
    PatchError
        When SGLang is another version or the stand-ins are not installed.
    """
    upstream.require_version()
    if startup.SglKernelFinder not in sys.meta_path:
        raise PatchError("seatrial_kernels.pth did not run; it should be beside the package")
    upstream.when_imported(SENDER, _without_pinned_memory)


def _without_pinned_memory(sender: ModuleType) -> None:
    try:
        upstream.require_source(SEND_CHUNK, SEND_CHUNK_SHA256)
    except PatchError as error:
        stop("cpu_engine", error)
    sender.MooncakeKVSender.supports_host_tensor_indices = False
