"""Ask a GPU host's own program, over the connection itself: no module is copied and started.

A rollout asks some sixty times, and a module would cost more than the program does. A host that
does not answer is an answer here, so a rollout goes its own way with it and not Ansible's.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """``seatrial_host: argv`` leaves ``rc``, ``stderr``, ``is_reached`` and ``answer``.

    ``answer`` is the JSON object that the program printed, and ``stderr`` is empty; or ``rc`` is
    not 0, ``stderr`` says why, and ``answer`` is empty. ``rc`` is 255 where the host could not be
    reached, and 1 in a check run, which asks nothing. Never fails.
    """

    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the program, unless this is a check run; a change is what the program calls one."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, given = self.validate_argument_spec({"argv": {"type": "list", "required": True}})
        if self._task.check_mode:
            return {**result, **_result(1, "a check run does not ask the host"), "skipped": True}
        try:
            # With something to read; else ssh would make a terminal, where stderr is in stdout.
            ran = self._low_level_execute_command(
                shlex.join(map(str, given["argv"])), in_data=b"\n"
            )
        except AnsibleError as error:
            said = f"unreachable ({_last_words(str(error))})"
            return {**result, **_result(255, said), "is_reached": False}
        return {**result, **_told(ran["rc"], ran["stdout"], ran["stderr"])}


def _last_words(error: str) -> str:
    """Return what ssh said last: no route, no permission, another host's key."""
    line = error.strip().rpartition("\n")[2]
    return "without a word" if line.endswith(":") else line.rpartition(": ")[2].rstrip(".")


def _told(rc: int, stdout: str, stderr: str) -> dict[str, Any]:
    """Return what the program said, or why it said nothing; a login may have printed before it."""
    if rc:
        said = stderr[max(0, stderr.find("seatrial-host ")) :].strip()
        return _result(rc, said or "the host cannot run a program")
    try:
        answer = json.loads(stdout.strip().rpartition("\n")[2])
        changed = answer.get("changed", False)
    except (ValueError, AttributeError):
        return _result(1, f"no answer in JSON: {stdout[:200]!r}")
    return {**_result(0, ""), "answer": answer, "changed": changed}


def _result(rc: int, stderr: str) -> dict[str, Any]:
    # Without `failed`, Ansible would conclude it from `rc`.
    told = {"rc": rc, "stderr": stderr, "is_reached": True, "answer": {}}
    return {**told, "changed": False, "failed": False}
