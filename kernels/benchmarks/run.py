"""Build, check and time every operation on this machine's GPU.

    python kernels/benchmarks/run.py [--op OP] [--only TEXT] [--json FILE] [--nvcc PATH]
                                     [--peers FOLDER]

Prints a table and writes the same as JSON. Exits with 1 if a check is red: that case has no time.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build
from benchmarks import harness, peers
from seatrial_kernels import native


def main() -> None:
    """Run the benchmarks."""
    import torch

    ops = sorted(
        path.stem
        for path in HERE.glob("*.py")
        if path.stem not in {"run", "harness", "peers", "index_report"}
    )
    parser = argparse.ArgumentParser(description="Build, check and time the kernels.")
    parser.add_argument("--op", choices=ops, action="append", help="only this one; repeatable")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    parser.add_argument("--json", type=Path, default=Path("kernels-benchmark.json"))
    parser.add_argument("--nvcc", type=Path)
    parser.add_argument("--peers", type=Path, help="folder of public kernels compiled elsewhere")
    given = parser.parse_args()

    if given.peers:
        peers.folder = given.peers
    begun = time.monotonic()
    if native.description().get("source_sha256") != native_build.source_sha256():
        native_build.build(native.LIBRARY.parent, native_build.find_nvcc(given.nvcc))
        native.description.cache_clear()
    native.check_device()
    bandwidth = harness.copy_bytes_per_second()
    results = []
    for op in given.op or ops:
        for case in importlib.import_module(f"benchmarks.{op}").cases():
            if given.only in case.name:
                results.append(harness.judge(case, bandwidth))
                print(harness.table(results[-1:]).splitlines()[-1], flush=True)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": bandwidth / 1e12,
        "library": native.description(),
        "seconds": time.monotonic() - begun,
    }
    told = {"machine": machine, "results": [result.as_json() for result in results]}
    given.json.write_text(json.dumps(told, indent=2) + "\n")
    print(
        f"\n{machine['gpu']}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, "
        f"{machine['seconds']:.0f} s, {given.json}"
    )
    print(harness.table(results))
    sys.exit(any(result.fault for result in results))


if __name__ == "__main__":
    main()
