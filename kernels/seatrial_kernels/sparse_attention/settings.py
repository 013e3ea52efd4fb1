"""What the model configuration says about the indexer, checked before anything is allocated."""

from dataclasses import dataclass
from typing import Any

from seatrial_kernels.plugin import PatchError

# What the reference is tested with, and what describe.py tells the build.
SUPPORTED_TOPK = (512, 1024, 2048)
KEY_BYTES = {"fp8_e4m3": 1, "bf16": 2, "fp32": 4}
INDEX_DIM = 1024
KV_BYTES = 4  # the CPU engine serves in fp32


def key_bytes_per_token(key_dtype: str) -> int:
    """Return the bytes of KV pool per token that hold index keys of this dtype.

    The pool has one row per token in each index layer; an entry of 4 tokens uses the row of its
    last token, the other three stay unused.
    """
    return INDEX_DIM * KEY_BYTES[key_dtype]


@dataclass(frozen=True)
class IndexSettings:
    """The indexer of one model.

    Attributes
    ----------
    topk: entries that a query may see
    key_dtype: name of the dtype in which index keys are stored
    sparse_layer: the decoder layer that attends sparsely
    index_layers: the decoder layers after it, whose KV rows hold the index keys
    """

    topk: int
    key_dtype: str
    sparse_layer: int
    index_layers: range

    @classmethod
    def of(cls, config: Any) -> "IndexSettings":
        """Read a Hugging Face configuration.

        Raises
        ------
        PatchError
            When a value is missing or not supported.
        """
        for name in ("index_topk", "index_key_dtype", "index_head_dim", "index_sparse_layer"):
            if not hasattr(config, name):
                raise PatchError(f"the model's config.json has no {name}: it has no indexer")
        if config.index_topk not in SUPPORTED_TOPK:
            raise PatchError(
                f"index_topk {config.index_topk!r} is not supported; it should be one of "
                f"{', '.join(map(str, SUPPORTED_TOPK))}"
            )
        if config.index_key_dtype not in KEY_BYTES:
            raise PatchError(
                f"index_key_dtype {config.index_key_dtype!r} is not supported; it should be one "
                f"of {', '.join(KEY_BYTES)}"
            )
        row = 2 * config.num_key_value_heads * config.head_dim * KV_BYTES
        layers, rest = divmod(key_bytes_per_token(config.index_key_dtype), row)
        if config.index_head_dim != INDEX_DIM or rest or not layers:
            raise PatchError(
                f"an index key of {config.index_head_dim} x {config.index_key_dtype} does not "
                f"fill whole KV rows of {row} bytes; index_head_dim should be {INDEX_DIM}"
            )
        first = config.index_sparse_layer + 1
        return cls(
            topk=config.index_topk,
            key_dtype=config.index_key_dtype,
            sparse_layer=config.index_sparse_layer,
            index_layers=range(first, first + layers),
        )
