"""The cell file: what a rollout tells the gates about the cell that they are to judge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.baseline import Baseline
from seatrial.errors import SeatrialError
from seatrial.memory import MemoryPlan
from seatrial.release import Release
from seatrial.spec import ServingSpec

Role = Literal["prefill", "decode", "combined", "router"]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+/?$")]
"""Without a user, a password or a query: it stands in reports."""


BY_HAND = "By hand only a URL is known; a rollout knows it from its cell file (--cell-file)."
"""Why a gate cannot look through a door that it needs."""


class CellError(SeatrialError):
    """A cell file that cannot be read or does not say what it should."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CellServer(_Strict):
    """One server of the cell.

    Attributes:
        host: the host's name in the ssh_config.
        address: the address that other hosts use.
        url: where its HTTP API answers.
        unit: the systemd unit that runs it.
    """

    role: Role
    host: str
    address: str
    url: Url
    unit: str

    @property
    def instance(self) -> str:
        """``host:port``, the name of the server in Prometheus."""
        return urlsplit(self.url).netloc

    @property
    def label(self) -> str:
        """How reports name the server."""
        return f"{self.role} on {self.host}"


class Peer(_Strict):
    """Another cell of the fleet: its router, and whether prefill and decode are one server."""

    name: str
    router_url: Url
    engine_urls: list[Url]
    is_combined: bool


class Cell(_Strict):
    """One cell: the servers that serve together, and what they should be.

    By hand there may be only a URL; then release, spec and plan are None and ``servers`` is empty.

    Attributes:
        peers: the other cells of the fleet.
        baseline: what the gates found on the last good release; None if nothing is known.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    name: str
    router_url: Url
    servers: list[CellServer]
    prometheus_url: Url | None = None
    release: Release | None = None
    spec: ServingSpec | None = None
    plan: MemoryPlan | None = None
    baseline: Baseline | None = None
    thresholds: str
    ssh_config: Path | None = None
    peers: list[Peer] = []

    @property
    def engines(self) -> list[CellServer]:
        """The servers that hold the model: all but the router."""
        return [server for server in self.servers if server.role != "router"]

    def with_roles(self, *roles: Role) -> list[CellServer]:
        """Return the servers that have one of ``roles``."""
        return [server for server in self.servers if server.role in roles]


def by_hand(url: str, thresholds: str) -> Cell:
    """Return the cell behind a URL of which nothing else is known.

    Raises:
        CellError: the URL is not ``http://host:port``.
    """
    value = {"schema": 1, "name": url, "router_url": url, "servers": [], "thresholds": thresholds}
    try:
        return Cell.model_validate(value)
    except ValidationError:
        said = "has more in it" if set("@?#") & set(url) else f"is {url}"  # may be a password
        raise CellError(f"--url should be like http://host:port, {said}") from None


def load(path: Path) -> Cell:
    """Read a cell file.

    Raises:
        CellError: the file is missing, is not JSON, or says a key wrongly, one line per key.
    """
    try:
        return Cell.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CellError(f"{path}: should be a cell file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CellError(f"{path}: should be a cell file: it is no text in UTF-8") from None
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "the file"
            lines.append(f"{path}: {where}: {problem['msg']}")
        raise CellError("\n".join(dict.fromkeys(lines))) from None
