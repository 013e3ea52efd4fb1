"""Keeps why tasks failed, a JSON line each, for whoever started the playbook. Nothing else is kept.

Ansible takes out what a task hides (``no_log``) before a callback sees it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

FILE_VARIABLE = "SEATRIAL_REASONS_FILE"


class CallbackModule(CallbackBase):
    """Writes to the file that the environment names."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "seatrial_reasons"
    CALLBACK_NEEDS_ENABLED = True

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keep what the task says."""
        if not ignore_errors:
            self._keep(result, is_silent=False)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Keep that the host does not answer."""
        self._keep(result, is_silent=True)

    @staticmethod
    def _keep(result: Any, *, is_silent: bool) -> None:
        found = result.result
        items = [one for one in found.get("results", []) if one.get("failed")]
        said = "; ".join(dict.fromkeys(str(one.get("msg", "")) for one in items or [found]))
        reason = {
            "host": result.host.get_name(),
            "task": result.task.get_name(),
            "is_silent": is_silent,
            "said": " ".join(said.split()),
        }
        with open(os.environ[FILE_VARIABLE], "a") as file:  # noqa: PTH123
            file.write(json.dumps(reason) + "\n")
