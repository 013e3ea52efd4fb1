"""Print what this package supports, as JSON: ``python -m seatrial_kernels.describe``.

The build copies these keys into its ``build.json``; nothing is imported from torch or SGLang.
"""

import json
from importlib.metadata import version

from seatrial_kernels import native
from seatrial_kernels.plugin import PATCHES_OF
from seatrial_kernels.sparse_attention.settings import (
    KEY_BYTES,
    SUPPORTED_TOPK,
    key_bytes_per_token,
)

# SGLang's indexer on CUDA: an entry stands for 4 tokens, and 64 entries make a page, planar:
# 64 x 128 values of the dtype, and for fp8 64 scales of 4 bytes.
ENTRY_TOKENS = 4
ENTRY_BYTES = {"fp8_e4m3": 128 + 4, "bf16": 128 * 2}
# What SGLang selects without us.
SGLANG_TOPK = (512, 1024)


def description() -> dict[str, object]:
    """Return the kernels' part of ``build.json``.

    Bytes are of KV pool, per token: on CUDA in one indexer layer, on the CPU in all of them.
    """
    compiled = native.description()
    if compiled:
        return {
            "architectures": compiled["architectures"],
            "index_key_bytes_per_token": {
                dtype: size / ENTRY_TOKENS for dtype, size in ENTRY_BYTES.items()
            },
            "patches": list(PATCHES_OF["cuda"]),
            "supported_index_key_dtypes": list(ENTRY_BYTES),
            "supported_index_topk": compiled.get("supported_index_topk", list(SGLANG_TOPK)),
            "version": version("seatrial-kernels"),
        }
    return {
        "architectures": ["cpu"],
        "index_key_bytes_per_token": {dtype: key_bytes_per_token(dtype) for dtype in KEY_BYTES},
        "patches": list(PATCHES_OF["cpu"]),
        "supported_index_key_dtypes": list(KEY_BYTES),
        "supported_index_topk": list(SUPPORTED_TOPK),
        "version": version("seatrial-kernels"),
    }


if __name__ == "__main__":
    print(json.dumps(description(), indent=2))
