"""Compare the installed kernels with their references: ``python -m seatrial_kernels.selftest``.

Each operation that has a kernel brings a module ``<operation>/selftest.py`` with ``cases()``: pairs
of a name and a function that runs the kernel on this machine's GPU and returns what is wrong, or
None. One line of JSON is printed per case: op, case, ok, message. Seconds, not minutes, and at
most some hundred MiB beside a serving engine: it runs before each release takes traffic.
"""

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import seatrial_kernels

Case = tuple[str, Callable[[], str | None]]


def operations(package: ModuleType) -> Iterator[tuple[str, Iterable[Case]]]:
    """Yield each operation that brings a self-test, and its cases."""
    for found in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{found.name}.selftest"
        if found.ispkg and importlib.util.find_spec(name) is not None:
            yield found.name, importlib.import_module(name).cases()


def findings(package: ModuleType) -> Iterator[dict[str, object]]:
    """Run every case and yield what came out; a case that breaks is a case that failed."""
    for operation, cases in operations(package):
        for name, run in cases:
            try:
                wrong = run()
            except Exception as error:  # noqa: BLE001 - whatever it is, the kernel did not do its work
                wrong = f"{type(error).__name__}: {error}"
            yield {"op": operation, "case": name, "ok": wrong is None, "message": wrong or ""}


if __name__ == "__main__":
    for finding in findings(seatrial_kernels):
        print(json.dumps(finding), flush=True)
