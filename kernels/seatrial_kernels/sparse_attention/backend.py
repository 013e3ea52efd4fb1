"""SGLang's attention backend ``cpu_dsa``: dense attention everywhere but in one sparse layer.

It stores index keys in the KV rows of the index layers, where SGLang's KV pool, prefix cache and
P/D transfer treat them as any other KV row, and reads them back from there for each selection. The
arithmetic is the reference's.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel

from seatrial_kernels import selection
from seatrial_kernels.plugin import PatchError
from seatrial_kernels.sparse_attention import reference
from seatrial_kernels.sparse_attention.capture import SelectionCapture
from seatrial_kernels.sparse_attention.settings import (
    INDEX_DIM,
    IndexSettings,
    key_bytes_per_token,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Queries per step of a long prefill: bounds the scores and the mask to ROWS x context.
ROWS = 256


class CpuSparseAttention(TorchNativeAttnBackend):
    """Attention of a model whose configuration describes an indexer (see ``settings``)."""

    capture: SelectionCapture | None = None
    """What keeps the selections of every request, on a server that is asked to return them."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__(model_runner)
        config = model_runner.model_config.hf_config
        self.settings = IndexSettings.of(config)
        parallel = get_parallel()
        if parallel.tp_size != 1:
            raise PatchError("cpu_dsa serves one rank; start the server with --tp-size 1")
        if config.num_hidden_layers != self.settings.index_layers.stop:
            raise PatchError("SGLang did not apply the hook that keeps the index layers")
        self.rows = IndexRows(self.token_to_kv_pool, self.settings)
        self.projection = _projection(model_runner.model, self.settings, config.head_dim)
        # As in the CUDA backends, the width of this buffer is what limits a selection.
        self.selected = torch.empty((ROWS, self.settings.topk), dtype=torch.int64)
        arguments = model_runner.server_args
        if arguments.enable_return_indexer_topk:
            slots = self.token_to_kv_pool.get_key_buffer(0).shape[0]
            self.capture = SelectionCapture(slots, self.settings.topk)
        selection.declare(
            self.settings.topk,
            self.settings.key_dtype,
            rank=parallel.tp_rank,
            arguments=arguments,
        )
        selection.allocated(self.selected.shape[1])

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend from the new tokens of every request.

        ``q``, result: [tokens, heads * channels]; ``k``, ``v``: [tokens, kv heads, channels].
        """
        if layer.layer_id in self.settings.index_layers:
            return torch.zeros_like(q)  # and leave the rows to the index keys
        mode = forward_batch.forward_mode
        if layer.layer_id != self.settings.sparse_layer or mode.is_idle():
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        ends = forward_batch.seq_lens.tolist()
        new = [1] * len(ends) if mode.is_decode() else forward_batch.extend_seq_lens.tolist()
        if self.capture is not None:
            self.capture.begin(forward_batch.out_cache_loc)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(new)
        outputs = [
            self._attend(request_queries, request, end, layer)
            for request_queries, request, end in zip(
                queries, forward_batch.req_pool_indices, ends, strict=True
            )
        ]
        return torch.cat(outputs).view(q.shape)

    def _attend(
        self, queries: torch.Tensor, request: torch.Tensor, end: int, layer: "RadixAttention"
    ) -> torch.Tensor:
        """Return [R, H, C] for one request's newest R tokens, of ``end`` in all."""
        slots = self.req_to_token_pool.req_to_token[request, :end].long()
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[slots]
        start = end - len(queries)
        self._store_new_entries(keys[:, 0], slots, start)
        entries = end // reference.GROUP
        # An entry's key stands in the row of its last token.
        last = slots[reference.GROUP - 1 :: reference.GROUP]
        stored = self.rows.read(last).float() if entries > self.settings.topk else None
        output = torch.empty_like(queries)
        # While a prompt's entries are no more than topk, its attention is dense.
        dense = 0 if start else min(end, reference.GROUP * (self.settings.topk + 1) - 1)
        if dense:
            self._keep(None, torch.arange(dense))
            output[:dense] = reference.attention(
                queries[:dense], keys[:dense], values[:dense], None, layer.scaling
            )
        for row in range(dense, len(queries), ROWS):
            block = queries[row : row + ROWS]
            positions = torch.arange(start + row, start + row + len(block))
            length = start + row + len(block)
            if stored is None or length // reference.GROUP <= self.settings.topk:
                allowed = torch.arange(length) <= positions[:, None]
                self._keep(None, positions)
            else:
                visible = stored[: length // reference.GROUP]
                scores = reference.index_scores(block, self.projection, visible)
                selected = self.selected[: len(block)]
                reference.select_entries(scores, positions, out=selected)
                allowed = reference.allowed_tokens(selected, positions, length)
                self._keep(selected, positions)
            output[row : row + ROWS] = reference.attention(
                block, keys[:length], values[:length], allowed, layer.scaling
            )
        return output

    def _keep(self, selected: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Keep a selection [R, topk] for who asked for it; None is every complete entry."""
        if self.capture is None:
            return
        if selected is None:
            selected = torch.arange(self.settings.topk).expand(len(positions), -1)
            visible = reference.visible_entries(positions)[:, None]
            selected = selected.masked_fill(selected >= visible, -1)
        self.capture.keep(selected)

    def _store_new_entries(self, keys: torch.Tensor, slots: torch.Tensor, start: int) -> None:
        """Store the index keys of the entries that the tokens from ``start`` on complete."""
        group = reference.GROUP
        first, stop = start // group * group, len(keys) // group * group
        if first < stop:
            dtype = reference.KEY_DTYPES[self.settings.key_dtype]
            new = reference.index_keys(keys[first:stop], self.projection, dtype)
            self.rows.write(slots[first + group - 1 : stop : group], new)


class IndexRows:
    """The KV rows of the index layers as bytes: one index key per slot."""

    def __init__(self, pool: Any, settings: IndexSettings) -> None:
        self.dtype = reference.KEY_DTYPES[settings.key_dtype]
        self.parts = [
            buffer(number).view(torch.uint8).flatten(1)
            for number in settings.index_layers
            for buffer in (pool.get_key_buffer, pool.get_value_buffer)
        ]
        width = sum(part.shape[1] for part in self.parts)
        if width != key_bytes_per_token(settings.key_dtype):
            raise PatchError(
                f"the pool has {width} bytes per token for index keys, not "
                f"{key_bytes_per_token(settings.key_dtype)}; serve with --dtype float32"
            )

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Store index keys [N, INDEX_DIM] in the rows of N slots."""
        stored = keys.contiguous().view(torch.uint8)
        widths = [part.shape[1] for part in self.parts]
        for part, content in zip(self.parts, stored.split(widths, dim=1), strict=True):
            part[slots] = content

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the index keys [N, INDEX_DIM] that are stored in the rows of N slots."""
        return torch.cat([part[slots] for part in self.parts], dim=1).view(self.dtype)


def _projection(model: Any, settings: IndexSettings, head_dim: int) -> torch.Tensor:
    """Return the indexer's weights [INDEX_DIM, head_dim].

    A Llama checkpoint has no place for them. They are the first columns of the query projection of
    the first index layer, which has no other use.
    """
    layer = model.model.layers[settings.index_layers.start].self_attn
    queries = layer.qkv_proj.weight[: layer.q_size].detach().float()
    columns = INDEX_DIM * head_dim // layer.q_size
    return queries[:, :columns].reshape(INDEX_DIM, head_dim).contiguous()
