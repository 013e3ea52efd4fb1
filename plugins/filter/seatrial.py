"""Filters that let playbooks ask the Seatrial library; the logic is in ``seatrial/``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# The library of the same checkout, not one that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from seatrial import (
    baseline,
    controller,
    fleet_lock,
    host_program,
    ledger,
    memory,
    release,
    spec,
    thresholds,
)
from seatrial.errors import SeatrialError
from seatrial.inventory_check import unknown_variables
from seatrial.plain import plain


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function plain values; make an error of ours the sentence that Ansible prints."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(
                *(plain(value) for value in args),
                **{name: plain(value) for name, value in kwargs.items()},
            )
        except SeatrialError as error:
            raise AnsibleFilterError(str(error)) from None

    return wrapper


def check(value: Any, path: str, gpu_hosts: list[str]) -> dict[str, Any]:
    """Return the checked spec in plain types; it must be what the inventory's file says."""
    found = spec.check(value)
    if found != spec.load(Path(path)):
        raise spec.SpecError(
            f"serving_spec: should come from {path} alone; take it out of the command line (-e) "
            "and of other inventory files: what runs is what a commit says"
        )
    spec.check_hosts(found, list(gpu_hosts))
    return found.model_dump(by_alias=True, mode="json")


def check_inventory(inventory: str, roles: str) -> bool:
    """Return true if the inventory knows only variables that somebody reads."""
    problems = unknown_variables(Path(inventory), Path(roles))
    if problems:
        raise spec.SpecError("\n".join(problems))
    return True


def digest(value: Any, build: str, addresses: dict[str, str], repository: str) -> str:
    """Return the release's name."""
    sources = [
        *Path(repository, "templates").glob("sglang*.j2"),
        Path(repository, "roles/release/vars/main.yml"),
    ]
    return release.release_digest(spec.check(value), build, addresses, sources)


def plan(value: Any, build: Any, config: Any) -> dict[str, Any]:
    """Check the spec against the build and the model, and return the memory plan that fits."""
    found = spec.check(value)
    spec.check_against_build(found, build)
    spec.check_against_model(found, config)
    return memory.plan(found, config, build).model_dump(mode="json")


def batches(value: Any) -> list[dict[str, list[str]]]:
    """Return the rollout's batches: cells and hosts."""
    return [batch._asdict() for batch in spec.batches(spec.check(value))]


def cell_facts(value: Any, host: str) -> dict[str, Any]:
    """Return what a host must know of its place: cell, roles, units, who leads."""
    found = spec.check(value)
    name = found.cell_of(host)
    roles = found.cells[name].roles_of(host)
    return {
        "name": name,
        "roles": roles,
        "units": [release.UNITS[role] for role in roles],
        "hosts": found.cells[name].hosts(),
        "is_leader": found.cells[name].hosts()[0] == host,
        "gpus": [gpu for role in roles for gpu in getattr(found.server(role), "gpus", [])],
        "ports": [
            port
            for role in roles
            for key in ("port", "bootstrap_port", "metrics_port")
            if (port := getattr(found.server(role), key, None))
        ],
    }


def moves(
    value: Any, wanted: str, status: dict[str, Any], serving: Collection[str]
) -> dict[str, Any]:
    """Return the hosts that have to move, batch by batch, and the cells they make.

    A cell is left alone when each of its hosts runs the wanted release, as it was released,
    confirmed and promoted. Cells that do not serve come first: nobody misses them, and while they
    are down no serving one may be drained.
    """
    found = spec.check(value)
    moving = [
        [cell for cell in batch.cells if not _is_settled(found.cells[cell], wanted, status)]
        for batch in spec.batches(found)
    ]
    down = [[cell for cell in batch if cell not in serving] for batch in moving]
    up = [[cell for cell in batch if cell in serving] for batch in moving]
    ordered = [batch for batch in down + up if batch]
    hosts = [[host for cell in batch for host in found.cells[cell].hosts()] for batch in ordered]
    return {
        "cells": [cell for batch in ordered for cell in batch],
        "hosts": [host for batch in hosts for host in batch],
        "sizes": [len(batch) for batch in hosts],
    }


