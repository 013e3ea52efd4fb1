"""Print what this package supports, as JSON: ``python -m seatrial_kernels.describe``.

The build copies these keys into its ``build.json``; nothing is imported from torch or SGLang.
"""

import json
from importlib.metadata import version

from seatrial_kernels.plugin import PATCHES
from seatrial_kernels.sparse_attention.settings import (
    KEY_BYTES,
    SUPPORTED_TOPK,
    key_bytes_per_token,
)


def description() -> dict[str, object]:
    """Return the kernels' part of ``build.json``; bytes are of KV pool, per token."""
    return {
        "architectures": ["cpu"],
        "index_key_bytes_per_token": {dtype: key_bytes_per_token(dtype) for dtype in KEY_BYTES},
        "patches": list(PATCHES),
        "supported_index_key_dtypes": list(KEY_BYTES),
        "supported_index_topk": list(SUPPORTED_TOPK),
        "version": version("seatrial-kernels"),
    }


if __name__ == "__main__":
    print(json.dumps(description(), indent=2))
