"""Load what the units will start, with the environment whose Python runs this.

An import that fails here would have failed on every host.
"""

import importlib

MODULES = [
    # The server and the parser of its arguments.
    "sglang.launch_server",
    "sglang.srt.server_args",
    # The router.
    "sglang_router.launch_router",
    # The KV transfer between prefill and decode: a shared object with needs of its own.
    "mooncake.engine",
    # The plugin.
    "seatrial_kernels",
]


def main() -> None:
    """Import each; the first failure is the program's."""
    for name in MODULES:
        importlib.import_module(name)
    # The compiled kernels, where the build has them.
    native = importlib.import_module("seatrial_kernels.native")
    if native.description():
        native.library()
    print("\n".join(MODULES))


if __name__ == "__main__":
    main()