def _is_settled(cell: spec.Cell, wanted: str, status: dict[str, Any]) -> bool:
    hosts = [status[host] for host in cell.hosts()]
    return all(
        host["current"] == host["last_good"] == wanted
        and host["active"]
        and not host["pending"]
        and not host["drift"]
        for host in hosts
    )


def split(value: Any, status: dict[str, Any]) -> str:
    """Say how the fleet disagrees with itself, as a rollout leaves it that died; or nothing."""
    found = spec.check(value)
    running = {host: one["current"] or "nothing" for host, one in status.items()}
    undecided = [host for host, one in status.items() if one["pending"]]
    good = {host: one["last_good"] or "nothing" for host, one in status.items()}
    if len(set(running.values())) == 1 and len(set(good.values())) == 1 and not undecided:
        return ""
    said = []
    for name, cell in found.cells.items():
        releases = {running[host] for host in cell.hosts()}
        if len(releases) == 1:
            said.append(f"cell {name} runs {releases.pop()}")
        else:
            said += [f"{host} of cell {name} runs {running[host]}" for host in cell.hosts()]
    said += [f"undecided on {', '.join(undecided)}"] if undecided else []
    if len(set(good.values())) > 1:
        said += [f"last_good is {one} on {host}" for host, one in good.items()]
    return "split: " + ", ".join(said)


def lock_request(value: Any, commit: str) -> dict[str, Any]:
    """Return the record with which this run asks for the fleet lock."""
    return fleet_lock.request(commit, spec.lease_seconds(spec.check(value)))


def cell_file(
    value: Any,
    host: str,
    *,
    releases: dict[str, Any],
    addresses: dict[str, str],
    select: list[str],
    plan: Any,
    prometheus_url: str,
    ssh_config: str,
) -> dict[str, Any]:
    """Return the content of the cell file for the cell of ``host``."""
    found = spec.check(value)
    name = found.cell_of(host)
    members = found.cells[name]
    merged = _merged(releases)
    judged = as_released(found.model_dump(by_alias=True, mode="json"), releases)
    # What runs says who serves what and where: what was reverted to may have other roles and ports.
    servers = [
        {
            "role": role,
            "host": member,
            "address": addresses[member],
            "url": f"http://{addresses[member]}:{server['port']}",
            "unit": release.UNITS[role],
        }
        for member in members.hosts()
        for role, server in releases[member].get("servers", {}).items()
    ]
    peers = [
        {
            "name": other,
            "router_url": router_url(value, other, addresses),
            "engine_urls": [
                f"http://{addresses[host]}:{found.server(role).port}"
                for host in cell.hosts()
                for role in cell.roles_of(host)
                if role != "router"
            ],
            "is_combined": bool(cell.combined),
        }
        for other, cell in found.cells.items()
        if other != name and all(host in addresses for host in cell.hosts())
    ]
    judged["gates"]["select"] = list(select)
    return {
        "schema": 1,
        "name": name,
        "router_url": next(
            (server["url"] for server in servers if server["role"] == "router"),
            router_url(value, name, addresses),
        ),
        "servers": servers,
        "prometheus_url": prometheus_url,
        "release": merged,
        "spec": judged,
        "plan": plan,
        "thresholds": found.gates.thresholds,
        "ssh_config": ssh_config or None,
        "peers": peers,
    }


def last_good_baseline(ledger_file: str, cell: str, last_good: str) -> dict[str, Any] | None:
    """Return what the gates found on the last good release, by this cell's newest passed run."""
    found = baseline.of_ledger(ledger.read(Path(ledger_file)), cell, last_good)
    return found.model_dump(mode="json") if found else None


