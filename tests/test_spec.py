"""The serving spec is checked whole before anything is touched, and says what to mend."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial import spec
from seatrial.spec import SpecError

REPOSITORY = Path(__file__).resolve().parents[1]
FLEETS = sorted(path.parent.name for path in REPOSITORY.glob("inventory/*/group_vars"))
BUILD = {
    "digest": "0123456789abcdef",
    "supported_index_topk": [512, 1024],
    "supported_index_key_dtypes": ["fp8_e4m3", "bf16", "fp32"],
    "patches": ["cpu_engine", "cpu_dsa", "pd_contract"],
}

Edit = Callable[[dict[str, Any]], object]


def file_of(fleet: str) -> Path:
    """Return the spec file of a fleet."""
    return REPOSITORY / "inventory" / fleet / "group_vars/all/serving_spec.yml"


@pytest.fixture
def plain() -> dict[str, Any]:
    """Return the rehearsal's spec in plain types, to be spoiled."""
    return deepcopy(yaml.safe_load(file_of("rehearsal").read_text())["serving_spec"])


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_specs_of_this_repository_are_right(fleet: str) -> None:
    """Both inventories pass their own check."""
    assert spec.load(file_of(fleet)).cells


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.update(indx_topk=1024), "indx_topk: should be absent"),
        (lambda s: s.update(index_topk=513), "index_topk: should be a multiple of 64, is 513"),
        (lambda s: s.update(index_topk="1024"), "index_topk: should be a valid integer, is '1024'"),
        (
            lambda s: s.update(mem_fraction_static=1.2),
            "mem_fraction_static: should be less than 1.0, is 1.2",
        ),
        (
            lambda s: s.update(index_key_dtype="fp16"),
            "index_key_dtype: should be one of 'fp8_e4m3'",
        ),
        (lambda s: s.pop("model"), "model: should be set"),
        (lambda s: s["model"].update(path="models/x"), "model.path: should be text matching"),
        (
            lambda s: s["roles"]["prefill"]["args"].update({"api-key": "x"}),
            "roles.prefill.args: should be without 'api-key'",
        ),
        (
            lambda s: s["roles"]["decode"]["args"].update({"json-model-override-args": "{}"}),
            "without 'json-model-override-args' (the spec says it in index_topk and index_key_dty",
        ),
        (
            lambda s: s["roles"]["decode"]["args"].update({"tp-size": 2}),
            "without 'tp-size' (SGLang reads it as 'tensor-parallel-size': use that name)",
        ),
        (
            lambda s: s["roles"]["combined"]["args"].update({"model": "/other"}),
            "without 'model' (SGLang reads it as 'model-path': use that name)",
        ),
        (
            lambda s: s["roles"]["combined"]["args"].update(config="/etc/more.yml"),
            "without 'config' (a file of arguments on the host is in no commit)",
        ),
        (
            lambda s: s["roles"]["router"]["env"].update(HF_TOKEN="x"),
            "roles.router.env: should be without 'HF_TOKEN'",
        ),
        (
            lambda s: s["roles"]["prefill"]["args"].update({"device": None}),
            "roles.prefill.args.device: should be text, a number, true or false",
        ),
        (
            lambda s: s["roles"]["decode"].update(
                args={**s["roles"]["decode"]["args"], "page-size": 64}
            ),
            "roles.decode.args.page-size: should be absent as in roles.prefill.args",
        ),
        (
            lambda s: s["cells"]["one"].update(combined=["gpu-a"]),
            "cells.one: should have prefill and decode, or combined, not both",
        ),
        (
            lambda s: s["cells"]["two"].update(combined=[]),
            "cells.two: should have prefill and decode, or combined",
        ),
        (
            lambda s: s["cells"]["two"].update(router="gpu-a"),
            "cells: should name the host gpu-a in one cell, name it in 2",
        ),
        (lambda s: s["roles"].pop("combined"), "roles.combined: should be set, because cells.two"),
        (
            lambda s: s["roles"]["router"].update(port=30000),
            "roles.router.port: should differ from roles.prefill.port on the host gpu-a",
        ),
        (
            lambda s: s["rollout"].update(dead_man_seconds=10),
            "rollout.dead_man_seconds: should be at least",
        ),
        (
            lambda s: s.update(context_length=2048),
            "index_topk: should be at most context_length / 4 = 512",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(
    plain: dict[str, Any], edit: Edit, message: str
) -> None:
    """One spoilt value, one line that names its path."""
    edit(plain)
    with pytest.raises(SpecError) as error:
        spec.check(plain)
    assert message in str(error.value)


def test_all_problems_are_told_at_once(plain: dict[str, Any]) -> None:
    """Nobody wants to mend a spec one run at a time."""
    plain.update(index_topk=513, mem_fraction_static=1.2, typo=1)
    with pytest.raises(SpecError) as error:
        spec.check(plain)
    assert len(str(error.value).splitlines()) == 3


def test_two_servers_cannot_share_a_gpu(plain: dict[str, Any]) -> None:
    """Each role of a host has its own GPUs."""
    plain["cells"]["one"] = {"prefill": ["gpu-a"], "decode": ["gpu-a"], "router": "gpu-a"}
    plain["roles"]["prefill"]["gpus"] = [0, 1]
    plain["roles"]["decode"]["gpus"] = [1, 2]
    with pytest.raises(SpecError, match=r"should leave GPU 1 of gpu-a to roles\.prefill"):
        spec.check(plain)


def test_cells_and_inventory_name_the_same_hosts(plain: dict[str, Any]) -> None:
    """A host missing on either side is named."""
    found = spec.check(plain)
    spec.check_hosts(found, ["gpu-a", "gpu-b", "gpu-c"])
    with pytest.raises(SpecError, match="which lacks gpu-c"):
        spec.check_hosts(found, ["gpu-a", "gpu-b"])
    with pytest.raises(SpecError, match="should name the host gpu-d"):
        spec.check_hosts(found, ["gpu-a", "gpu-b", "gpu-c", "gpu-d"])


def test_what_the_build_does_not_support_is_refused(plain: dict[str, Any]) -> None:
    """The message names what it does support."""
    plain["index_topk"] = 4096
    with pytest.raises(SpecError, match="index_topk: should be one of 512, 1024"):
        spec.check_against_build(spec.check(plain), BUILD)


def test_a_value_without_its_patch_is_refused(plain: dict[str, Any]) -> None:
    """The build says which patch a value needs, and which patches it has."""
    build = BUILD | {
        "patches": ["wide_index_topk", "index_keys_bf16"],
        "supported_index_topk": [512, 1024, 2048],
        "supported_index_key_dtypes": ["fp8_e4m3", "bf16"],
        "patches_needed": {
            "index_topk": {"wide_index_topk": [2048]},
            "index_key_dtype": {"index_keys_bf16": ["bf16"]},
        },
    }
    plain["engine"]["patches"] = []
    plain["index_topk"], plain["index_key_dtype"] = 1024, "fp8_e4m3"
    spec.check_against_build(spec.check(plain), build)
    plain["index_topk"], plain["index_key_dtype"] = 2048, "bf16"
    with pytest.raises(SpecError) as refused:
        spec.check_against_build(spec.check(plain), build)
    assert str(refused.value).splitlines() == [
        f"engine.patches: should have {patch}, without which build {build['digest']} does not "
        f"support {value}"
        for patch, value in (
            ("wide_index_topk", "index_topk 2048"),
            ("index_keys_bf16", "index_key_dtype bf16"),
        )
    ]
    plain["engine"]["patches"] = ["index_keys_bf16", "wide_index_topk"]
    spec.check_against_build(spec.check(plain), build)


def test_a_patch_that_the_build_does_not_have_is_refused_by_name(plain: dict[str, Any]) -> None:
    """SGLang itself would pass over a name that it does not find."""
    plain["engine"]["patches"] = ["topkk"]
    with pytest.raises(SpecError, match=r"engine.patches: should be among .*, is topkk"):
        spec.check_against_build(spec.check(plain), BUILD)


def test_a_context_beyond_the_models_is_refused(plain: dict[str, Any]) -> None:
    """The model's own config is the limit."""
    with pytest.raises(SpecError, match="context_length: should be at most 8192"):
        spec.check_against_model(spec.check(plain), {"max_position_embeddings": 8192})


def test_batches_are_whole_cells_canary_first(plain: dict[str, Any]) -> None:
    """The last batch size repeats until no cell is left."""
    plain["cells"] = {f"c{i}": {"combined": [f"h{i}"], "router": f"h{i}"} for i in range(5)}
    plain["rollout"]["batches"] = [1, 2]
    found = spec.batches(spec.check(plain))
    assert [batch.cells for batch in found] == [["c0"], ["c1", "c2"], ["c3", "c4"]]


def test_a_batch_may_be_a_share_of_the_cells(plain: dict[str, Any]) -> None:
    """Rounded down, and at least one cell."""
    plain["cells"] = {f"c{i}": {"combined": [f"h{i}"], "router": f"h{i}"} for i in range(9)}
    plain["rollout"]["batches"] = [1, "5%", "50%"]
    found = spec.batches(spec.check(plain))
    assert [len(batch.cells) for batch in found] == [1, 1, 4, 3]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "0%", "101%", "half", "%", "5 %"])
