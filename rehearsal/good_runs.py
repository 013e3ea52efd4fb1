"""Run the gates over and over on one good engine, with fresh prompts, and count the alarms.

    python rehearsal/good_runs.py --python BUILD/bin/python --model MODEL_DIR --runs 20

Starts one real SGLang with the rehearsal's settings and judges it by groups that a URL alone can
answer. Every run that does not pass is an alarm, since nothing is wrong; its report stays in
``--reports``. Exit status 0 only if there was none.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from rehearsal.recall_table import URL, Row, server

# All of a group's gates, and without Prometheus, a host or last_good.
SELECT = "readiness,window,recall,liveness,answers"


def main() -> int:
    """Print a line for each run, and at the end what so many runs without an alarm say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="interpreter of a CPU build")
    parser.add_argument("--model", type=Path, required=True, help="folder made by model.py")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these")
    parser.add_argument("--select", default=SELECT)
    parser.add_argument("--reports", type=Path, default=Path("good-runs"))
    options = parser.parse_args()
    done = alarms = 0
    with server(options.python, options.model, Row("fp8_e4m3", 1024, ()), ["--enable-metrics"]):
        begun = time.monotonic()
        for seed in range(options.seed, options.seed + options.runs):
            if time.monotonic() - begun > options.seconds:
                break
            folder = options.reports.resolve() / str(seed)
            status = _judge(folder, seed, options.select)
            report = json.loads((folder / "report.json").read_text())
            done, alarms = done + 1, alarms + (status != 0)
            print(f"{seed}: {report['verdict']}, {report['seconds']:.0f} s. {report['next']}")
            sys.stdout.flush()
    bound = ""
    if done > 3 and not alarms:
        bound = f"; fewer than {3 / done:.1%} alarms, with 95 % confidence"
    print(f"{done} runs of {options.select}: {alarms} alarms{bound}")
    return 1 if alarms or not done else 0


def _judge(folder: Path, seed: int, select: str) -> int:
    command = [sys.executable, "-m", "pytest", "gates/", "--url", URL, "--select", select]
    command += ["--thresholds", "rehearsal", "--seed", str(seed), "--report-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
