"""The selections of the CPU backend, returned as SGLang returns those of a GPU.

SGLang's own capturer (``--enable-return-indexer-topk``) is made for devices only: its factory
returns none on a CPU, and its buffers are pinned. This one has the same interface, so that what
asks for a selection (``return_indexer_topk`` of ``/generate``) and what answers stay SGLang's.
"""

from typing import Any

import torch
from sglang.srt.state_capturer.base import BaseTopkCapturer
from sglang.srt.state_capturer.indexer_topk import set_global_indexer_capturer


class _Rows:
    """What SGLang's capturers keep their rows in: [slots, layers, width]."""

    def __init__(self, slots: int, width: int) -> None:
        self.buffer = torch.full((slots, 1, width), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Nothing is pinned."""


class SelectionCapture(BaseTopkCapturer):
    """Keeps which entries each token of the one sparse layer saw, by its KV slot."""

    def __init__(self, slots: int, width: int) -> None:
        self.num_layers, self.topk_size = 1, width
        self.host_cache = _Rows(slots, width)
        self.slots, self.done = torch.empty(0, dtype=torch.int64), 0

    def begin(self, slots: torch.Tensor) -> None:
        """Begin a forward pass whose new tokens have these slots, and be the one that is asked.

        SGLang sets its own capturer, on a CPU none, after the backend is made.
        """
        set_global_indexer_capturer(self)
        self.slots, self.done = slots.long(), 0

    def keep(self, selected: torch.Tensor) -> None:
        """Keep the entries [R, width] of the next R tokens; -1 stands for none."""
        stop = self.done + len(selected)
        self.host_cache.buffer[self.slots[self.done : stop], 0] = selected.int()
        self.done = stop

    def on_forward_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is left to copy from a device."""
