#!/usr/bin/python
"""Lay a release down as a folder: all of it, checked, or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: release_tree
short_description: Lay a release down as a read-only folder, all of it, checked, or nothing
description:
  - Writes the files into a temporary folder beside the destination, runs the checks on it, and
    renames it into place, so that a release is either whole or absent.
  - A release that is there already is compared file by file and link by link; what was edited or
    removed is put back. What was added stays, and the drift report names it.
options:
  path:
    description: The folder of the release.
    type: path
    required: true
  files:
    description: Content by relative path.
    type: dict
    required: true
  links:
    description: Targets of symbolic links by relative path.
    type: dict
    default: {}
  named_only:
    description:
      - By JSON file, keys that only say where the release came from; a difference in them is no
        change.
    type: dict
    default: {}
  checks:
    description:
      - Commands to run before the rename; C({}) at the start of a word is the temporary folder.
      - With C(silent), a command that writes to stderr refuses too.
    type: list
    elements: dict
    default: []
    suboptions:
      argv:
        description: The words of the command.
        type: list
        elements: str
        required: true
      silent:
        description: Whether a word on stderr refuses the release.
        type: bool
        default: false
author: Seatrial
"""

EXAMPLES = r"""
- name: Lay the release down
  release_tree:
    path: /opt/seatrial/releases/0123456789abcdef
    files: {units/sglang-prefill.service: "[Unit]..."}
    links: {build: ../../builds/fedcba9876543210}
    checks:
      - argv: [systemd-analyze, verify, "{}/units/sglang-prefill.service"]
        silent: true
"""

RETURN = r"""
edited:
  description: Files and links of a release that was there already and had been changed by hand.
  returned: always
  type: list
"""


def write(folder: Path, files: dict[str, str], links: dict[str, str]) -> None:
    """Fill the folder; files are for everybody to read and nobody to write."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o755)
        path.write_text(content)
        path.chmod(0o444)
    for name, target in links.items():
        (folder / name).symlink_to(target)
    folder.chmod(0o755)


def is_alike(before: str, after: str, keys: list[str]) -> bool:
    """Whether two JSON texts differ in no other keys than these."""
    if not keys:
        return False
    try:
        ours, theirs = ({**json.loads(text)} for text in (before, after))
    except (TypeError, ValueError):
        return False
    return {**ours, **dict.fromkeys(keys)} == {**theirs, **dict.fromkeys(keys)}


def replace(path: Path, content: str) -> None:
    """Put the right content back in one step."""
    fresh = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fresh.write_text(content)
        fresh.chmod(0o444)
        fresh.rename(path)
    except OSError:  # such as a full disk
        fresh.unlink(missing_ok=True)
        raise


def pointing(path: Path) -> str:
    """Return where a link points; nothing where there is none."""
    return str(path.readlink()) if path.is_symlink() else ""


def relink(path: Path, target: str) -> None:
    """Point a link to the right place in one step."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "links": {"type": "dict", "default": {}},
            "named_only": {"type": "dict", "default": {}},
            "checks": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "argv": {"type": "list", "elements": "str", "required": True},
                    "silent": {"type": "bool", "default": False},
                },
            },
        },
        supports_check_mode=True,
    )
    given = module.params
    target = Path(given["path"])
    if not module.check_mode:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two runs may stage the same release at once: the second one finds what the first laid
        # down. Held until this program ends.
        fcntl.flock(os.open(target.parent, os.O_RDONLY), fcntl.LOCK_EX)
    files = {name: str(content) for name, content in given["files"].items()}
    before = {
        name: (target / name).read_text(errors="replace") if (target / name).is_file() else ""
        for name in files
    }
    named_only = given["named_only"]
    edited = [
        name
        for name, content in files.items()
        if before[name] != content and not is_alike(before[name], content, named_only.get(name, []))
    ]
    diff = [
        {"before_header": name, "after_header": name, "before": before[name], "after": files[name]}
        for name in edited
    ]
    is_there = target.is_dir()
    astray = [name for name, link in given["links"].items() if pointing(target / name) != link]
    diff += [
        {
            "before_header": name,
            "after_header": name,
            "before": f"-> {pointing(target / name)}\n" if pointing(target / name) else "",
            "after": f"-> {given['links'][name]}\n",
        }
        for name in astray
    ]
    changed = sorted([*edited, *astray])
    if module.check_mode or not changed:
        module.exit_json(changed=bool(changed), edited=changed if is_there else [], diff=diff)
    if is_there:
        for name in edited:
            replace(target / name, files[name])
        for name in astray:
            relink(target / name, given["links"][name])
        module.exit_json(changed=True, edited=changed, diff=diff)

    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(fresh, files, given["links"])
        for check in given["checks"]:
            # At the start of a word: a program's own text may hold the two signs as well.
            words = [re.sub(r"^\{\}(?=/|$)", str(fresh), word) for word in check["argv"]]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode or (check["silent"] and done.stderr.strip()):
                said = (done.stdout.strip() or done.stderr.strip())[-3000:]
                module.fail_json(
                    msg=f"release {target.name} is refused, nothing was changed: {said}"
                )
        os.sync()
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    module.exit_json(changed=True, edited=[], diff=diff)


if __name__ == "__main__":
    main()
