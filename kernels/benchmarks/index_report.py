"""What the dtype of index keys does to a selection, and what a prefill's selection allocates.

    python kernels/benchmarks/index_report.py [--json FILE]

Keys and queries are made as an indexer makes them, of random numbers: RMSNorm, RoPE, Hadamard; no
weights of a model are here. Exact scores are float64 on unrounded keys and queries. Rounded ones
come from the kernel. Recall is the share of the exact k best that is selected; mass is the sum of
the selected exact scores over that of the k best, both less the mean of all: 1 is exact, 0 chance.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch
from benchmarks.index_logits import prefill_memory
from seatrial_kernels.index_logits import decode_logits
from seatrial_kernels.index_store import reference as ref

ROWS, LENGTHS, COUNTS = 64, (4096, 32768, 131072), (512, 1024, 2048)
HEADS, BLOCK = 64, 32
KINDS = ("normal", "outliers", "topics")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WAYS = {
    "fp8 keys": ("fp8_e4m3", torch.float8_e4m3fn, False),
    "bf16 keys": ("bf16", torch.float8_e4m3fn, False),
    "bf16 keys and queries": ("bf16", torch.bfloat16, False),
    "fp4 in fp8": ("fp8_e4m3", torch.float8_e4m3fn, True),
}
PREFILL = (8192, 262144, 256 << 20)


def main() -> None:
    """Print both tables, and write them."""
    parser = argparse.ArgumentParser(description="Recall of index keys, memory of a prefill.")
    parser.add_argument("--json", type=Path, default=Path("index-report.json"))
    given = parser.parse_args()
    found = [
        {"data": kind, "entries": length, **line}
        for kind in KINDS
        for length in LENGTHS
        for line in recalls(kind, length)
    ]
    for line in found:
        print(
            f"{line['data']:9} {line['entries']:7} {line['keys']:22} k={line['k']:4} "
            f"recall {line['recall']:.4f} worst {line['worst']:.4f} mass {line['mass']:.5f}"
        )
    rows, length, budget = PREFILL
    taken, milliseconds = prefill_memory(rows, length, budget)
    print(
        f"prefill {rows} x {length}: {taken} bytes allocated of {budget}; "
        f"{rows * length * 4} at once; {milliseconds:.1f} ms"
    )
    told = {"recall": found, "prefill": {"bytes": taken, "budget": budget, "ms": milliseconds}}
    given.json.write_text(json.dumps(told, indent=1) + "\n")


def recalls(kind: str, length: int) -> list[dict[str, float | int | str]]:
    """Return a line for each way and k."""
    draw = torch.Generator("cuda").manual_seed(length)
    keys = vectors(kind, length, draw)
    queries = vectors(kind, ROWS * HEADS, draw).view(ROWS, HEADS, ref.DIM)
    weights = torch.randn(ROWS, HEADS, generator=draw, device="cuda").double() / HEADS
    exact = torch.stack([w @ (q @ keys.T).relu() for q, w in zip(queries, weights, strict=True)])
    lines: list[dict[str, float | int | str]] = []
    for name, (layout, dtype, is_fp4) in WAYS.items():
        scores = rounded_scores(keys, queries, weights, layout, dtype, is_fp4)
        for k in COUNTS:
            best = exact.topk(k).indices
            chosen = scores.topk(k).indices
            is_best = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, best, 1)
            recall = is_best.gather(1, chosen).double().mean(1)
            above = exact - exact.mean(1, keepdim=True)
            mass = above.gather(1, chosen).sum(1) / above.gather(1, best).sum(1)
            lines.append(
                {
                    "keys": name,
                    "k": k,
                    "recall": recall.mean().item(),
                    "worst": recall.min().item(),
                    "mass": mass.mean().item(),
                }
            )
    return lines


def vectors(kind: str, count: int, draw: torch.Generator) -> torch.Tensor:
    """Return ``count`` index keys [count, 128] in float64: normal, with outliers, or by topics."""
    made = torch.randn(count, ref.DIM, generator=draw, device="cuda")
    if kind == "outliers":  # the same eight channels throughout, twenty times as large
        made[:, ::16] *= 20
    if kind == "topics":  # of 256 directions, which keys and queries share
        shared = torch.Generator("cuda").manual_seed(1)
        topics = torch.randn(256, ref.DIM, generator=shared, device="cuda")
        chosen = torch.randint(256, (count,), generator=draw, device="cuda")
        made = topics[chosen] + made
    angles = torch.rand(1024, ref.ROTATED // 2, generator=draw, device="cuda") * 6.28
    turns = torch.stack([angles.cos(), angles.sin()], -1).reshape(1024, ref.ROTATED)
    # Slow turns: neighbours in a context see much the same phase.
    turns = turns if kind == "normal" else turns[:1].expand(1024, -1)
    at = torch.randint(1024, (count,), generator=draw, device="cuda")
    weight = torch.ones(ref.DIM, device="cuda")
    return ref.reference_index_keys(made, weight, turns, at, 1e-6)


def rounded_scores(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    is_fp4: bool,
) -> torch.Tensor:
    """Return the kernel's scores [ROWS, length] for keys and queries as they are stored."""
    if is_fp4:
        keys, queries = fp4(keys), fp4(queries)
    cache = stored(keys, layout, is_fp4)
    if dtype == torch.float8_e4m3fn:
        scale = queries.abs().amax(-1, keepdim=True).clamp_min(1e-4) / ref.E4M3_MAX
        if is_fp4:
            scale = torch.exp2(scale.log2().ceil())
        asked = (queries / scale).float().to(dtype)
        weights = weights * scale[..., 0]
    else:
        asked = queries.to(dtype)
    length = len(keys)
    out = torch.empty(ROWS, length, dtype=torch.float32, device="cuda")
    table = torch.arange(length // ref.PAGE, dtype=torch.int32, device="cuda").repeat(ROWS, 1)
    lengths = torch.full((ROWS,), length, dtype=torch.int32, device="cuda")
    decode_logits(asked, cache, weights.float(), lengths, table, out)
    return out


def stored(keys: torch.Tensor, layout: str, is_fp4: bool) -> torch.Tensor:
    """Return the pages of the keys; fp4 values have a power of two for a scale, and stay exact."""
    if layout == "bf16":
        return keys.bfloat16().view(torch.uint8).reshape(-1, ref.PAGE_BYTES[layout])
    scales = ref.scales(keys)
    if is_fp4:
        scales = torch.exp2(scales.log2().ceil())
    values = (keys / scales[:, None]).clamp(-ref.E4M3_MAX, ref.E4M3_MAX).float()
    rounded = values.to(torch.float8_e4m3fn)
    if is_fp4:
        changed = (rounded.double() != values.double()).double().mean().item()
        if changed > 0:
            print(f"fp4 in fp8: {changed:.2e} of the values are not exact")
    return torch.cat(
        [
            rounded.view(torch.uint8).reshape(-1, ref.PAGE * ref.DIM),
            scales.float().view(torch.uint8).reshape(-1, ref.PAGE * ref.SCALE_BYTES),
        ],
        1,
    )


def fp4(values: torch.Tensor) -> torch.Tensor:
    """Return values as e2m1 with a power of two for each 32, as the model was trained with."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scale = torch.exp2(
        (blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E2M1[-1]).log2().ceil()
    )
    steps = torch.tensor(E2M1, dtype=values.dtype, device=values.device)
    middles = (steps[1:] + steps[:-1]) / 2
    sizes = steps[torch.bucketize((blocks / scale).abs(), middles)]
    return (blocks.sign() * sizes * scale).flatten(-2)


if __name__ == "__main__":
    main()
