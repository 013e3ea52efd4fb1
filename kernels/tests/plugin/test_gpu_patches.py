"""The patches for GPUs, applied to the real SGLang on a CPU: what they change and refuse.

Only questions to the card, and kernels that need one, are answered by the tests.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seatrial_kernels import fingerprint, plugin, report, selection, upstream
from seatrial_kernels.patches import index_keys_bf16, topk_v2_sm120, wide_index_topk
from seatrial_kernels.plugin import PatchError
from sglang.srt.layers.attention import deepseek_v4_backend, mqa_logits_utils
from sglang.srt.layers.attention.dsv4 import compressor_v2, indexer, metadata
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pool_module
from sglang.srt.model_executor import pool_configurator

Apply = Callable[..., None]
C4_LAYERS, PAGE = 21, 64


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the patches that need the compiled kernels find them."""
    for module in ("index_logits", "index_store", "topk"):
        monkeypatch.setattr(f"seatrial_kernels.patches.{module}.require_kernel", lambda: None)


def index_pool() -> Any:
    """Return SGLang's pool of index keys for two layers and ten pages, on the CPU."""
    return pool_module.DeepSeekV4IndexerPool(
        size=9 * PAGE,
        page_size=PAGE,
        dtype=torch.uint8,
        index_head_dim=128,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        use_fp4_indexer=False,
    )


def bytes_of_a_token() -> float:
    """Return what SGLang's budget counts for one token's index keys, in all layers."""
    sizes = object.__new__(pool_configurator.DSV4PoolConfigurator)
    sizes.kv_bytes, sizes.c4_shrink_factor, sizes._unified = 0, 1, True
    sizes.indexer_bytes_per_token = pool_configurator.get_dsv4_indexer_bytes_per_token(128, False)
    sizes._get_paged_kv_bytes_per_token = lambda *_ratio: 0
    return float(sizes._compressed_bytes_per_full_token(4) * C4_LAYERS)


def test_bf16_keys_are_counted_where_they_are_allocated_and_where_memory_is_divided(
    apply: Apply, compiled: None
) -> None:
    """132 bytes become 256 in the pool's pages, and 693 a token become 1344 in the budget."""
    assert index_pool().index_k_with_scale_buffer[0].shape == (10, PAGE * 132)
    assert bytes_of_a_token() == C4_LAYERS * 132 / 4 == 693
    apply("index_keys_bf16")
    assert index_pool().index_k_with_scale_buffer[0].shape == (10, PAGE * 256)
    assert bytes_of_a_token() == C4_LAYERS * 256 / 4 == 1344
    # Pools of the other ratios stay fp4.
    assert pool_module.get_dsv4_indexer_bytes_per_token(128, True) == 68


