"""Put the CPU stand-ins where Python looks for modules.

Subject:     SGLang's CPU engine imports ``sgl_kernel``, whose PyPI wheel holds CUDA code only, and
             the PyPI torchvision expects operators that only its CUDA library defines.
Why:         without the first no CPU server starts; without the second transformers does not load.
Upstream:    not sent, because upstream's answer is to compile sgl-kernel for CPUs with AMX.
Applies-to:  sglang 0.5.23, torchvision 0.28.0 beside torch 2.13.0+cpu
Remove-when: PyPI has a CPU wheel of sglang-kernel and torchvision's CPU build is used.
Gate:        kernels/tests/test_cpu_engine.py

Started by ``seatrial_kernels.pth`` in every interpreter of the environment, so it imports nothing
that Python has not loaded already and takes well under a millisecond. The stand-in for sgl_kernel
is asked last: a real one always wins.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class SglKernelFinder:
    """Find ``sgl_kernel`` in this package when nobody else has it."""

    @staticmethod
    def find_spec(name: str, *_search: object) -> ModuleSpec | None:
        """Return the stand-in's spec, or None for any other module."""
        if name != "sgl_kernel":
            return None
        file = __file__.replace("startup.py", "sgl_kernel.py")
        return ModuleSpec(name, SourceFileLoader(name, file), origin=file)


class TorchvisionFinder:
    """Let torchvision be loaded with its two missing operators defined."""

    @staticmethod
    def find_spec(name: str, *_search: object) -> ModuleSpec | None:
        """Return torchvision's own spec with the loader below, or None for any other module."""
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = TorchvisionLoader(name, spec.loader.path)
        return spec


class TorchvisionLoader(SourceFileLoader):
    """Load torchvision after the schemas of ``nms`` and ``qnms`` are defined."""

    def exec_module(self, module: ModuleType) -> None:
        """Define what is missing, then run torchvision's own code, unmodified."""
        import torch

        if torch.version.cuda is None:
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{name}", schema)
        super().exec_module(module)


sys.meta_path.insert(0, TorchvisionFinder)
sys.meta_path.append(SglKernelFinder)