def check_gates(value: dict[str, Any], folder: str) -> bool:
    """See that the gates which the spec selects can judge by the thresholds that it names."""
    wanted = spec.check(value).gates
    thresholds.check_choice(Path(folder), wanted.thresholds, wanted.select)
    return True


def problems(hosts: list[Any], fact: str) -> str:
    """Say for which hosts the fact is not true, and why as far as they know."""
    return (
        "; ".join(
            f"{host['inventory_hostname']}: {host.get('cell_problem') or 'no answer'}"
            for host in hosts
            if not host.get(fact)
        )
        or "nothing"
    )


def _merged(releases: dict[str, Any]) -> dict[str, Any]:
    """Return the release.json of a cell: what its hosts say, with the servers of all of them."""
    merged = dict(next(iter(releases.values())))
    for key in ("servers", "units"):
        merged[key] = {k: v for one in releases.values() for k, v in one.get(key, {}).items()}
    return merged


def as_released(value: dict[str, Any], releases: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with what the running release says: a revert runs by the spec before."""
    running = _merged(releases)
    if not running.get("servers"):
        return value
    roles = {
        role: {**server, "port": running["servers"].get(role, server)["port"]} if server else server
        for role, server in value["roles"].items()
    }
    said = {key: running[key] for key in ("index_topk", "index_key_dtype")}
    return {**value, **said, "roles": roles, "gates": dict(value["gates"])}


def router_url(value: Any, cell: str, addresses: dict[str, str]) -> str:
    """Return where the cell's router answers."""
    found = spec.check(value)
    return f"http://{addresses[found.cells[cell].router]}:{found.roles.router.port}"


def release_json(files: Any, value: Any, **facts: Any) -> str:
    """Return the text of release.json for one host's rendered files."""
    return release.describe(spec.check(value), files, **facts)


def rollout_summary(path: str, rollout: str) -> str:
    """Return the human summary of a rollout."""
    return ledger.summary(ledger.read(Path(path), rollout))


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by the names that playbooks use."""
        return {
            "seatrial_check": _told(check),
            "seatrial_spec": _told(
                lambda value: spec.check(value).model_dump(by_alias=True, mode="json")
            ),
            "seatrial_check_gates": _told(check_gates),
            "seatrial_check_home": _told(lambda _: controller.check_home()),
            "seatrial_check_inventory": _told(check_inventory),
            "seatrial_commit": _told(lambda path: release.commit_of(Path(path))),
            "seatrial_release_digest": _told(digest),
            "seatrial_plan": _told(plan),
            "seatrial_override": _told(lambda value: spec.check(value).override()),
            "seatrial_batches": _told(batches),
            "seatrial_cell": _told(cell_facts),
            "seatrial_moves": _told(moves),
            "seatrial_split": _told(split),
            "seatrial_lock_request": _told(lock_request),
            "seatrial_lock_argument": _told(fleet_lock.as_argument),
            "seatrial_lock_is_dead": _told(fleet_lock.is_dead),
            "seatrial_lock_sentence": _told(fleet_lock.sentence),
            "seatrial_program": _told(lambda folder: host_program.digest(Path(folder))),
            "seatrial_unfinished": _told(lambda path: ledger.unfinished(ledger.read(Path(path)))),
            "seatrial_journal_after": _told(
                lambda path, host: ledger.lines_of(ledger.read(Path(path)), host)
            ),
            "seatrial_cell_file": _told(cell_file),
            "seatrial_baseline": _told(last_good_baseline),
            # Without unwrapping: a host's variables are many, and lazy for a reason.
            "seatrial_problems": problems,
            "seatrial_as_released": _told(as_released),
            "seatrial_router_url": _told(router_url),
            "seatrial_changes": _told(release.changes),
            "seatrial_flags": _told(release.flag_words),
            "seatrial_quote": _told(release.systemd_quote),
            "seatrial_release_json": _told(release_json),
            "seatrial_summary": _told(rollout_summary),
        }
