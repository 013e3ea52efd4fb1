"""What a patch tells the world: one log line and one metric in SGLang's own ``/metrics``."""

import hashlib
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path

METRIC = "seatrial_plugin_info"

logger = logging.getLogger(__name__)


@cache
def digest() -> str:
    """Return the first 16 hex digits of the sha256 over the installed package's Python files."""
    package = Path(__file__).parent
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]


def publish(
    patch: str, *, rank: int, role: str, facts: dict[str, str], is_metrics_enabled: bool
) -> None:
    """Log the facts, and export them as labels of a gauge whose value is 1.

    The gauge is written once per rank and role, into the multiprocess folder that SGLang has set
    up before; prometheus_client reads that setting when it is imported, so it is imported here.
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
    if is_metrics_enabled:
        from prometheus_client import Gauge

        gauge = Gauge(
            METRIC,
            "A patch of seatrial-kernels that is active, and what it allocated",
            list(labels),
            multiprocess_mode="mostrecent",
        )
        gauge.labels(**labels).set(1)