def test_a_place_that_kept_sglang_s_own_function_is_found(
    apply: Apply, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the budget still counting 132 bytes the pool would outgrow its share: no server."""
    original = pool_configurator.get_dsv4_indexer_bytes_per_token
    apply("index_keys_bf16")
    monkeypatch.setattr(pool_configurator, "get_dsv4_indexer_bytes_per_token", original)
    with pytest.raises(PatchError, match=r"pool_configurator still holds its own get_dsv4_indexer"):
        upstream.verify()


def test_a_hook_that_sglang_did_not_apply_is_found(apply: Apply) -> None:
    """SGLang logs such an error and serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = deepseek_v4_backend.DSV4AttnMetadata.init_flashmla_related
    apply("wide_index_topk")
    upstream.verify()
    patched = deepseek_v4_backend.DSV4AttnMetadata.init_flashmla_related
    deepseek_v4_backend.DSV4AttnMetadata.init_flashmla_related = original
    try:
        with pytest.raises(PatchError, match="init_flashmla_related is not wide_index_topk's"):
            upstream.verify()
        HookRegistry._patched.clear()
    finally:
        deepseek_v4_backend.DSV4AttnMetadata.init_flashmla_related = patched


def test_a_target_that_somebody_else_replaced_is_refused(
    apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is of SGLang's file; what would be called must come from it."""
    monkeypatch.setattr(metadata, "iter_row_chunks", lambda **_named: iter(()))
    with pytest.raises(SystemExit, match="iter_row_chunks is somebody else's already, from"):
        apply("index_logits_budget")


def test_a_function_that_sglang_changed_is_refused(
    apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number in SGLang's file, and the server says which function to read again."""
    read = upstream._definition

    def changed(file: str, name: str) -> Any:
        text = Path(file).read_text("utf-8-sig").replace("in (512, 1024)", "in (512, 1024, 2048)")
        return fingerprint.find(text, name) if name.endswith("related") else read(file, name)

    monkeypatch.setattr(upstream, "_definition", changed)
    with pytest.raises(SystemExit) as stopped:
        apply("wide_index_topk")
    assert re.fullmatch(
        r"patch wide_index_topk stops this server: sglang\.srt\.layers\.attention\.deepseek_v4_"
        r"backend\.DSV4AttnMetadata\.init_flashmla_related means something else \(fingerprint "
        r"[0-9a-f]{16}\) than what the patch was written against \([0-9a-f]{16}\): read it again",
        str(stopped.value),
    )


@pytest.mark.parametrize("name", ["index_keys_bf16", "index_logits", "index_store", "topk"])
def test_a_patch_without_its_kernel_is_refused(
    apply: Apply, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A build without compiled kernels says so at start, not at the first request."""
    from seatrial_kernels import native

    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native.library.cache_clear()
    with pytest.raises(SystemExit, match=f"patch {name} stops .* no compiled kernels"):
        apply(name)
    native.library.cache_clear()


# --- reading bf16 keys -------------------------------------------------------------------------


class Indexing:
    """One call of SGLang's own ``forward_c4_indexer``, over bf16 keys in shuffled pages."""

    def __init__(self, lengths: list[int], topk: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        rows, most = len(lengths), -(-max(lengths) // PAGE)
        pages = rows * most + 3
        self.keys = torch.randn(pages, PAGE, 128, generator=draw).bfloat16()
        self.q = torch.randn(rows, 8, 128, generator=draw).to(torch.float8_e4m3fn)
        self.weights = torch.rand(rows, 8, generator=draw)
        order = torch.randperm(pages - 1, generator=draw)[: rows * most] + 1
        self.table = order.view(rows, most).int()
        self.out = torch.full((rows, topk), -7, dtype=torch.int32)
        buffer = self.keys.view(torch.uint8).reshape(pages, PAGE * 256)
        part: Any = type("Backend", (indexer.C4IndexerBackendMixin,), {})
        self.backend: Any = part.__new__(part)
        self.backend.token_to_kv_pool = SimpleNamespace(
            get_index_k_with_scale_buffer=lambda layer_id: buffer
        )
        self.backend.debug_use_external_c4_sparse_indices = False
        self.backend.hisparse_coordinator = None
        self.backend.dsa_topk_backend = indexer.DSATopKBackend("torch")
        self.backend._forward_prepare_normal = lambda **_named: (self.q, self.weights[..., None])
        plan = metadata.PagedIndexerMetadata(
            page_size=256,
            compressed_page_size=PAGE,
            page_table=self.table,
            compressed_seq_lens=self.lengths,
            use_topk_v2=False,
        )
        core = SimpleNamespace(
            positions=torch.arange(rows),
            c4_sparse_page_indices=self.out,
            c4_sparse_raw_indices=None,
            page_table=self.table,
        )
        self.backend.forward_metadata = SimpleNamespace(indexer_metadata=plan, core_metadata=core)
        self.plan = plan

    def run(self, mode: Any = None) -> None:
        """Let SGLang score and select."""
        rows = len(self.lengths)
        self.backend.forward_c4_indexer(
            torch.zeros(rows, 4),
            torch.zeros(rows, 4),
            SimpleNamespace(layer_id=0, use_fp4_indexer=False, index_topk=self.out.shape[1]),
            SimpleNamespace(forward_mode=mode or SimpleNamespace(is_idle=lambda: False)),
        )

    def expected(self) -> list[set[int]]:
        """Return which slots each row should select, in float64."""
        result = []
        for row, length in enumerate(self.lengths.tolist()):
            keys = self.keys[self.table[row].long()].flatten(0, 1)[:length].double()
            products = (keys @ self.q[row].double().T).relu()
            scores = products @ self.weights[row].double()
            best = scores.topk(min(self.out.shape[1], length)).indices
            page, place = best // PAGE, best % PAGE
            result.append(set((self.table[row].long()[page] * PAGE + place).tolist()))
        return result


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose what runs on a CPU where SGLang asks its switches."""
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "0")


@pytest.mark.parametrize("budget", [1, 200_000, 2**28], ids="{}B".format)
def test_sglang_selects_from_bf16_keys(
    apply: Apply, compiled: None, torch_path: None, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """SGLang's forward pass finds the best entries, whatever memory the scoring may take."""
    monkeypatch.setattr("seatrial_kernels.index_logits.torch_scores.BUDGET_BYTES", budget)
    apply("index_keys_bf16")
    indexing = Indexing([1, 63, 64, 65, 129, 300], topk=64)
    indexing.run()
    for row, slots in enumerate(indexing.expected()):
        found = indexing.out[row].tolist()
        assert {slot for slot in found if slot >= 0} == slots, f"row {row}"
        assert found.count(-1) == 64 - len(slots)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_fp8_keys_are_scored_by_our_kernel(
    apply: Apply, compiled: None, monkeypatch: pytest.MonkeyPatch, is_prefill: bool
) -> None:
    """SGLang's forward pass hands over its rows, and says whether they are a prefill's."""
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "0")
    apply("index_logits")
    calls: list[tuple[Any, ...]] = []

    def recorded(*arguments: Any) -> Any:
        calls.append(arguments)
        return torch.zeros(len(arguments[1]), arguments[7])

    monkeypatch.setattr(indexer, "seatrial_paged_scores", recorded)
    indexing = Indexing([1, 64, 300], topk=64)
    fp8 = torch.zeros(len(indexing.keys), PAGE * 132, dtype=torch.uint8)
    indexing.backend.token_to_kv_pool.get_index_k_with_scale_buffer = lambda layer_id: fp8
    mode = indexer.ForwardMode.EXTEND if is_prefill else indexer.ForwardMode.DECODE
    indexing.run(mode)
    ((said, queries, pages, weights, lengths, table, _plan, width, is_clean),) = calls
    assert said is is_prefill
    assert not is_clean
    assert queries.shape == (3, 1, 8, 128)
    assert pages.shape == (len(fp8), PAGE, 1, 132)
    assert weights.shape == (3, 8)
    assert torch.equal(lengths.flatten(), indexing.lengths)
    assert torch.equal(table, indexing.table)
    assert width >= int(indexing.lengths.max())


def test_scores_are_cut_to_the_budget(
    apply: Apply, compiled: None, torch_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SGLang makes one piece of a prefill's scores, its own budget now makes several."""
    row_bytes = mqa_logits_utils.mqa_logits_row_bytes(5 * PAGE)
    monkeypatch.setattr(mqa_logits_utils, "MQA_LOGITS_STATIC_SKIP_ELEMS", 0)
    assert Indexing([300] * 48, topk=64).plan.rows_per_chunk is None
    apply("index_keys_bf16", "index_logits_budget")
    # The budget is a question to the card.
    monkeypatch.setattr(
        metadata.PagedIndexerMetadata, "_mqa_logits_budget", lambda _self, num_rows: 5 * row_bytes
    )
    sizes: list[int] = []
    scores = index_keys_bf16.seatrial_paged_scores

    def recorded(*arguments: Any) -> Any:
        result = scores(*arguments)
        sizes.append(len(result))
        return result

    monkeypatch.setattr(indexer, "seatrial_paged_scores", recorded)
    cut = Indexing([300] * 48, topk=64)
    cut.run()
    assert sizes == [5] * 9 + [3]
    assert [set(row.tolist()) for row in cut.out] == cut.expected()


def test_a_small_prefill_is_scored_in_one_piece(apply: Apply, torch_path: None) -> None:
    """No chunk is planned where SGLang's budget has no say: a CPU tensor has none."""
    apply("index_logits_budget")
    plan = Indexing([300] * 4, topk=64).plan
    assert plan.rows_per_chunk is None
    assert plan.deep_gemm_metadata is None


@pytest.mark.parametrize(
    "method", ["get_index_k_scale_buffer", "set_index_k_scale_buffer", "set_index_fused"]
)
def test_a_path_that_knows_fp8_pages_only_is_closed(
    apply: Apply, compiled: None, method: str
) -> None:
    """A bf16 page is never read or written as one of fp8."""
    apply("index_keys_bf16")
    with pytest.raises(SystemExit, match=f"{method} was called; it knows no bf16 index keys"):
        getattr(index_pool(), method)(0, None, None, 0)


# --- writing keys, selecting -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index_store", "index_keys_bf16"])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
def test_keys_of_the_indexer_go_to_our_kernel(
    apply: Apply, compiled: None, monkeypatch: pytest.MonkeyPatch, name: str, is_decode: bool
) -> None:
    """SGLang's compressor hands over what its own kernel would get; the latent stays with it."""
    taken: list[Any] = []
    stock: list[Any] = []
    monkeypatch.setattr(
        "seatrial_kernels.index_store.index_store", lambda *a, **k: taken.append((a, k))
    )
    monkeypatch.setattr(
        "sglang.kernels.ops.attention.dsv4.compress._jit_compress_norm_rope_module",
        lambda *a: SimpleNamespace(forward=lambda *b: stock.append(b)),
    )
    apply(name)

    class Steps(tuple):  # type: ignore[type-arg]  # noqa: SLOT001 - as SGLang's plans are tuples
        compress_ratio = 4

    plan: Any = Steps((4, torch.zeros(3, 16, dtype=torch.uint8), None))
    plan.is_decode = is_decode
    named: dict[str, Any] = {
        "norm_weight": torch.ones(128),
        "norm_eps": 1e-6,
        "freq_cis": torch.polar(torch.ones(5, 32), torch.full((5, 32), 0.5)),
        "out_loc": torch.arange(3),
        "kvcache": torch.zeros(2, PAGE * 256, dtype=torch.uint8),
        "page_size": PAGE,
    }
    keys = torch.zeros(3, 128, dtype=torch.bfloat16)
    compressor_v2.compress_norm_rope_store(keys, plan, **named)
    (((kv, weight, rotations, steps, slots, cache), options),) = taken
    assert (kv is keys, slots is named["out_loc"], cache is named["kvcache"]) == (True, True, True)
    assert weight.dtype == torch.bfloat16
    assert rotations.shape == (5, 64)
    assert rotations[0, :2].tolist() == pytest.approx([math.cos(0.5), math.sin(0.5)])
    assert steps.rows is plan[1]
    assert (steps.is_decode, steps.ratio, options) == (is_decode, 4, {"eps": 1e-6})
    assert stock == []
    compressor_v2.compress_norm_rope_store(torch.zeros(3, 512), plan, **named)
    assert (len(stock), len(taken)) == (1, 1)


def test_both_top_ks_are_ours(
    apply: Apply, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's two functions, as its indexer holds them, call one op; no plan is compiled."""
    taken: list[tuple[Any, ...]] = []
    monkeypatch.setattr("seatrial_kernels.topk.topk_transform", lambda *a: taken.append(a))
    apply("topk")
    scores, lengths = torch.zeros(2, 128), torch.tensor([3, 128], dtype=torch.int32)
    table, out = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    plan = indexer.plan_topk_v2(lengths)
    assert plan.shape == (3, 2)
    assert indexer.plan_topk_v2(lengths, out=plan) is plan
    indexer.topk_transform_paged(scores, lengths, table, out, 64, None)
    indexer.topk_transform_paged_v2(scores, lengths, table, out, 64, plan, out)
    assert taken[0] == (scores, lengths, table, out, 64, None)
    assert taken[1][5] is out
    indexer.topk_transform_paged_v2(scores, lengths, None, out, 64, plan)
    assert taken[2] == (scores, lengths, None, out, 64, None)


# --- widths ------------------------------------------------------------------------------------


def buffers(index_topk: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return SGLang's attention metadata for two rows, with its buffers of selected indices."""
    monkeypatch.setattr(deepseek_v4_backend, "_create_flashmla_metadata", lambda: None)
    made = object.__new__(deepseek_v4_backend.DSV4AttnMetadata)
    made.index_topk, made.present_ratios, made.low_ratios = index_topk, (4, 128), ()
    made.c4_topk_lengths_clamp1 = torch.tensor([1, 9000], dtype=torch.int32)
    made.init_flashmla_related(is_prefill=True)
    return made


@pytest.mark.parametrize("width", [64, 576, 2048])
def test_another_width_is_allocated(
    apply: Apply, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """SGLang asserts 512 or 1024; without the assert it allocates what is asked."""
    with pytest.raises(AssertionError, match=f"unexpected index_topk={width}"):
        buffers(width, monkeypatch)
    apply("wide_index_topk")
    made = buffers(width, monkeypatch)
    assert made.c4_sparse_page_indices.shape == made.c4_sparse_raw_indices.shape == (2, width)
    assert made.c4_sparse_topk_lengths.tolist() == [1, min(9000, width)]


def backend(index_topk: int, **changes: Any) -> Any:
    """Return what the hooks read of SGLang's DeepSeek-V4 backend."""
    arguments = {"disaggregation_mode": "null", "enable_metrics": False}
    config = SimpleNamespace(**changes.pop("config", {}))
    return SimpleNamespace(
        index_topk=index_topk,
        token_to_kv_pool=SimpleNamespace(c4_indexer_kv_pool=index_pool()),
        model_runner=SimpleNamespace(
            server_args=SimpleNamespace(**(arguments | changes)),
            model_config=SimpleNamespace(hf_text_config=config),
        ),
    )


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for SGLang's parallel groups, which nobody has made here, and for the card."""
    monkeypatch.setattr("seatrial_kernels.native.check_device", lambda: None)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_rank=3)
    )


def test_every_active_patch_is_reported_once_with_what_was_allocated(
    apply: Apply, first_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From SGLang's own buffer, when it is made; for the log, the metric and /server_info."""
    apply("wide_index_topk", "topk_v2_sm120", "index_logits_budget")
    selection.backend_made(None, backend(2048, config={"index_key_dtype": "fp8_e4m3"}))
    assert report._published == []
    buffers(2048, monkeypatch)
    buffers(2048, monkeypatch)
    assert [each["patch"] for each in report._published] == [
        "wide_index_topk",
        "topk_v2_sm120",
        "index_logits_budget",
    ]
    for each in report._published:
        assert (each["rank"], each["role"]) == ("3", "combined")
        assert (each["index_topk"], each["allocated_width"]) == ("2048", "2048")
        assert each["index_key_dtype"] == "fp8_e4m3"
        assert each["digest"] == report.digest()
    answer = SimpleNamespace(internal_state={})
    report._tell(answer, None, None)
    assert answer.internal_state["seatrial_plugin"] == report._published


@pytest.mark.parametrize(
    ("patches", "topk", "changes", "sentence"),
    [
        ("pd_contract", 2048, {}, "index_topk 2048 needs the patch wide_index_topk"),
        ("wide_index_topk", 1000, {}, "index_topk 1000 should be a multiple of 64 up to 2048"),
        ("wide_index_topk", 2112, {}, "index_topk 2112 should be a multiple of 64 up to 2048"),
        (
            "pd_contract",
            512,
            {"config": {"index_key_dtype": "bf16"}},
            "index_key_dtype bf16 is asked and fp8_e4m3 would be stored; put index_keys_bf16 into",
        ),
        (
            "index_keys_bf16",
            512,
            {"config": {"index_key_dtype": "fp8_e4m3"}},
            "index_key_dtype fp8_e4m3 is asked and bf16 would be stored; take index_keys_bf16 out",
        ),
        (
            "index_keys_bf16",
            512,
            {"config": {"index_key_dtype": "bf16"}},
            "a page of 64 index keys has 8448 bytes in the pool, not 16384",
        ),
    ],
)
def test_a_server_that_would_not_do_what_is_asked_stops(
    apply: Apply,
    first_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    patches: str,
    topk: int,
    changes: dict[str, Any],
    sentence: str,
) -> None:
    """What the configuration asks, what the patches do and what lies in the pool are compared."""
    apply()
    monkeypatch.setenv("SGLANG_PLUGINS", patches)
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        selection.backend_made(None, backend(topk, **changes))


@pytest.mark.parametrize(
    ("topk", "names", "is_v2", "release", "sentence"),
    [
        (1024, (), False, "0.5.23", ""),
        (64, (), False, "0.5.23", ""),
        (2048, ("topk",), False, "0.5.23", ""),
        (2048, (), True, "0.5.23", ""),
        (2048, ("index_store",), False, "0.5.23", "2048 is beyond SGLang's top-k v1, which ends"),
        (1024, (), True, "0.5.17", ""),
        (2048, ("topk",), True, "0.5.17", ""),
        (576, (), True, "0.5.17", "index_topk 576 needs the patch topk with sglang 0.5.17"),
    ],
)
def test_more_entries_than_the_active_top_k_selects_are_refused(
    topk: int, names: tuple[str, ...], is_v2: bool, release: str, sentence: str
) -> None:
    """SGLang's v1 ends at 1024, v2 and ours at 2048."""
    if not sentence:
        wide_index_topk.require_kernel(topk, names, is_v2=is_v2, release=release)
        return
    with pytest.raises(PatchError, match=sentence):
        wide_index_topk.require_kernel(topk, names, is_v2=is_v2, release=release)


def test_a_card_without_code_in_the_library_stops_the_server(
    apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the backend is made, not at the first request."""
    from seatrial_kernels.native import NativeError

    def refuse() -> None:
        raise NativeError("the library has code for sm_120a only: build it for this GPU")

    monkeypatch.setattr("seatrial_kernels.native.check_device", refuse)
    apply()
    monkeypatch.setenv("SGLANG_PLUGINS", "topk")
    with pytest.raises(SystemExit, match=r"patch topk stops .* code for sm_120a only"):
        selection.backend_made(None, backend(512))


@pytest.mark.parametrize("flag", index_keys_bf16.NOT_TOGETHER)
def test_bf16_keys_refuse_what_they_are_not_written_for(apply: Apply, flag: str) -> None:
    """By the name of the server argument."""
    apply()
    with pytest.raises(SystemExit, match=f"--{flag.replace('_', '-')} is not written for bf16"):
        index_keys_bf16._backend_made(None, backend(512, **{flag: True}))


# --- SGLang's top-k v2 on sm_120 ---------------------------------------------------------------


class No:
    """Says no to every question."""

    def __getattr__(self, name: str) -> bool:
        return False


def resolve(monkeypatch: pytest.MonkeyPatch, *, is_sm120: bool) -> None:
    """Run SGLang's own step of argument resolution for DeepSeek-V4, with a card of our choice.

    What it asks of the arguments and of its helpers for other purposes is answered with no.
    """
    from sglang.srt.arg_groups import deepseek_v4_hook, model_hook, resolution_hooks

    card: Any = No()
    card.is_sm120 = is_sm120
    model = SimpleNamespace(
        hf_config=SimpleNamespace(
            architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4"
        ),
        decision_config=None,
    )
    for name, answer in {
        "resolving_view": No(),
        "resolved_view": No(),
        "model_config_of": model,
        "get_platform": card,
        "parse_connector_type": None,
        "get_linear_attn_spec": None,
        "collect_model_override_declarations": [],
        "declare_resolution": None,
        "validate_declarations": None,
        "run_post_process_pass": None,
    }.items():
        monkeypatch.setattr(model_hook, name, lambda *_a, _answer=answer, **_k: _answer)
    for name in (
        "apply_deepseek_v4_defaults",
        "validate_deepseek_v41_features",
        "validate_deepseek_v4_cp",
    ):
        monkeypatch.setattr(deepseek_v4_hook, name, lambda *_a: None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_platform", lambda: card)
    resolution_hooks.run_hook(
        model_hook.handle_model_specific_adjustments, SimpleNamespace(_resolved_overrides=[])
    )


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what SGLang's step writes into the environment."""
    for name in list(os.environ):
        if name.startswith("SGLANG_"):
            monkeypatch.setenv(name, os.environ[name])
    for name in (
        "SGLANG_OPT_USE_TOPK_V2",
        "SGLANG_OPT_FP8_WO_A_GEMM",
        "SGLANG_OPT_USE_TILELANG_MHC_PRE",
        "SGLANG_OPT_FUSE_MHC_POST_PRE",
        "SGLANG_OPT_DEEPGEMM_HC_PRENORM",
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
        "SGLANG_OPT_USE_TILELANG_INDEXER",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("said", "then"), [(None, True), ("1", True), ("0", False)])
def test_top_k_v2_comes_back_on_sm_120(
    apply: Apply,
    switches: None,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    then: bool,
) -> None:
    """SGLang says 0 whatever was said; the patch says again what was."""
    from sglang.srt.environ import envs

    def say() -> None:
        monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", said or "")
        if said is None:
            monkeypatch.delenv("SGLANG_OPT_USE_TOPK_V2")

    say()
    resolve(monkeypatch, is_sm120=True)
    assert envs.SGLANG_OPT_USE_TOPK_V2.get() is False
    say()
    apply(topk_v2_sm120.NAME)
    resolve(monkeypatch, is_sm120=True)
    assert envs.SGLANG_OPT_USE_TOPK_V2.get() is then


def test_top_k_v2_needs_no_patch_elsewhere(
    apply: Apply, switches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch that would do nothing is no patch that is active."""
    apply(topk_v2_sm120.NAME)
    with pytest.raises(SystemExit, match="this GPU is not sm_120"):
        resolve(monkeypatch, is_sm120=False)


@pytest.mark.parametrize("name", plugin.PATCHES_OF["cuda"])
def test_a_patch_applies_to_the_installed_sglang(apply: Apply, compiled: None, name: str) -> None:
    """Every hook of every patch is what SGLang will call."""
    apply(name)
    assert {each.patch for each in upstream._installed} == {name}
    upstream.verify()


def test_the_patches_for_production_apply_together(apply: Apply, compiled: None) -> None:
    """All that do not exclude each other, in one process."""
    others = {"topk_v2_sm120", "index_logits"}
    apply(*(name for name in plugin.PATCHES_OF["cuda"] if name not in others))
    upstream.verify()
