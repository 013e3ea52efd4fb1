"""Print what this package supports, as JSON: ``python -m seatrial_kernels.describe``.

The build copies these keys into its ``build.json``; nothing is imported from torch or SGLang.
"""

import json
from importlib.metadata import version

from seatrial_kernels import native, selection
from seatrial_kernels.plugin import PATCHES_OF
from seatrial_kernels.sparse_attention.settings import (
    KEY_BYTES,
    SUPPORTED_TOPK,
    key_bytes_per_token,
)

# SGLang's indexer on CUDA: an entry stands for 4 tokens.
ENTRY_TOKENS = 4


def description() -> dict[str, object]:
    """Return the kernels' part of ``build.json``.

    Bytes are of KV pool, per token: on CUDA in one indexer layer, on the CPU in all of them.
    """
    compiled = native.description()
    if compiled:
        stock = selection.STOCK_TOPK
        topks = sorted({*stock, *compiled.get("supported_index_topk", ())})
        dtypes = {"fp8_e4m3", *compiled.get("stored_index_key_dtypes", ())}
        return {
            "architectures": compiled["architectures"],
            "index_key_bytes_per_token": {
                dtype: selection.KEY_BYTES[dtype] / ENTRY_TOKENS for dtype in sorted(dtypes)
            },
            "patches": list(PATCHES_OF["cuda"]),
            "patches_needed": {
                "index_key_dtype": {"index_keys_bf16": ["bf16"]},
                "index_topk": {"wide_index_topk": [topk for topk in topks if topk not in stock]},
            },
            "supported_index_key_dtypes": sorted(dtypes),
            "supported_index_topk": topks,
            "version": version("seatrial-kernels"),
        }
    return {
        "architectures": ["cpu"],
        "index_key_bytes_per_token": {dtype: key_bytes_per_token(dtype) for dtype in KEY_BYTES},
        "patches": list(PATCHES_OF["cpu"]),
        "patches_needed": {
            "index_key_dtype": {"cpu_dsa": list(KEY_BYTES)},
            "index_topk": {"cpu_dsa": list(SUPPORTED_TOPK)},
        },
        "supported_index_key_dtypes": list(KEY_BYTES),
        "supported_index_topk": list(SUPPORTED_TOPK),
        "version": version("seatrial-kernels"),
    }


if __name__ == "__main__":
    print(json.dumps(description(), indent=2))
