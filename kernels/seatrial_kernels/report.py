"""What the patches tell the world: a log line, a metric, and a part of ``/server_info``."""

import hashlib
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from seatrial_kernels.upstream import Hook

METRIC = "seatrial_plugin_info"

logger = logging.getLogger(__name__)

_published: list[dict[str, str]] = []


@cache
def digest() -> str:
    """Return the first 16 hex digits of the sha256 over the installed package's files.

    Its Python, and the compiled kernels with what names their compiler and sources.
    """
    package = Path(__file__).parent
    total = hashlib.sha256()
    files = (path for suffix in ("py", "so", "json") for path in package.rglob(f"*.{suffix}"))
    for path in sorted(files):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]


def publish(
    patch: str, *, rank: int, role: str, facts: dict[str, str], is_metrics_enabled: bool
) -> None:
    """Log the facts, and export them as labels of a gauge whose value is 1.

    The gauge is written once per patch, rank and role, into the multiprocess folder that SGLang
    has set up before; prometheus_client reads that setting when it is imported, so it is imported
    here. It belongs to no registry, because two patches of one process differ in their labels.
    """
    labels = {
        "patch": patch,
        "version": version("seatrial-kernels"),
        "digest": digest(),
        "rank": str(rank),
        "role": role,
        **facts,
    }
    logger.info("%s: %s", METRIC, " ".join(f"{name}={value}" for name, value in labels.items()))
    _published.append(labels)
    if is_metrics_enabled:
        from prometheus_client import Gauge

        gauge = Gauge(
            METRIC,
            "A patch of seatrial-kernels that is active, and what it allocated",
            list(labels),
            multiprocess_mode="mostrecent",
            registry=None,
        )
        gauge.labels(**labels).set(1)


def _tell(answer: Any, *_args: Any, **_kwargs: Any) -> None:
    """Add what this process published to the state that ``/server_info`` shows for its rank."""
    answer.internal_state["seatrial_plugin"] = [dict(labels) for labels in _published]


HOOKS = {
    "0.5.23": (
        Hook(
            "sglang.srt.managers.scheduler_components.internal_state"
            ".SchedulerInternalStateController.get_internal_state",
            "0b87b893bb5d3ad4",
            "after",
            _tell,
        ),
    ),
    "0.5.17": (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            "6d849110bc4cfd68",
            "after",
            _tell,
        ),
    ),
}
"""What shows the reports of the first rank of each DP group in ``/server_info``."""
