"""Settings that would not do what whoever wrote them thinks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from seatrial.gitops import settings
from seatrial.gitops.settings import Forge, Grafana, Protected, Repository, SettingsError

TOKEN = "planted-77ab-token"


@pytest.mark.parametrize("who", [f"ann:{TOKEN}@", f"{TOKEN}@"])
def test_no_address_carries_a_secret(who: str) -> None:
    """A forge takes a token in place of a name, too; addresses are said in logs."""
    url, file = f"https://{who}git.example.org/o/n", Path("/token")
    for make in (
        lambda: Repository(url=url, branch="main", seconds=1, notes=True),
        lambda: Forge(kind="gitea", api=url, repository="o/n", token_file=file, context="x"),
        lambda: Grafana(url=url, token_file=file),
    ):
        with pytest.raises(ValidationError, match="should carry no password and no token"):
            make()
    ssh = "ssh://git@git.example.org/o/n"
    assert Repository(url=ssh, branch="main", seconds=1, notes=True).url == ssh


@pytest.mark.parametrize("path", ["/gates/", "./gates/", "roles/*"])
def test_what_would_protect_nothing_is_refused(path: str) -> None:
    """Git names files from the repository's root, and these are no patterns."""
    with pytest.raises(ValidationError, match="it would protect nothing"):
        Protected(paths=["ansible.cfg", path], approvers=[])


def test_a_date_that_is_none_is_no_traceback(tmp_path: Path) -> None:
    """PyYAML lets out what converting it raises."""
    path = tmp_path / "toy.yml"
    path.write_text("schema: 2026-99-99")
    with pytest.raises(SettingsError, match="should be YAML"):
        settings.load(path)
