"""Ask a GPU host's own program, over the connection itself: no module is copied and started.

A rollout asks some sixty times, and a module would cost four times what the program does. A host
that does not answer is an answer here, so a rollout goes its own way with it and not Ansible's.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """``seatrial_host: argv`` leaves ``rc``, ``stderr``, ``is_reached`` and ``answer``.

    ``answer`` is the JSON object that the program printed, or empty unless ``rc`` is 0. ``stderr``
    is one sentence when it is not. ``rc`` is 255 where the host could not be reached. Never fails.
    """

    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the program, unless this is a check run; a change is what the program calls one."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, given = self.validate_argument_spec({"argv": {"type": "list", "required": True}})
        if self._task.check_mode:
            return {**result, "skipped": True, "msg": "a check run asks nothing of the host"}
        try:
            # With something to read; else ssh would make a terminal, where stderr is in stdout.
            ran = self._low_level_execute_command(
                shlex.join(map(str, given["argv"])), in_data=b"\n"
            )
        except AnsibleConnectionFailure as error:
            # What ssh said last: no route, no permission, another host's key.
            why = str(error).strip().rpartition("\n")[2].rpartition(": ")[2].rstrip(".")
            return {**result, **_said(255, f"unreachable ({why})"), "is_reached": False}
        return {**result, **_answered(ran["rc"], ran["stdout"], ran["stderr"])}


def _answered(rc: int, stdout: str, stderr: str) -> dict[str, Any]:
    """Return what the program said, or why it said nothing."""
    if rc:
        return _said(rc, stderr.strip() or "the host cannot run a program")
    try:
        answer = json.loads(stdout)
    except ValueError:
        return _said(1, f"no answer in JSON: {stdout[:200]!r}")
    return {**_said(0, stderr.strip()), "answer": answer, "changed": answer.get("changed", False)}


def _said(rc: int, stderr: str) -> dict[str, Any]:
    # Without `failed`, Ansible would conclude it from `rc`.
    told = {"rc": rc, "stderr": stderr, "is_reached": True, "answer": {}}
    return {**told, "changed": False, "failed": False}
