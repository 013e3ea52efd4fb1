"""Filters of role `build`: naming a build and reading its `build.json`, both done in `seatrial`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from seatrial.build import BuildError, build_digest, kernels_files, read_build


class FilterModule:
    """What Ansible looks for in a filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """The filters by name."""
        return {
            "seatrial_build_digest": digest,
            "seatrial_kernels_files": files,
            "seatrial_build_json": description,
        }


def digest(inputs: dict[str, str]) -> str:
    """`{platform, python, root, lock, kernels}` -> the build's digest."""
    try:
        return build_digest(
            platform=inputs["platform"],
            python=inputs["python"],
            root=inputs["root"],
            lock=Path(inputs["lock"]),
            kernels=Path(inputs["kernels"]),
        )
    except BuildError as error:
        raise AnsibleFilterError(str(error)) from error


def files(kernels: str) -> list[str]:
    """The kernels' folder -> the files of it that make the wheel."""
    try:
        return kernels_files(Path(kernels))
    except BuildError as error:
        raise AnsibleFilterError(str(error)) from error


def description(text: str) -> dict[str, Any]:
    """The text of a `build.json` -> its content, refused when it is not of the schema."""
    try:
        return read_build(text).model_dump(by_alias=True)
    except BuildError as error:
        raise AnsibleFilterError(str(error)) from error
