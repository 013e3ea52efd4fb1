"""A control machine that cannot steer a rollout says so before anything is asked of a host."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from seatrial import controller

USER = pwd.getpwuid(os.geteuid())


def test_the_users_own_home_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a slash at its end."""
    monkeypatch.setenv("HOME", f"{USER.pw_dir}/")
    assert controller.check_home()


@pytest.mark.parametrize("home", ["elsewhere", ""])
def test_another_home_is_refused_with_the_command_that_mends_it(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible would start its jobs in one and look for them in the other."""
    monkeypatch.setenv("HOME", str(tmp_path / home) if home else "")
    with pytest.raises(controller.ControllerError, match=f"export HOME={USER.pw_dir}$"):
        controller.check_home()
