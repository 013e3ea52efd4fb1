"""Write one line of the ledger; runs in the controller, so a phase costs no module start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from seatrial import ledger
from seatrial.errors import SeatrialError


class ActionModule(ActionBase):
    """``seatrial_ledger: path, rollout, event, [cell], [phase], [data]``."""

    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Append the line, unless this is a check run. Never counts as a change of a host."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, given = self.validate_argument_spec(
            {
                "path": {"type": "str", "required": True},
                "rollout": {"type": "str", "required": True},
                "event": {"type": "str", "required": True},
                "cell": {"type": "str", "default": ""},
                "phase": {"type": "str", "default": ""},
                "data": {"type": "dict", "default": {}},
            }
        )
        path = Path(given.pop("path")).expanduser()
        try:
            event = ledger.Event(time=ledger.now(), **given)
            if not self._task.check_mode:
                ledger.append(path, event)
        except (OSError, ValueError, SeatrialError) as error:
            said = f"{path}: the ledger line cannot be written: {error}"
            return {**result, "changed": False, "failed": True, "msg": said}
        return {**result, "changed": False}
