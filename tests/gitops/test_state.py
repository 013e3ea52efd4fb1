"""What the reconciler keeps on disk, also on a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.gitops import clock, state
from seatrial.gitops.lock import HeldError, Lock
from seatrial.gitops.state import Attempt, Order, State, StateError, Status

COMMIT, OTHER = "a" * 40, "b" * 40


def attempt(commit: str = COMMIT, status: Status = Status.PROMOTED) -> Attempt:
    """Return an attempt."""
    return Attempt(commit=commit, status=status, since=state.now())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """And a folder without a state is a fleet that nothing is known of."""
    assert state.load(tmp_path, "toy") == State(fleet="toy")
    known = State(fleet="toy", serves=COMMIT, attempts=[attempt()])
    state.save(tmp_path, known)
    assert state.load(tmp_path, "toy") == known


def test_a_state_that_cannot_be_read_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """An empty state would open the way back to any old commit."""
    state.save(tmp_path, State(fleet="toy", serves=COMMIT))
    path = tmp_path / state.FILE
    path.write_text(path.read_text()[:20])
    with pytest.raises(StateError, match=r"state\.json: cannot be read as state"):
        state.load(tmp_path, "toy")


def test_the_state_of_another_fleet_is_refused(tmp_path: Path) -> None:
    """Two settings files with one folder."""
    state.save(tmp_path, State(fleet="other"))
    with pytest.raises(StateError, match="is the state of fleet other, not of toy"):
        state.load(tmp_path, "toy")


def test_old_attempts_are_forgotten(tmp_path: Path) -> None:
    """The newest are kept."""
    many = [attempt(f"{number:040x}") for number in range(state.KEPT + 5)]
    state.save(tmp_path, State(fleet="toy", attempts=many))
    assert state.load(tmp_path, "toy").attempts == many[5:]


def test_orders_stand_until_they_are_withdrawn(tmp_path: Path) -> None:
    """One of a kind for each commit; the oldest first."""
    for kind, commit in (("pause", ""), ("retry", COMMIT), ("approve", OTHER)):
        made = {"kind": kind, "commit": commit, "who": "olga", "time": state.now()}
        state.give(tmp_path, Order.model_validate(made))
    assert [one.kind for one in state.orders(tmp_path)] == ["pause", "retry", "approve"]
    assert state.withdraw(tmp_path, "retry", COMMIT)
    assert not state.withdraw(tmp_path, "retry", COMMIT)
    assert [one.kind for one in state.orders(tmp_path)] == ["pause", "approve"]


def test_a_file_that_is_no_order_is_named(tmp_path: Path) -> None:
    """A torn one cannot come from here: each is written whole."""
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders/pause.json").write_text("{}")
    with pytest.raises(StateError, match=r"pause\.json: is no order .*remove it"):
        state.orders(tmp_path)


def on_a_small_disk(folder: Path, program: str) -> str:
    """Run Python with ``folder`` on a disk of 64 KiB that is full, and return what it prints."""
    fill = f"head -c 1M /dev/zero > {folder}/ballast 2>/dev/null || true; "
    mount = f"mount -t tmpfs -o size=64k tmpfs {folder} && {{ {program}; }}"
    words = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    done = subprocess.run(
        [*words, mount.replace("FILL", fill)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str) -> str:
    """Return a shell command that runs code."""
    return f"{sys.executable} -c '{code}'"


def test_on_a_full_disk_the_old_state_stays(tmp_path: Path) -> None:
    """The new one is not there, nor half of it."""
    code = f"""
from pathlib import Path
from seatrial.gitops import disk
path = Path("{tmp_path}/x")
try:
    disk.write(path, "WORD" * 10000)
except OSError as error:
    print(error.strerror)
print(sorted(one.name for one in path.parent.iterdir()), path.stat().st_size)
"""
    said = on_a_small_disk(tmp_path, f"printf old > {tmp_path}/x; FILL {python(code)}")
    assert said == "No space left on device\n['ballast', 'x'] 3\n"


def test_on_a_full_disk_what_was_told_is_remembered(tmp_path: Path) -> None:
    """In the lock file, whose one block is there; so it is told once."""
    take = f"""
from pathlib import Path
from seatrial.gitops.lock import Lock
with Lock(Path("{tmp_path}"), "toy") as lock:
    print(lock.remembered.get("disk"))
    lock.remember("disk", "full")
"""
    empty = f"""
from pathlib import Path
from seatrial.gitops.lock import Lock
with Lock(Path("{tmp_path}"), "toy"):
    pass
"""
    both = f"{python(take)}; {python(take)}"
    assert on_a_small_disk(tmp_path, f"{python(empty)}; FILL {both}") == "None\nfull\n"


def test_a_second_lock_says_who_has_the_first(tmp_path: Path) -> None:
    """And is to be had when the first is given back."""
    with Lock(tmp_path, "toy") as lock:
        lock.say("running deploy.yml of abc")
        with pytest.raises(HeldError, match=rf"reconciler {os.getpid()} on .*, running deploy"):
            Lock(tmp_path, "toy").__enter__()
    with Lock(tmp_path, "toy"):
        pass


STEADY = clock.Reading("boot", 1_000_000.0, 1000.0)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (clock.Reading("boot", 1_000_100.0, 1100.0), ""),
        (clock.Reading("boot", 1_000_299.0, 1000.0), ""),
        (clock.Reading("boot", 1_003_600.0, 1000.0), "jumped by +3600 s"),
        (clock.Reading("boot", 996_400.0, 1000.0), "jumped by -3600 s"),
        (clock.Reading("next", 1_900_000.0, 5.0), ""),
        (clock.Reading("next", 900_000.0, 5.0), "jumped by -100000 s"),
    ],
    ids=["steady", "set a little", "on", "back", "reboot", "reboot and back"],
)
def test_a_clock_that_jumped_is_found(found: clock.Reading, why: str) -> None:
    """How long a machine was off nobody can tell; that time went back, everybody."""
    known, _ = clock.look(None, STEADY)
    assert why in clock.look(known, found)[1]
    assert bool(why) == bool(clock.look(known, found)[1])


def test_a_jump_is_accepted_when_it_has_stood_for_a_while_and_forgotten_when_it_is_over() -> None:
    """The clock may have been wrong before, too."""
    known, _ = clock.look(None, STEADY)
    held, why = clock.look(known, clock.Reading("boot", 1_003_600.0, 1000.0))
    assert why
    later = clock.Reading("boot", 1_003_600.0 + 599, 1599.0)
    held, why = clock.look(held, later)
    assert why
    assert clock.look(held, clock.Reading("boot", 1_003_600.0 + 600, 1600.0))[1] == ""
    assert clock.look(held, clock.Reading("boot", 1_000_600.0, 1600.0))[1] == ""


def test_the_clocks_of_this_machine_can_be_read() -> None:
    """And go alike."""
    known, _ = clock.look(None, clock.read())
    assert clock.look(known, clock.read())[1] == ""
