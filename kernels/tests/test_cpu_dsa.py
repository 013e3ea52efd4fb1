"""The CPU backend keeps index keys in the KV pool's rows and selects from what stands there."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seatrial_kernels.plugin import PatchError
from seatrial_kernels.sparse_attention import reference
from seatrial_kernels.sparse_attention.backend import CpuSparseAttention, IndexRows
from seatrial_kernels.sparse_attention.capture import SelectionCapture
from seatrial_kernels.sparse_attention.settings import (
    INDEX_DIM,
    KEY_BYTES,
    SUPPORTED_TOPK,
    IndexSettings,
    key_bytes_per_token,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

CHANNELS, HEADS, TOPK = 128, 4, 512
LAYER = SimpleNamespace(
    layer_id=1,
    tp_q_head_num=HEADS,
    tp_k_head_num=1,
    qk_head_dim=CHANNELS,
    v_head_dim=CHANNELS,
    scaling=CHANNELS**-0.5,
)


def config(**changes: Any) -> SimpleNamespace:
    """Return the part of a Hugging Face configuration that the indexer reads."""
    values: dict[str, Any] = {
        "index_topk": TOPK,
        "index_key_dtype": "fp8_e4m3",
        "index_head_dim": INDEX_DIM,
        "index_sparse_layer": 1,
        "num_key_value_heads": 1,
        "head_dim": CHANNELS,
    }
    return SimpleNamespace(**(values | changes))


class Pool:
    """A KV pool with SGLang's layout; unwritten rows hold NaN."""

    def __init__(self, slots: int, layers: int) -> None:
        shape = (layers, slots, 1, CHANNELS)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Return one layer's keys [slots, 1, channels]."""
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Return one layer's values [slots, 1, channels]."""
        return self.values[layer]

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new rows."""
        self.keys[layer.layer_id][where.loc] = k.view(-1, 1, CHANNELS)
        self.values[layer.layer_id][where.loc] = v.view(-1, 1, CHANNELS)


class Server:
    """A backend over a pool, for one request in shuffled slots."""

    def __init__(self, key_dtype: str, tokens: int) -> None:
        self.draw = torch.Generator().manual_seed(11)
        settings = IndexSettings.of(config(index_key_dtype=key_dtype))
        self.pool = Pool(tokens + 7, settings.index_layers.stop)
        self.slots = torch.randperm(tokens + 7, generator=self.draw)[:tokens]
        self.backend = CpuSparseAttention.__new__(CpuSparseAttention)
        self.backend.settings = settings
        self.backend.token_to_kv_pool = self.pool
        self.backend.req_to_token_pool = SimpleNamespace(req_to_token=self.slots[None].int())
        self.backend.swa_out_cache_loc = None
        self.backend.rows = IndexRows(self.pool, settings)
        self.backend.projection = torch.randn(INDEX_DIM, CHANNELS, generator=self.draw)
        self.backend.selected = torch.empty((256, TOPK), dtype=torch.int64)
        self.queries = torch.randn(tokens, HEADS * CHANNELS, generator=self.draw)
        self.keys = torch.randn(tokens, 1, CHANNELS, generator=self.draw)
        self.values = torch.randn(tokens, 1, CHANNELS, generator=self.draw)

    def run(self, start: int, end: int, mode: ForwardMode = ForwardMode.EXTEND) -> torch.Tensor:
        """Serve the tokens from ``start`` to ``end`` in one pass; return [tokens, heads * C]."""
        batch = SimpleNamespace(
            forward_mode=mode,
            out_cache_loc=self.slots[start:end],
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([end]),
            extend_seq_lens=torch.tensor([end - start]),
        )
        new = slice(start, end)
        return self.backend.forward(
            self.queries[new], self.keys[new], self.values[new], LAYER, batch
        )

    def expected(self, key_dtype: str) -> torch.Tensor:
        """Return the reference's result for the whole request at once."""
        tokens = len(self.queries)
        positions = torch.arange(tokens)
        queries = self.queries.view(tokens, HEADS, CHANNELS)
        complete = tokens // reference.GROUP * reference.GROUP
        stored = reference.index_keys(
            self.keys[:complete, 0], self.backend.projection, reference.KEY_DTYPES[key_dtype]
        )
        scores = reference.index_scores(queries, self.backend.projection, stored)
        selected = torch.empty((tokens, TOPK), dtype=torch.int64)
        reference.select_entries(scores, positions, out=selected)
        allowed = reference.allowed_tokens(selected, positions, tokens)
        scale = LAYER.scaling
        result = reference.attention(queries, self.keys, self.values, allowed, scale)
        return result.reshape(tokens, -1)


@pytest.mark.parametrize("key_dtype", KEY_BYTES)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 4 * TOPK - 1, 4 * TOPK, 4 * TOPK + 1, 2801])
def test_a_prefill_is_the_reference(key_dtype: str, tokens: int) -> None:
    """Blocks of queries, shuffled slots and NaN in unwritten rows change nothing."""
    server = Server(key_dtype, tokens)
    torch.testing.assert_close(server.run(0, tokens), server.expected(key_dtype))


