"""Compile ``csrc/*/*.cu`` into the one shared library of this package, ahead of time.

    python native_build.py                  # into seatrial_kernels/, for work in this checkout
    python native_build.py --nvcc PATH --to FOLDER

Beside the library comes ``native.json``: compiler, flags, targets, a digest of the sources, and
what the operations declare in their ``gate.toml``. The library has a plain C interface and knows
neither Python nor torch, so one serves every version of both.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARY = "libseatrial_kernels.so"
DESCRIPTION = "native.json"

# Machine code only: a card of another kind gets an error that names it, not a compile at start.
# The `a` targets hold what is specific to one generation; sm_120a adds its own fp8 and fp4 MMA.
TARGETS = ("sm_90a", "sm_120a")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-lineinfo",  # compute-sanitizer and profilers then name a source line
    "--expt-relaxed-constexpr",
    "-Werror=all-warnings",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
LINK = (
    "-shared",
    "-cudart=static",  # whatever CUDA the torch beside us was built with
    "-Xcompiler=-static-libgcc,-static-libstdc++",
    "-Xlinker=--exclude-libs=ALL,--strip-all",
)


class BuildError(Exception):
    """The library cannot be compiled; the message is one sentence that says what to do."""


def main() -> None:
    """Compile, and print where to."""
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time.")
    parser.add_argument("--nvcc", type=Path, help="compiler; without it: CUDA_HOME, PATH, wheels")
    parser.add_argument("--to", type=Path, default=HERE / "seatrial_kernels", help="folder")
    given = parser.parse_args()
    try:
        built = build(given.to, find_nvcc(given.nvcc))
    except BuildError as error:
        sys.exit(f"native_build.py: {error}")
    print(f"{given.to / LIBRARY}: {(given.to / LIBRARY).stat().st_size >> 10} KiB, {built['nvcc']}")


def find_nvcc(given: Path | None = None) -> Path:
    """Return the compiler: the one given, or of CUDA_HOME, PATH, or this Python's wheels.

    Raises:
        BuildError: there is none.
    """
    packages = Path(sysconfig.get_path("purelib"))
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    places = (
        [given]
        if given
        else [
            *([Path(home, "bin/nvcc")] if home else []),
            *([Path(on_path)] if on_path else []),
            *sorted(packages.glob("nvidia/cu*/bin/nvcc")),
        ]
    )
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return place.absolute()
    looked = (
        f"{given} is no program" if given else "none in CUDA_HOME, PATH or this Python's wheels"
    )
    raise BuildError(f"no nvcc: {looked}; name one with --nvcc, or install the wheels of nvcc.lock")


def build(to: Path, nvcc: Path, sources: Path = SOURCES) -> dict[str, Any]:
    """Compile every ``*/*.cu`` under ``sources`` into ``to``; return what native.json says.

    Raises:
        BuildError: the compiler fails; its words are the message.
    """
    units = sorted(sources.glob("*/*.cu"))
    if not units:
        raise BuildError(f"there is no */*.cu under {sources}")
    description = {
        "nvcc": version(nvcc),
        "flags": [*FLAGS, *LINK],
        "targets": list(TARGETS),
        # As the build names cards: by capability, without the compiler's letter.
        "architectures": sorted((t.rstrip("af") for t in TARGETS), key=lambda t: int(t[3:])),
        "source_sha256": source_sha256(sources),
        **declared(sources),
    }
    to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        objects = [Path(scratch, f"{unit.parent.name}-{unit.stem}.o") for unit in units]
        compiled = partial(compile_unit, nvcc, sources)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compiled, units, objects))
        made = Path(scratch, LIBRARY)
        run(nvcc, *LINK, *arch_flags(), *libraries(nvcc), "-o", made, *objects)
        (to / DESCRIPTION).unlink(missing_ok=True)
        shutil.copyfile(made, to / f".{LIBRARY}")
        (to / f".{LIBRARY}").replace(to / LIBRARY)
    (to / DESCRIPTION).write_text(json.dumps(description, indent=2, sort_keys=True) + "\n")
    return description


def compile_unit(nvcc: Path, sources: Path, unit: Path, made: Path) -> None:
    """Compile one source file for every target."""
    run(nvcc, *FLAGS, *arch_flags(), f"-I{sources}", "-c", "-o", made, unit)


def arch_flags() -> list[str]:
    """Return the compiler's words for machine code of every target, and no PTX."""
    return [f"-gencode=arch=compute_{t[3:]},code={t}" for t in TARGETS]


def libraries(nvcc: Path) -> list[str]:
    """Return where the wheels keep libcudart_static.a, which their nvcc does not look for."""
    return [f"-L{place}" for place in (nvcc.parent.parent / "lib",) if place.is_dir()]


def run(*command: str | Path) -> str:
    """Run one command and return what it printed.

    Raises:
        BuildError: it fails.
    """
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return this environment without what would change nvcc's flags unseen."""
    hidden = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def version(nvcc: Path) -> str:
    """Return the compiler's version, such as ``13.0.88``."""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", run(nvcc, "--version"))
    if not found:
        raise BuildError(f"{nvcc} does not say its version: it is no nvcc")
    return found[1]


def source_sha256(sources: Path = SOURCES) -> str:
    """Return the digest over names and contents of everything under ``sources``."""
    total = hashlib.sha256()
    for path in sorted(p for p in sources.rglob("*") if p.is_file()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(sources)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def declared(sources: Path = SOURCES) -> dict[str, Any]:
    """Return the operations, and what their ``gate.toml`` declares the library to support.

    An operation may have a table ``[declares]``; its keys come into native.json as they are.
    """
    rules = sorted(sources.glob("*/gate.toml"))
    ops = [path.parent.name for path in rules if path.parent.name != "common"]
    facts: dict[str, Any] = {"ops": ops}
    for path in rules:
        facts |= tomllib.loads(path.read_text()).get("declares", {})
    return facts


if __name__ == "__main__":
    main()
