"""Patch ``topk_v2_sm120``: SGLang's top-k v2 on sm_120, where SGLang turns it off.

Subject:     resolving the arguments for DeepSeek-V4 sets SGLANG_OPT_USE_TOPK_V2 to 0 on sm_120,
             whatever the environment says.
Why:         v1 gives each row one block and ends at 1024 entries; v2 goes up to 2048. In the code
             for sm_120 its paths with clusters are left out.
Upstream:    not sent: nobody has run v2 on sm_120. Compiled for it (nvcc 13.0.88) its kernel has 42
             to 46 registers, no stack and 28 KB of shared memory, which fits; that is all known.
Applies-to:  sglang 0.5.23; in 0.5.17 v2 needs more shared memory than sm_120 has
Remove-when: SGLang leaves the switch alone on sm_120, or the patch ``topk`` is chosen for good.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_top_k_v2_comes_back_on_sm_120
"""

from collections.abc import Callable
from typing import Any

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "topk_v2_sm120"


def _restore(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run SGLang's step and set the switch to what it was before it, which is 1 if nobody set it.

    Child processes inherit the environment in which SGLang keeps it.
    """
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_platform

    before = envs.SGLANG_OPT_USE_TOPK_V2.get()
    previous(server_args)
    if not get_platform().is_sm120:
        stop(NAME, PatchError("this GPU is not sm_120, where alone SGLang turns its top-k v2 off"))
    envs.SGLANG_OPT_USE_TOPK_V2.set(before)


HOOKS = {
    "0.5.23": (
        Hook(
            "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
            "f7c9483613472151",
            "resolution",
            _restore,
        ),
        Hook("sglang.srt.arg_groups.resolution_hooks.run_hook", "a25857fd2996ebeb", "read"),
    ),
}


def apply() -> None:
    """Register the step.

    Raises
    ------
    PatchError
        When SGLang is not as expected.
    """
    upstream.install(NAME, HOOKS, selection.HOOKS, report.HOOKS)
