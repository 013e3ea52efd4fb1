"""Load the filters once in the process that a person starts, and not in each of its forks.

Ansible forks for every task on every host, and a fork that meets a filter loads all of them. Ours
bring the Seatrial library with them, which takes longer than most tasks: a run without this spends
most of its time importing.
"""

from __future__ import annotations

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

DOCUMENTATION = r"""
name: seatrial_once
type: aggregate
short_description: Load the filters once, before the first fork
description:
  - Says nothing; a run is quicker with it, and the same without.
author: Seatrial
"""


class CallbackModule(CallbackBase):
    """Does its work when it is made."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "seatrial_once"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        filter_loader.get("seatrial_spec")
        test_loader.get("file")
