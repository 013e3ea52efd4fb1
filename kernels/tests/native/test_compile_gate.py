"""The gate holds for what is shipped, and finds what is planted."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import native_build
import pytest
import toolchain
from compile_gate import gate
from compile_gate.gate import Kernel, Rule

PLANTED = r"""
// Forced to fewer registers than its values need.
__global__ void __launch_bounds__(1024, 2) spills(float* out, const float* in) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = in[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i)
#pragma unroll
    for (int j = 0; j < 64; j += 7) values[i] = fmaf(values[j], values[i], values[63 - i]);
#pragma unroll
  for (int i = 0; i < 64; ++i) out[threadIdx.x + 1024 * i] = values[i];
}

// 40 KiB of its own; its rule says that the launcher adds 64.
__global__ void hoards(float* out) {
  __shared__ float much[10240];
  much[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = much[1023 - threadIdx.x];
}

// Four loads where one would do.
__global__ void narrow(float* out, const float* in) {
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = in[4 * threadIdx.x + i] + 1.0f;
}

// A matrix instruction that nobody meant.
__global__ void multiplies(float* out) {
  float d[4] = {};
  unsigned a = threadIdx.x, b = threadIdx.x + 1;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, "
      "{%4,%5}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

// A barrier of a cluster.
__global__ void gathers(float* out) {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  out[threadIdx.x] = 0.0f;
}
"""

GENEROUS = Rule("", registers_max=255, shared_bytes_max=101376)
RULES = [
    replace(GENEROUS, match="^spills$"),
    replace(GENEROUS, match="^hoards$", dynamic_shared_bytes=65536),
    replace(GENEROUS, match="^narrow$", needs=["LDG.128", "STG.128"]),
    replace(GENEROUS, match="^multiplies$"),
    replace(GENEROUS, match="^gathers$"),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Return the planted kernels, compiled and read like the real ones."""
    place, tools = tmp_path_factory.mktemp("planted"), toolchain.toolchain()
    (place / "planted.cu").write_text(PLANTED)
    made = place / "planted.cubin"
    native_build.run(
        tools / "bin/nvcc", "-cubin", f"-arch={gate.TARGET}", "-o", made, place / "planted.cu"
    )
    return gate.kernels(made, tools)


def test_every_shipped_kernel_keeps_its_rules(built: Path) -> None:
    """The table, then the sentences, of which there are none."""
    found = gate.kernels(built / native_build.LIBRARY, toolchain.toolchain())
    rules = gate.operation_rules()
    print(gate.table(found, rules))
    assert gate.faults(found, rules, gate.common_rules()) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("spills", r"^spills: (LDL|STL) \(spills\): [1-9]\d*, bound: at most 0$"),
        ("hoards", r"^hoards: shared memory bytes: 106496, bound: at most 101376$"),
        ("narrow", r"^narrow: LDG\.128 \(meant\): 0, bound: at least 1$"),
        ("narrow", r"^narrow: STG\.128 \(meant\): 0, bound: at least 1$"),
        ("multiplies", r"^multiplies: HMMA\.\S+ \(matrix, not meant\): 1, bound: at most 0$"),
        ("gathers", r"^gathers: UCGABAR_\w+ \(not for sm_120a\): [1-9]\d*, bound: at most 0$"),
    ],
)
def test_a_planted_fault_is_one_sentence(planted: list[Kernel], name: str, sentence: str) -> None:
    """Kernel, rule, measured, bound; and nothing else is said of the other kernels."""
    told = [s for s in gate.faults(planted, RULES, gate.common_rules()) if s.startswith(name)]
    assert any(re.search(sentence, line) for line in told), told


def test_registers_over_the_rule_are_told(planted: list[Kernel]) -> None:
    """A rule may be stricter than the card."""
    rules = [Rule("^narrow$", registers_max=4, shared_bytes_max=0)]
    narrow = [kernel for kernel in planted if kernel.name == "narrow"]
    (told,) = gate.faults(narrow, rules, gate.common_rules())
    assert told.startswith("narrow: registers: ")
    assert told.endswith(", bound: at most 4")


def test_a_kernel_without_a_rule_is_told() -> None:
    """So that a new kernel cannot pass unseen; and a rule for nothing is told too."""
    alone = [Kernel("new_kernel", 1, 0, 0, Counter())]
    first, second = gate.faults(alone, [replace(GENEROUS, match="^old$")], gate.common_rules())
    assert first == "rule '^old$': matches no kernel, and must match at least 1"
    assert second.startswith("new_kernel: rules that match: 0, bound: exactly 1")


def test_a_library_without_code_for_the_card_is_told() -> None:
    """An empty list is not a green one."""
    assert gate.faults([], [], gate.common_rules()) == [
        "no kernel has machine code for sm_120a, and at least 1 must"
    ]
