"""The memory plan: formulas against facts that were read or measured, and refusals with numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from seatrial import memory, spec
from seatrial.memory import MIB, MemoryPlan, MemoryPlanError
from seatrial.spec import ServingSpec

REHEARSAL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 272,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 4063,
    "index_head_dim": 1024,
    "index_sparse_layer": 1,
    "tie_word_embeddings": False,
}
# DeepSeek-V4-Flash's public config.json, as far as the plan reads it.
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "hc_mult": 4,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "quantization_config": {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"},
}
BUILD = {
    "supported_index_key_dtypes": ["fp8_e4m3", "bf16", "fp32"],
    "index_key_bytes_per_token": {"fp8_e4m3": 1024, "bf16": 2048, "fp32": 4096},
}


def serving_spec(platform: str, args: dict[str, Any], **change: Any) -> ServingSpec:
    """Return a spec of one cell with a prefill and a decode server."""
    is_cpu = platform == "cpu"
    server = {"port": 30000, "gpus": [] if is_cpu else [0, 1, 2, 3], "args": args, "env": {}}
    other = {**server, "port": 30001, "gpus": [] if is_cpu else [4, 5, 6, 7]}
    value = {
        "schema": 1,
        "model": {"name": "model", "path": "/models/m", "revision": "revision"},
        "engine": {"sglang": "0.5.23", "platform": platform, "python": "3.11", "patches": []},
        "index_topk": 1024,
        "index_key_dtype": "fp8_e4m3",
        "mem_fraction_static": 0.3 if is_cpu else 0.8,
        "context_length": 32768 if is_cpu else 131072,
        "chunked_prefill_size": 32768 if is_cpu else 8192,
        "transfer_backend": "mooncake_tcp",
        "device_memory_gib": 1.0 if is_cpu else 95.0,
        "roles": {
            "prefill": {**server, "bootstrap_port": 8998},
            "decode": other,
            "router": {"port": 8000, "metrics_port": 29000, "args": {}, "env": {}},
        },
        "cells": {"one": {"prefill": ["a"], "decode": ["a"], "router": "a"}},
        "timeouts": {
            "drain_seconds": 1,
            "stop_seconds": 1,
            "ready_seconds": 1,
            "router_seconds": 1,
            "gate_seconds": 1,
        },
        "rollout": {
            "batches": [1],
            "dead_man_seconds": 200,
            "revert_scope": "cell",
            "keep_releases": 3,
        },
        "gates": {"thresholds": "rehearsal", "select": ["window"], "cold_launches": 0},
    }
    return spec.check(value | change)


def rehearsal(**change: Any) -> ServingSpec:
    """Return a spec like the rehearsal's."""
    return serving_spec("cpu", {"max-total-tokens": 65536}, **change)


def production(tokens: int = 6291456, **change: Any) -> ServingSpec:
    """Return a spec like production's: 48 full contexts of 131072 tokens."""
    args = {"tensor-parallel-size": 4, "max-total-tokens": tokens, "max-running-requests": 64}
    return serving_spec("cuda13", args, **change)


def row(plan: MemoryPlan, name: str, role: str = "prefill") -> int:
    """Return one row's bytes."""
    return next(one.bytes for one in plan.roles[role].rows if one.name == name)


def test_rehearsal_pool_is_what_the_engine_allocates() -> None:
    """SGLang logs 0.06 + 0.06 GB of K and V for 40960 tokens, three layers of 1024 B a token."""
    plan = memory.plan(serving_spec("cpu", {"max-total-tokens": 40960}), REHEARSAL, BUILD)
    assert row(plan, "KV cache") + row(plan, "index keys") == 40960 * 3 * 1024


def test_rehearsal_peak_is_close_to_measured() -> None:
    """Measured: 2960 MiB, all processes, after a prefill of 31,000 tokens into a pool of 40960."""
    plan = memory.plan(serving_spec("cpu", {"max-total-tokens": 40960}), REHEARSAL, BUILD)
    peak = plan.roles["prefill"].peak_bytes / MIB
    assert 2960 <= peak <= 1.1 * 2960


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16"])
def test_rehearsal_fits(dtype: str) -> None:
    """The dtypes that the rehearsal serves fit."""
    memory.plan(rehearsal(index_key_dtype=dtype), REHEARSAL, BUILD)


def test_rehearsal_refuses_fp32_keys_with_numbers() -> None:
    """The field's fp32 trial is refused, by how much, and with what would fit."""
    with pytest.raises(MemoryPlanError) as caught:
        memory.plan(rehearsal(index_key_dtype="fp32"), REHEARSAL, BUILD, weights_bytes=17_500_000)
    text = str(caught.value)
    assert "weights and caches need 401 MiB" in text
    assert "mem_fraction_static 0.3 of 1 GiB allows 307 MiB, 93 MiB too much" in text
    assert "65536 tokens x 4096 B (fp32)" in text
    assert "What would fit: index_key_dtype bf16; or index_key_dtype fp8_e4m3" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("  ")) < 100


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token"), [("fp8_e4m3", 693), ("bf16", 1344), ("fp32", 2688)]
)
def test_flash_index_keys_have_their_size(dtype: str, bytes_per_token: int) -> None:
    """21 C4 layers, one entry per 4 tokens: 132, 256 or 512 bytes an entry."""
    plan = memory.predict(production(index_key_dtype=dtype), FLASH, {})
    assert row(plan, "index keys") == 6291456 * bytes_per_token


