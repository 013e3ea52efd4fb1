"""Hold the machine code for sm_120a against rules: our evidence for a card that is not here.

    python compile_gate/gate.py      # builds, prints a table, exits with 1 if a rule is broken

The rules are data: ``rules.toml`` beside this file for every kernel, ``csrc/<op>/gate.toml`` for
an operation's own. Nothing here is a measurement: no time follows from it.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build
import toolchain

TARGET = "sm_120a"
# What the compiler counts for itself, on this target, in a block that uses shared memory.
SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of one kernel, by its demangled name without parameters."""

    name: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    opcodes: Counter[str]

    def count(self, wanted: str) -> int:
        """Return how many instructions have the opcode ``wanted`` and all of its modifiers."""
        return sum(n for opcode, n in self.opcodes.items() if is_a(opcode, wanted))


@dataclass(frozen=True)
class Rule:
    """What the kernels whose name matches must be.

    Attributes
    ----------
    match: regular expression, found somewhere in the kernel's name
    registers_max: registers of a thread
    shared_bytes_max: static and dynamic shared memory of a block
    dynamic_shared_bytes: what the launcher asks for at most; machine code does not show it
    mma: matrix instructions that must occur; no other may
    needs: instructions that must occur, such as LDG.128
    """

    match: str
    registers_max: int
    shared_bytes_max: int
    dynamic_shared_bytes: int = 0
    mma: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Common:
    """What holds for every kernel: see rules.toml, which gives each value and its reason."""

    shared_bytes_max: int
    registers_max: int
    stack_bytes_max: int
    spills: list[str]
    matrix: list[str]
    forbidden: list[str]


def main() -> None:
    """Build with the locked compiler, judge, print."""
    parser = argparse.ArgumentParser(description="Hold the sm_120a code against the rules.")
    parser.add_argument("--library", type=Path, help="one that is built already")
    parser.add_argument("--json", type=Path, help="also write what was found")
    given = parser.parse_args()
    tools = toolchain.toolchain()
    with TemporaryDirectory() as scratch:
        if given.library is None:
            native_build.build(Path(scratch), tools / "bin/nvcc")
        found = kernels(given.library or Path(scratch, native_build.LIBRARY), tools)
    rules = operation_rules()
    print(table(found, rules))
    if given.json:
        told = [asdict(kernel) for kernel in found]
        given.json.write_text(json.dumps(told, indent=2) + "\n")
    broken = faults(found, rules, common_rules())
    print("\n".join(broken) or f"{len(found)} kernels for {TARGET}: every rule holds; not run")
    sys.exit(bool(broken))


def common_rules(path: Path = HERE / "rules.toml") -> Common:
    """Return the rules for every kernel."""
    return Common(**tomllib.loads(path.read_text()))


def operation_rules(sources: Path = native_build.SOURCES) -> list[Rule]:
    """Return the rules of all operations."""
    return [
        Rule(**given)
        for path in sorted(sources.glob("*/gate.toml"))
        for given in tomllib.loads(path.read_text())["kernel"]
    ]


def kernels(binary: Path, tools: Path) -> list[Kernel]:
    """Return the kernels in a library or cubin for TARGET, read with the tools' disassembler."""
    told = subprocess.run(
        [tools / "bin/cuobjdump", "-arch", TARGET, "-sass", "-res-usage", binary],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": f"{tools / 'bin'}:/usr/bin:/bin"},
    ).stdout
    return read(told)


