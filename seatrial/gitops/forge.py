"""The status of a commit on its forge: GitHub, GitLab or Gitea."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import requests

from seatrial.gitops.secret import read_secret
from seatrial.gitops.settings import Forge
from seatrial.gitops.state import Announcement, Kind
from seatrial.gitops.web import SECONDS, TellError, session

DESCRIPTION_CHARACTERS = 140  # GitHub's bound, the least of the three

# What GitHub and Gitea call it, and what GitLab does; a kind that judges no commit is not here.
_STATES: Mapping[Kind, tuple[str, str]] = {
    "refused": ("failure", "failed"),
    "waiting": ("pending", "pending"),
    "began": ("pending", "running"),
    "resumed": ("pending", "running"),
    "promoted": ("success", "success"),
    "unchanged": ("success", "success"),
    "reverted": ("failure", "failed"),
    "failed": ("error", "failed"),
}


class Request(NamedTuple):
    """One call of a forge's API, without its token."""

    url: str
    body: dict[str, str]


def request(forge: Forge, told: Announcement, link: str) -> Request | None:
    """Return what sets the commit's status; nothing if the announcement is not about one."""
    if not told.commit or told.kind not in _STATES:
        return None
    plain, of_gitlab = _STATES[told.kind]
    body = {"state": plain, "context": forge.context, "description": shortened(told.sentence)}
    if link:
        body["target_url"] = link
    root = forge.api.rstrip("/")
    if forge.kind == "gitlab":
        project = quote(forge.repository, safe="")
        url = f"{root}/projects/{project}/statuses/{told.commit}"
        return Request(url, {**body, "state": of_gitlab})
    return Request(f"{root}/repos/{forge.repository}/statuses/{told.commit}", body)


def set_status(forge: Forge, told: Announcement, link: str) -> None:
    """Set the commit's status, if the announcement is about one.

    Raises:
        TellError: the forge cannot be reached, or says no.
    """
    wanted = request(forge, told, link)
    if wanted is None:
        return
    token = read_secret(forge.token_file)
    header = {
        "github": ("Authorization", f"Bearer {token}"),
        "gitea": ("Authorization", f"token {token}"),
        "gitlab": ("PRIVATE-TOKEN", token),
    }[forge.kind]
    with session() as http:
        http.headers.update([header])
        try:
            # No redirect is followed: the token is for this address alone.
            answer = http.post(wanted.url, json=wanted.body, timeout=SECONDS, allow_redirects=False)
        except requests.RequestException as error:
            raise TellError(f"{forge.api}: {type(error).__name__}") from None
    if not 200 <= answer.status_code < 300 and not _is_so_already(answer):
        raise TellError(
            f"{wanted.url} answered {answer.status_code}; it needs a token in {forge.token_file} "
            f"that may set commit statuses of {forge.repository}"
        )


def shortened(sentence: str) -> str:
    """Return the sentence, cut at a word where a forge would cut it or refuse it."""
    if len(sentence) <= DESCRIPTION_CHARACTERS:
        return sentence
    return sentence[: DESCRIPTION_CHARACTERS - 2].rsplit(" ", 1)[0] + " …"


def _is_so_already(answer: Any) -> bool:
    """Whether GitLab refuses only because the status is what it should become."""
    return answer.status_code == 400 and "Cannot transition status" in answer.text