def test_a_batch_of_another_kind_is_refused(plain: dict[str, Any], size: object) -> None:
    """Nobody could say how many cells it is."""
    plain["rollout"]["batches"] = [1, size]
    said = f"rollout.batches: should be numbers from 1 and shares such as 25%, is {size!r}"
    with pytest.raises(SpecError, match=re.escape(said)):
        spec.check(plain)


def test_a_fleet_lock_lasts_as_long_as_its_rollout_may(plain: dict[str, Any]) -> None:
    """Every launch of every batch in its dead man's time, and one more for the way back."""
    plain["gates"]["cold_launches"] = 0
    once = spec.lease_seconds(spec.check(plain))
    batches = len(spec.batches(spec.check(plain)))
    plain["gates"]["cold_launches"] = 2
    assert spec.lease_seconds(spec.check(plain)) * (batches + 1) == once * (3 * batches + 1)


def test_only_what_lands_on_hosts_changes_the_digest(plain: dict[str, Any]) -> None:
    """Other batches or gates make no new release; another index_topk does."""
    before = spec.check(plain).sha256()
    plain["rollout"]["batches"] = [2]
    plain["gates"]["select"] = ["identity"]
    plain["timeouts"]["gate_seconds"] = 601
    assert spec.check(plain).sha256() == before
    plain["index_topk"] = 512
    assert spec.check(plain).sha256() != before


@pytest.mark.parametrize("text", ["", "other: 1", "serving_spec: [", "serving_spec: {}"])
def test_a_file_that_is_no_spec_is_named(tmp_path: Path, text: str) -> None:
    """The path stands in the message, or the missing keys do."""
    path = tmp_path / "serving_spec.yml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"serving_spec|should be set"):
        spec.load(path)