@pytest.mark.parametrize("cut", [1, 2047, 2048, 2050, 2700])
def test_chunks_and_decode_steps_are_the_reference(cut: int) -> None:
    """A prefix from the cache, a second chunk and single tokens give the same as one pass."""
    server = Server("fp8_e4m3", 2705)
    parts = [server.run(0, cut), server.run(cut, 2701)]
    parts += [server.run(t, t + 1, ForwardMode.DECODE) for t in range(2701, 2705)]
    torch.testing.assert_close(torch.cat(parts), server.expected("fp8_e4m3"))


@pytest.mark.parametrize("key_dtype", KEY_BYTES)
def test_a_decode_step_selects_by_the_stored_rows(key_dtype: str) -> None:
    """Index rows that were damaged on the way change what a query sees: nothing is recomputed."""
    results = []
    for is_damaged in (False, True):
        server = Server(key_dtype, 2601)
        server.run(0, 2600)
        if is_damaged:
            for layer in server.backend.settings.index_layers:
                server.pool.keys[layer] = 0.0
                server.pool.values[layer] = 0.0
        results.append(server.run(2600, 2601, ForwardMode.DECODE))
    assert not results[0].allclose(results[1])


def test_index_layers_pass_zero_and_leave_their_rows_alone() -> None:
    """The rows belong to the index keys, not to the layer's own attention."""
    server = Server("bf16", 8)
    server.run(0, 8)
    before = server.pool.keys[2].view(torch.int32).clone()
    layer = SimpleNamespace(**(vars(LAYER) | {"layer_id": 2}))
    out = server.backend.forward(server.queries, server.keys, server.values, layer, None)
    assert out.count_nonzero() == 0
    assert server.pool.keys[2].view(torch.int32).equal(before)


@pytest.mark.parametrize("key_dtype", KEY_BYTES)
def test_every_byte_of_a_key_survives_the_rows(key_dtype: str) -> None:
    """All 256 values of a byte, among them those that are NaN as fp32 or as the dtype."""
    settings = IndexSettings.of(config(index_key_dtype=key_dtype))
    rows = IndexRows(Pool(16, settings.index_layers.stop), settings)
    width = INDEX_DIM * KEY_BYTES[key_dtype]
    content = torch.arange(4 * width).view(4, width).remainder(251).to(torch.uint8)
    content[1], content[2, ::2] = 255, 127
    slots = torch.tensor([9, 0, 15, 4])
    rows.write(slots, content.view(rows.dtype))
    assert rows.read(slots).view(torch.uint8).equal(content)


@pytest.mark.parametrize("key_dtype", KEY_BYTES)
def test_the_pool_grows_by_what_describe_says(key_dtype: str) -> None:
    """index_key_bytes_per_token is what the index layers take in SGLang's pool."""
    layers = IndexSettings.of(config(index_key_dtype=key_dtype)).index_layers
    pool = Pool(10, layers.stop)
    taken = sum(
        buffer(layer).nbytes
        for layer in layers
        for buffer in (pool.get_key_buffer, pool.get_value_buffer)
    )
    assert taken / 10 == key_bytes_per_token(key_dtype)
    printed = subprocess.run(
        [sys.executable, "-m", "seatrial_kernels.describe"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    described = json.loads(printed)
    assert described["index_key_bytes_per_token"][key_dtype] == key_bytes_per_token(key_dtype)
    assert described["supported_index_topk"] == list(SUPPORTED_TOPK)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"index_topk": 513},
            "index_topk 513 is not supported; it should be one of 512, 1024, 2048",
        ),
        ({"index_topk": "1024"}, "index_topk '1024' is not supported"),
        ({"index_key_dtype": "fp4"}, "should be one of fp8_e4m3, bf16, fp32"),
        ({"index_head_dim": 128}, "index_head_dim should be 1024"),
    ],
)
def test_an_unsupported_value_is_refused_with_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    """The message names the value and what it should be."""
    with pytest.raises(PatchError, match=sentence):
        IndexSettings.of(config(**changes))


def test_a_model_without_an_indexer_is_refused() -> None:
    """The backend never guesses a default."""
    without = config()
    del without.index_topk
    with pytest.raises(PatchError, match="no index_topk"):
        IndexSettings.of(without)


def test_selections_are_kept_as_the_reference_makes_them() -> None:
    """A server that is asked for selections returns, token by token, what each one saw."""
    tokens = reference.GROUP * TOPK + 600
    server = Server("fp32", tokens)
    server.backend.capture = SelectionCapture(tokens + 7, TOPK)
    server.run(0, tokens)
    kept = server.backend.capture.host_cache.buffer[server.slots, 0]
    visible = [(position + 1) // reference.GROUP for position in range(tokens)]
    for position in (0, 3, 127, reference.GROUP * TOPK, tokens - 1):
        row = set(kept[position].tolist()) - {-1}
        assert len(row) == min(TOPK, visible[position]), position
        assert row <= set(range(visible[position]))