def read(told: str) -> list[Kernel]:
    """Return the kernels in what ``cuobjdump -sass -res-usage`` prints."""
    usage = {
        name: {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", numbers)}
        for name, numbers in re.findall(r"^ Function (\S+):\n(.*)$", told, re.MULTILINE)
    }
    parts = re.split(r"^\s+Function : (\S+)$", told, flags=re.MULTILINE)[1:]
    opcodes = {
        name: Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    names = demangled(opcodes)
    return sorted(
        (
            Kernel(
                names[mangled],
                usage[mangled]["REG"],
                max(usage[mangled]["SHARED"] - SYSTEM_SHARED_BYTES, 0),
                usage[mangled]["STACK"] + usage[mangled]["LOCAL"],
                opcodes[mangled],
            )
            for mangled in opcodes
        ),
        key=lambda kernel: kernel.name,
    )


def demangled(names: Iterable[str]) -> dict[str, str]:
    """Return each mangled name's readable form, without return type and parameters."""
    mangled = list(names)
    told = subprocess.run(
        ["c++filt", "--no-params"],
        input="\n".join(mangled),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    readable = [re.sub(r"^void |\(anonymous namespace\)::|seatrial::", "", name) for name in told]
    return dict(zip(mangled, readable, strict=True))


def is_a(opcode: str, wanted: str) -> bool:
    """Return whether LDG.E.128.CONSTANT, say, is an LDG.128: same name, and every modifier."""
    name, *modifiers = opcode.split(".")
    wanted_name, *wanted_modifiers = wanted.split(".")
    return name == wanted_name and set(wanted_modifiers) <= set(modifiers)


def faults(found: list[Kernel], rules: list[Rule], common: Common) -> list[str]:
    """Return one sentence for each rule that is broken: kernel, rule, measured, bound."""
    sentences = [
        f"rule {rule.match!r}: matches no kernel, and must match at least 1"
        for rule in rules
        if not any(re.search(rule.match, kernel.name) for kernel in found)
    ]
    if not found:
        sentences.append(f"no kernel has machine code for {TARGET}, and at least 1 must")
    for kernel in found:
        own = [rule for rule in rules if re.search(rule.match, kernel.name)]
        if len(own) != 1:
            sentences.append(
                f"{kernel.name}: rules that match: {len(own)}, bound: exactly 1; "
                "each kernel has its [[kernel]] in csrc/<op>/gate.toml"
            )
        for rule in own[:1]:
            sentences += broken(kernel, rule, common)
    return sentences


def broken(kernel: Kernel, rule: Rule, common: Common) -> list[str]:
    """Return the sentences for one kernel."""
    shared = kernel.shared_bytes + rule.dynamic_shared_bytes
    checks = [
        ("registers", kernel.registers, min(rule.registers_max, common.registers_max)),
        ("shared memory bytes", shared, min(rule.shared_bytes_max, common.shared_bytes_max)),
        ("stack bytes", kernel.stack_bytes, common.stack_bytes_max),
        *((f"{op} (spills)", kernel.count(op), 0) for op in common.spills),
        *((f"{op} (not for {TARGET})", kernel.count(op), 0) for op in common.forbidden),
        *(
            (f"{op} (matrix, not meant)", n, 0)
            for op, n in sorted(kernel.opcodes.items())
            if op.split(".")[0] in common.matrix
            and not any(is_a(op, wanted) for wanted in rule.mma)
        ),
    ]
    needed = [(op, kernel.count(op)) for op in [*rule.mma, *rule.needs]]
    return [
        f"{kernel.name}: {what}: {measured}, bound: at most {bound}"
        for what, measured, bound in checks
        if measured > bound
    ] + [f"{kernel.name}: {op} (meant): {n}, bound: at least 1" for op, n in needed if n < 1]


def table(found: list[Kernel], rules: list[Rule]) -> str:
    """Return the kernels for people."""
    width = max((len(kernel.name) for kernel in found), default=0)
    head = "registers  shared  dynamic  spills  LDG.128  STG.128  instructions  matrix"
    lines = [f"{TARGET:{width}}  {head}"]
    for kernel in found:
        dynamic = next(
            (r.dynamic_shared_bytes for r in rules if re.search(r.match, kernel.name)), 0
        )
        matrix = sorted(op for op in kernel.opcodes if re.match(r"[A-Z]MMA\b", op))
        lines.append(
            f"{kernel.name:{width}}  {kernel.registers:9}  {kernel.shared_bytes:6}  {dynamic:7}  "
            f"{kernel.count('LDL') + kernel.count('STL'):6}  {kernel.count('LDG.128'):7}  "
            f"{kernel.count('STG.128'):7}  {sum(kernel.opcodes.values()):12}  "
            f"{', '.join(matrix) or 'none'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