def test_flash_weights_are_about_164_gigabytes() -> None:
    """284 billion parameters, 277 of them experts in NVFP4, over four GPUs."""
    plan = memory.plan(production(), FLASH, {})
    assert row(plan, "weights") == pytest.approx(164e9 / 4, rel=0.03)


def test_weight_files_count_more_than_formulas() -> None:
    """When the files' size is known, it decides."""
    plan = memory.plan(production(), FLASH, {}, weights_bytes=200_000_000_000)
    assert row(plan, "weights") > 50_000_000_000


def test_flash_index_scores_are_one_piece() -> None:
    """On sm_120 a chunk of 8192 rows at 128K context needs 1 GiB at once."""
    plan = memory.plan(production(), FLASH, {})
    assert row(plan, "index scores") == 1024 * MIB


def test_flash_tables_are_as_wide_as_the_context() -> None:
    """Each of 8192 rows names 1024 blocks of 128 tokens, 512 pages and 2 x 1024 picks."""
    plan = memory.plan(production(), FLASH, {})
    assert row(plan, "index tables") == 8192 * (1024 + 512) * 4
    assert row(plan, "selected entries") == 2 * 8192 * 1024 * 4


def test_transfer_needs_memory_only_where_it_is_staged() -> None:
    """The KV cache is sent from where it lies, unless prefill and decode differ in TP."""
    assert row(memory.plan(production(), FLASH, {}), "transfer buffers") == 0


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16"])
def test_production_fits(dtype: str) -> None:
    """On 96 GB cards with TP4, fp8 and bf16 keys hold 48 full contexts."""
    memory.plan(production(index_key_dtype=dtype), FLASH, {})


def test_production_refuses_fp32_keys() -> None:
    """The same capacity with fp32 keys does not fit."""
    with pytest.raises(MemoryPlanError, match=r"2783 MiB too much[\s\S]*index_key_dtype bf16"):
        memory.plan(production(index_key_dtype="fp32"), FLASH, {})


def test_long_prefill_that_does_not_fit_is_refused() -> None:
    """What SGLang does not check: scratch beside a fraction that leaves no room for it."""
    uncapped = {"tensor-parallel-size": 4}
    million = {"context_length": 1048576, "mem_fraction_static": 0.93}
    with pytest.raises(MemoryPlanError) as caught:
        memory.plan(serving_spec("cuda13", uncapped, **million), FLASH, {})
    text = str(caught.value)
    assert "a long prefill would need" in text
    assert "chunked_prefill_size at most" in text
    assert "context_length at most" in text


def test_uncapped_pool_fills_its_fraction() -> None:
    """Without max-total-tokens SGLang takes all that the fraction allows."""
    one = memory.plan(serving_spec("cuda13", {"tensor-parallel-size": 4}), FLASH, {}).roles[
        "decode"
    ]
    assert one.static_bytes == one.static_limit_bytes


def test_suggested_tokens_fit() -> None:
    """What a refusal proposes is accepted, and a page more is not."""
    with pytest.raises(MemoryPlanError) as caught:
        memory.plan(production(index_key_dtype="fp32"), FLASH, {})
    tokens = int(str(caught.value).split("prefill.args.max-total-tokens at most ")[1].split(";")[0])
    memory.plan(production(tokens, index_key_dtype="fp32"), FLASH, {})
    with pytest.raises(MemoryPlanError):
        memory.plan(production(tokens + 2 * 256, index_key_dtype="fp32"), FLASH, {})


def test_unknown_architecture_is_refused() -> None:
    """A model without formulas has no plan."""
    config = {"architectures": ["OtherForCausalLM"]}
    with pytest.raises(MemoryPlanError, match=r"OtherForCausalLM; there are some for Deepseek"):
        memory.plan(rehearsal(), config, BUILD)


def test_missing_number_is_named() -> None:
    """A config.json that lacks a number says which."""
    config = {**REHEARSAL, "hidden_size": None}
    with pytest.raises(MemoryPlanError, match=r"hidden_size should be a number"):
        memory.plan(rehearsal(), config, BUILD)


def test_build_that_does_not_know_the_dtype_is_named() -> None:
    """Bytes per token come from the build; without them nothing is guessed."""
    with pytest.raises(MemoryPlanError, match=r"index_key_bytes_per_token should name fp8_e4m3"):
        memory.plan(rehearsal(), REHEARSAL, {})


def test_plan_survives_its_way_to_the_gates() -> None:
    """The cell file carries the plan as JSON."""
    plan = memory.plan(rehearsal(), REHEARSAL, BUILD)
    assert MemoryPlan.model_validate(plan.model_dump(mode="json")) == plan
    assert not math.isnan(plan.roles["decode"].peak_bytes)
