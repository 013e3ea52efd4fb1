"""Drop what the platform never loads from the environment whose Python runs this.

A build is shipped to every host and kept there in several versions, so its size counts: the CPU
build loses more than a third. And what stays must be loadable: role `gpu_host` asks each host for
every library that is still needed. `build.json` lists what was dropped.
"""

import argparse
import shutil
import sysconfig
from pathlib import Path

import elf

# Paths in site-packages, with the reason. A folder goes with all that is in it.
PRUNED = {
    "cpu": [
        # Compilers, headers and profilers for GPUs; triton itself must stay importable.
        "triton/backends/*/bin",
        "triton/backends/*/include",
        "triton/backends/*/lib",
        "triton/_C/libproton.so",
        "triton/FileCheck",
        "triton/instrumentation",
        "triton/plugins",
        # Headers and test programs of PyTorch: nothing is compiled against it on a CPU host.
        "torch/bin/*[tT]est*",
        "torch/bin/protoc*",
        "torch/include",
        "torch/lib/*test*.so",
        "torch/test",
        # Built against CUDA's PyTorch: cannot be loaded beside the CPU one.
        "torchvision/_C.so",
        "torchvision/image.so",
        # A benchmark, and a store's daemons, which a peer-to-peer transfer does not start.
        "mooncake/mooncake_client",
        "mooncake/mooncake_master",
        "mooncake/transfer_engine_bench",
        # Stubs for completion at a prompt that no server has.
        "jedi/third_party",
        # Self-tests that install with the package.
        "sympy/**/tests",
    ],
    "cuda13": [
        # Optional parts that load only where a library is installed that no GPU host must have:
        # decoders for six versions of FFmpeg, and for HEIC,
        "torchcodec/libtorchcodec_core*.so",
        "torchcodec/libtorchcodec_custom_ops*.so",
        "torchcodec/libtorchcodec_heic.so",
        # start-up through MPI and transports other than InfiniBand's own,
        "nvidia/nvshmem/lib/nvshmem_bootstrap_mpi.so*",
        "nvidia/nvshmem/lib/nvshmem_bootstrap_pmix.so*",
        "nvidia/nvshmem/lib/nvshmem_bootstrap_shmem.so*",
        "nvidia/nvshmem/lib/nvshmem_transport_libfabric.so*",
        "nvidia/nvshmem/lib/nvshmem_transport_ucx.so*",
        # reads of files over RDMA,
        "nvidia/cu13/lib/libcufile_rdma.so*",
        # thread pools beside numba's own,
        "numba/np/ufunc/omppool*.so",
        "numba/np/ufunc/tbbpool*.so",
        # and hooks for CUDA 12.
        "torch_memory_saver_hook_mode_*_cu12.abi3.so",
        "torch_memory_saver_hook_mode_preload.abi3.so",
        "torch_memory_saver_hook_mode_torch.abi3.so",
    ],
}
# Debug information and symbol tables go where nothing is ever linked against the build; on CUDA
# hosts kernels are compiled at run time and linked against its libraries.
STRIPPED = {"cpu"}


def patterns(platform: str) -> list[str]:
    """What `build.json` says was dropped."""
    stripped = ["symbol tables and debug information"] if platform in STRIPPED else []
    return PRUNED[platform] + stripped


def main() -> None:
    """Drop it and say how much that was."""
    parser = argparse.ArgumentParser(description="Drop what the platform never loads.")
    parser.add_argument("--platform", choices=sorted(PRUNED), required=True)
    platform = parser.parse_args().platform
    packages = Path(sysconfig.get_path("purelib"))

    before = size(packages)
    for pattern in PRUNED[platform]:
        drop(packages, pattern)
    if platform in STRIPPED:
        for path in elf.elf_files(packages):
            elf.strip(path)
    print(f"{before >> 20} MiB -> {size(packages) >> 20} MiB")


def drop(packages: Path, pattern: str) -> None:
    """Remove what matches.

    Raises:
        SystemExit: nothing does, so the list is out of date with the lock.
    """
    found = list(packages.glob(pattern))
    if not found:
        raise SystemExit(f"prune.py: nothing matches {pattern}; the lock has moved on, mend PRUNED")
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def size(root: Path) -> int:
    """Bytes of the regular files under `root`."""
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())


if __name__ == "__main__":
    main()
