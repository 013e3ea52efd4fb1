"""Runs cases of the fault matrix on one fleet, which is booted once."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from rehearsal import run as rehearsal
from tests.faults import hosts, report
from tests.faults.cases import Case
from tests.faults.fleet import Fleet
from tests.faults.stage import LAST_GOOD, Stage


class Night:
    """A fleet, and how many cases it has been through."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.count = 0
        self.is_whole = False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def perform(self, case: Case) -> None:
        """Run a case.

        Raises:
            AssertionError: something is not as it must be; one sentence each.
        """
        if not self.is_whole:
            self.make_whole()
        self.count += 1
        folder = self.folder / case.name
        folder.mkdir()
        base = hosts.look()["gpu-a"].current
        head = self.fleet.git("rev-parse", "HEAD").strip()
        name = f"r{self.count}b{rehearsal.BERTH}"
        stage = Stage(
            self.fleet, case.name, folder, base, self.fleet.release_name(), name, {case.end}
        )
        self.is_whole = False
        report.forget(self.fleet.engine, case.name)
        stage.start_probe()
        try:
            problems = self._play(case, stage)
        finally:
            stage.stop_probe()
        # At once, for whoever watches a run of hours.
        (folder / "problems.txt").write_text("\n".join(problems))
        row = stage.row(case.fault, case.phase)
        assert not problems, f"{case.name}:\n" + "\n".join(problems)
        report.keep(row)
        if stage.end.endswith(LAST_GOOD):
            # Or the next case would take its own change back, and deploy this one's.
            self.fleet.git("reset", "-q", "--hard", head)
        self.is_whole = True

    def _play(self, case: Case, stage: Stage) -> list[str]:
        """Let a case happen and mend what it struck; return what is wrong afterwards."""
        problems = []
        try:
            case.run(stage)
        except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        for deploy in stage.deploys:
            if deploy.process.poll() is None:
                deploy.kill()
        while stage.undo:
            try:
                stage.mend()
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                problems.append(f"what was struck cannot be mended: {error}")
        return problems + stage.judge()

    def make_whole(self) -> None:
        """Mend whatever a case has left, by a deploy of the base, or else by a fresh fleet."""
        if self.count:
            for host in (*hosts.GPU_HOSTS, "edge", "control"):
                for verb in ("thaw", "poweron", "mend"):
                    with contextlib.suppress(AssertionError):
                        hosts.verb(verb, host)
            self.fleet.git("reset", "-q", "--hard")
            self.count += 1
            self.fleet.name_release(f"r{self.count}b{rehearsal.BERTH}")
            self.fleet.commit("Start again")
            again = self.fleet.play("deploy.yml", log=self.folder / f"again-{self.count}.log")
            if again.wait() == 0:
                self.is_whole = True
                return
        self.fleet.up(self.folder / f"up-{self.count}.log")
        self.is_whole = True
