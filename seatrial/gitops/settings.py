"""The settings of one fleet's reconciler: ``/etc/seatrial/gitops/<fleet>.yml`` on the control host.

They lie outside the repository that they judge, and say everything: no key has a default here, so
there is one place to look. Secrets are named by file, never written down.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

import yaml
from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from seatrial.errors import SeatrialError

FOLDER = Path("/etc/seatrial/gitops")
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[int, Field(ge=1)]


class SettingsError(SeatrialError):
    """The settings cannot be read, or a key is wrong."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _refuse_password(url: str, instead: str) -> None:
    """Refuse a password, and over HTTP a name, too: forges take a token in its place."""
    kind, _, rest = url.partition("://")
    who, at, _ = rest.partition("/")[0].rpartition("@")
    if at and (":" in who or kind in ("http", "https")):
        raise ValueError(
            f"should carry no password and no token: it would be seen in ps and in logs; {instead}"
        )


class Repository(_Strict):
    """Where the order comes from.

    Attributes:
        url: as git takes it. Keys and passwords belong to the user's ssh and git configuration.
        branch: the tracked branch.
        seconds: how long one call of git over the network may take.
        notes: whether the verdict is pushed as a note on the commit (refs/notes/rollouts).
    """

    url: Annotated[str, Field(pattern=r"^[^-\s]\S*$")]
    branch: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
    seconds: Seconds
    notes: bool

    @field_validator("url")
    @classmethod
    def _carries_no_password(cls, url: str) -> str:
        _refuse_password(url, "give git a credential helper instead")
        if url.startswith("ext::"):
            raise ValueError("should not be a command (ext::)")
        return url


class Signers(_Strict):
    """Who may order a rollout. What is under test is never asked.

    Attributes:
        ssh: a file of allowed signers, see ssh-keygen(1); a principal is an e-mail address.
        gpg_home: a GnuPG folder whose public keys are allowed; their user ids carry the addresses.
        sign_for_others: addresses, such as a forge's own, whose signature stands for commits that
            name another author and committer.
    """

    ssh: Path | None
    gpg_home: Path | None
    sign_for_others: list[Text]

    @model_validator(mode="after")
    def _has_any(self) -> Self:
        if self.ssh is None and self.gpg_home is None:
            raise ValueError("should name ssh, gpg_home or both: nobody could sign")
        return self


class Protected(_Strict):
    """What a second person must approve, by a signed tag ``approve/...`` on the commit.

    Attributes:
        paths: files (``ansible.cfg``) and folders (``gates/``) of the repository.
        approvers: addresses of who may approve; if empty, every allowed signer.
    """

    paths: list[Text]
    approvers: list[Text]

    @field_validator("paths")
    @classmethod
    def _are_of_the_repository(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if path.startswith(("/", "./", "../")) or "*" in path:
                raise ValueError(
                    "should be files (ansible.cfg) and folders (gates/) as git names them, is "
                    f"{path}: it would protect nothing"
                )
        return paths


class Window(_Strict):
    """When rollouts may begin, or may not. Deny beats allow; a rollout that runs goes on.

    Attributes:
        cron: five fields: when the window opens.
        minutes: how long it stays open.
    """

    kind: Literal["allow", "deny"]
    cron: Text
    minutes: Annotated[int, Field(ge=1, le=60 * 24 * 366)]
    timezone: Text
    reason: Text

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, cron: str) -> str:
        if len(cron.split()) != 5:  # cronsim takes seconds, too
            raise ValueError(f"should be five fields as crontab(5) has them, is {cron}")
        try:
            CronSim(cron, datetime.now(UTC))
        except CronSimError as error:
            raise ValueError(f"should be five fields as crontab(5) has them: {error}") from None
        return cron

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            raise ValueError(f"should be a time zone such as Europe/Berlin, is {name}") from None
        return name


class Approval(_Strict):
    """Each rollout waits until a person approves its commit, and no longer than this."""

    seconds: Seconds


class Forge(_Strict):
    """Whose commit status is set.

    Attributes:
        api: the API's root, such as https://api.github.com or https://git.example.org/api/v4.
        repository: ``owner/name``.
    """

    kind: Literal["github", "gitlab", "gitea"]
    api: Annotated[str, Field(pattern=r"^https?://\S+$")]
    repository: Annotated[str, Field(pattern=r"^[^/\s]+(/[^/\s]+)+$")]
    token_file: Path
    context: Text

    @field_validator("api")
    @classmethod
    def _carries_no_password(cls, url: str) -> str:
        _refuse_password(url, "the token stands in token_file")
        return url


class Grafana(_Strict):
    """Where rollouts are drawn as annotations."""

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    token_file: Path

    @field_validator("url")
    @classmethod
    def _carries_no_password(cls, url: str) -> str:
        _refuse_password(url, "the token stands in token_file")
        return url


class Tell(_Strict):
    """Who is told, besides git.

    Attributes:
        notify_urls_file: a file of apprise URLs, one a line; they carry tokens.
        report_url: what a link to a report begins with; ``{rollout}`` stands for the rollout.
        metrics_file: for the textfile collector of node-exporter.
    """

    notify_urls_file: Path | None
    report_url: str | None
    forge: Forge | None
    metrics_file: Path | None
    grafana: Grafana | None


class Drift(_Strict):
    """What is done when a host is found not to be what the served commit says."""

    heal: bool


class Settings(_Strict):
    """One fleet's reconciler.

    Attributes:
        fleet: the folder of ``inventory/`` that names the fleet.
        state_dir: what the reconciler knows. Whoever deletes it opens the way back to old commits.
        rollout_seconds: after which a rollout is ended and taken back; longer than any good one.
        vault_password_file: what ansible-vault asks for, if the inventory has a vault.
        approval: set if each rollout waits for a person.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    fleet: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    repository: Repository
    signers: Signers
    protected: Protected
    windows: list[Window]
    approval: Approval | None
    drift: Drift
    tell: Tell
    state_dir: Path
    rollout_seconds: Seconds
    vault_password_file: Path | None


def load(path: Path) -> Settings:
    """Read the settings in ``path``.

    Raises:
        SettingsError: no such file, no YAML, or wrong keys, one line for each.
    """
    try:
        return parse(yaml.safe_load(path.read_text()), str(path))
    except OSError as error:
        said = f"{path}: cannot be read ({error.strerror}); playbooks/gitops.yml writes it"
        raise SettingsError(said) from None
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{path}: should be YAML: {' '.join(str(error).split())}") from None


def parse(value: object, where: str) -> Settings:
    """Return the settings in ``value``, of which an error says that they are in ``where``.

    Raises:
        SettingsError: wrong keys, one line for each.
    """
    try:
        return Settings.model_validate(value)
    except ValidationError as error:
        lines = [_sentence(where, dict(problem)) for problem in error.errors()]
        raise SettingsError("\n".join(dict.fromkeys(lines))) from None


def _sentence(file: str, problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    said = {
        "missing": "is missing; say null or [] where it does not apply",
        "extra_forbidden": "is not a key of these settings; is it misspelt?",
    }.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return f"{file}: {where}: {said}"
