"""SGLang finds its CPU stand-ins, real parts win over them, and no patch fails in silence."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sgl_kernel
import torch
from seatrial_kernels import upstream
from seatrial_kernels.cpu_engine import patch, startup
from seatrial_kernels.plugin import PATCHES_OF, PatchError


def python(code: str, patches: str = "") -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter of this environment."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SGLANG_PLUGINS": patches},
    )


def test_an_interpreter_that_is_not_sglang_loads_nothing_more() -> None:
    """The .pth line costs what it must: two finders, no torch, no metadata."""
    done = python("import sys; print('torch' in sys.modules, 'importlib.metadata' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_stand_in_is_asked_last() -> None:
    """An installed sgl_kernel is found first."""
    assert sys.meta_path[-1] is startup.SglKernelFinder
    assert startup.SglKernelFinder.find_spec("json") is None


def test_new_slots_go_to_their_requests() -> None:
    """Each request's row takes as many of the slots as it has new tokens, and nothing else."""
    table = torch.full((4, 8), -1, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0, 3]),
        table,
        torch.tensor([1, 4, 0]),
        torch.tensor([3, 4, 4]),
        torch.tensor([10, 11, 20, 21, 22, 23]),
        8,
    )
    expected = torch.full((4, 8), -1, dtype=torch.int32)
    expected[2, 1:3] = torch.tensor([10, 11])
    expected[3, 0:4] = torch.tensor([20, 21, 22, 23])
    assert table.equal(expected)


def test_an_operator_without_a_stand_in_says_so() -> None:
    """Importing it works, as SGLang does at load time; calling it names it."""
    from sgl_kernel import rotate_input_ids_cpu

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.rotate_input_ids_cpu has no CPU"):
        rotate_input_ids_cpu()


def test_torchvision_loads() -> None:
    """Beside a CPU torch its own library is missing; its Python side loads all the same."""
    assert find_spec("torchvision") is not None
    done = python("import torchvision; print(torchvision.__version__)")
    assert done.returncode == 0, done.stderr


def test_the_switch_of_the_sender_is_off_once_it_is_loaded() -> None:
    """And the function that reads it has the text that was read."""
    done = python(
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender as sender\n"
        "print('switch', sender.supports_host_tensor_indices)",
        patches="cpu_engine",
    )
    assert "switch False" in done.stdout, done.stderr


def test_another_meaning_of_a_hooked_function_is_refused() -> None:
    """The message names the function and both fingerprints."""
    with pytest.raises(
        PatchError, match=r"send_kv_chunk means something else \(fingerprint [0-9a-f]"
    ):
        upstream.require_source(patch.SEND_CHUNK, "0" * 16)


def test_without_a_list_no_patch_is_applied() -> None:
    """SGLang takes an empty SGLANG_PLUGINS for all plugins; a release without patches has none."""
    done = python(
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "print('hooks', len(HookRegistry._hooks))"
    )
    assert "hooks 0" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("patches", "sentence"),
    [
        ("cpu_engine,topkk", "SGLANG_PLUGINS names topkk, which no installed package has"),
        ("topk,topk_v2_sm120", "topk and topk_v2_sm120 replace the same kernel; choose one"),
    ],
)
def test_a_list_that_cannot_be_meant_ends_the_process(patches: str, sentence: str) -> None:
    """SGLang passes over a name that it does not find."""
    done = python("from sglang.srt.plugins import load_plugins; load_plugins()", patches)
    assert done.returncode == 1
    assert sentence in done.stderr


def test_a_hook_runs_after_its_module_and_no_other(tmp_path: Path) -> None:
    """``when_imported`` works for a module that is loaded later and for one that is there."""
    (tmp_path / "late_module.py").write_text("value = 1\n")
    seen: list[int] = []
    sys.path.insert(0, str(tmp_path))
    before = list(sys.meta_path)
    try:
        upstream.when_imported("late_module", lambda module: seen.append(module.value))
        assert seen == []
        import late_module  # type: ignore[import-not-found]

        assert seen == [1]
        late_module.value = 2
        upstream.when_imported("late_module", lambda module: seen.append(module.value))
        assert seen == [1, 2]
    finally:
        sys.meta_path[:] = before
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("name", PATCHES_OF["cpu"])
def test_a_patch_that_fails_ends_the_process_with_one_sentence(name: str) -> None:
    """SGLang would log the error and serve unpatched."""
    done = python(
        "import importlib.metadata, seatrial_kernels.upstream as upstream\n"
        "upstream.version = lambda name: '9.9.9'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('still here')",
        patches=name,
    )
    sentence = f"seatrial-kernels: patch {name} stops this server: it is written for sglang 0.5.23"
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "not 9.9.9" in done.stderr
    assert "still here" not in done.stdout
