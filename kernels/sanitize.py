"""Run the operations' GPU tests under compute-sanitizer: memcheck, then racecheck.

    python sanitize.py [OP ...]        # on a machine with a GPU and CUDA's compute-sanitizer

It runs the tests marked `sanitized`, each allocation of torch's its own, so that a read past the
end is a read past the end. Exits with 1 if the sanitizer reports anything or a test fails.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("memcheck", "racecheck")


def main() -> None:
    """Run both tools over each operation named, or over all of them."""
    ops = sys.argv[1:] or sorted(path.parent.name for path in HERE.glob("csrc/*/gate.toml"))
    results = {(op, tool): sanitized(op, tool) for op in ops if op != "common" for tool in TOOLS}
    for (op, tool), status in results.items():
        print(f"{op} {tool}: {'clean' if status == 0 else f'RED (exit {status})'}")
    sys.exit(any(results.values()))


def sanitized(op: str, tool: str) -> int:
    """Run one tool over one operation; 0 is clean and green."""
    return subprocess.run(
        [
            *("compute-sanitizer", f"--tool={tool}", "--error-exitcode=99", "--print-limit=10"),
            *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "sanitized", "-rs"),
            *("-p", "no:cacheprovider", HERE / f"tests/test_{op}.py"),
        ],
        check=False,
        cwd=HERE,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(HERE)},
    ).returncode


if __name__ == "__main__":
    main()
