"""Measure how the rehearsal model's recall depends on length, index_topk and index_key_dtype.

    python rehearsal/recall_table.py --python BUILD/bin/python --model MODEL_DIR

Starts a real SGLang for every row of the table, asks it for fresh needles in fresh haystacks, and
prints the table of docs/rehearsal-model.md. The lengths are the server's own ``prompt_tokens``.
What it shows is a simulation, tuned on purpose: it says nothing about any production model.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from seatrial import haystack

PORT = 31990
URL = f"http://127.0.0.1:{PORT}"
READY_SECONDS = 300
ANSWER_SECONDS = 300
# The engine's arguments that the rehearsal inventory uses, without P/D.
ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "cpu_dsa"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "40960"),
    *("--context-length", "32768", "--chunked-prefill-size", "32768"),
    *("--max-prefill-tokens", "32768"),
]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "cpu_engine,cpu_dsa"}


@dataclass(frozen=True)
class Row:
    """One server: an index-key dtype, a top-k, and the (case, tokens) that it is asked at."""

    dtype: str
    topk: int
    cells: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Return what selects this row on the command line."""
        return f"{self.dtype}/{self.topk}"


# Where the needle stands: A and D at the start of the prompt, B in its last tokens, C eight times.
LAYOUTS = {
    "A": haystack.START,
    "B": haystack.END,
    "C": haystack.spread(8),
    "D": haystack.START,
}
ROWS = (
    Row(
        "fp8_e4m3",
        512,
        (("D", 900), ("A", 2000), ("A", 4000), ("A", 5200), ("A", 5500), ("B", 5200), ("C", 5200)),
    ),
    Row("fp8_e4m3", 1024, (("D", 900), ("A", 5200), ("A", 5500), ("A", 6500), ("A", 8000))),
    Row("bf16", 512, (("A", 5200), ("A", 8000))),
    Row("bf16", 1024, (("A", 8000), ("A", 16000))),
)


def fresh_secret(draw: random.Random) -> str:
    """Return a code of the field needle's shape, as ZEBRA-4492-OMEGA."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    first, last = ("".join(draw.choices(letters, k=5)) for _ in range(2))
    return f"{first}-{draw.randrange(10000):04d}-{last}"


def ask(text: str) -> tuple[str, int]:
    """Return the server's answer to one chat message and its count of the prompt's tokens."""
    body = {
        "model": "rehearsal",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return str(answer["choices"][0]["message"]["content"]), int(answer["usage"]["prompt_tokens"])


class Cell:
    """One cell of the table: needles found of needles asked, and the lengths that were counted."""

    def __init__(self) -> None:
        self.found = self.asked = 0
        self.tokens: list[int] = []

    def measure(self, tokens: int, layout: haystack.Layout, needles: int, seed: int) -> "Cell":
        """Ask for ``needles`` fresh secrets in fresh prose of about ``tokens`` tokens."""
        characters_per_token = 5.55
        for number in range(needles):
            draw = random.Random(f"{seed}/{tokens}/{layout}/{number}")
            secret = fresh_secret(draw)
            text = haystack.build(
                draw.randrange(2**31), round(tokens * characters_per_token), layout
            ).replace(haystack.SECRET, secret)
            answer, counted = ask(text)
            self.tokens.append(counted)
            self.asked += 1
            self.found += answer.strip() == secret
            characters_per_token *= (tokens / counted) ** 0.5
        return self

    def __str__(self) -> str:
        return f"{self.found}/{self.asked} ({min(self.tokens)}-{max(self.tokens)})"


@contextmanager
def server(python: Path, model: Path, row: Row, more: Sequence[str] = ()) -> Iterator[None]:
    """Start SGLang with one row's override, wait until it is ready, and end it afterwards."""
    override = json.dumps({"index_key_dtype": row.dtype, "index_topk": row.topk})
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(PORT), *ARGUMENTS, *more]
    process = subprocess.Popen(
        [*command, "--json-model-override-args", override],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until_ready(process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    """Wait for /health; raise TimeoutError when it does not come or the server has ended."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError(f"the server was not ready within {READY_SECONDS} s, or ended before")


def main() -> None:
    """Print the table, one line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="interpreter of a CPU build")
    parser.add_argument("--model", type=Path, required=True, help="folder made by model.py")
    parser.add_argument("--needles", type=int, default=20, help="needles per cell")
    parser.add_argument("--seed", type=int, default=1)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    print(f"simulation; {options.needles} fresh needles a cell, seed {options.seed}", flush=True)
    print("| keys/topk | case | tokens asked | recalled (tokens counted) | seconds |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    for row in (row for row in ROWS if row.name in options.rows):
        with server(options.python, options.model, row):
            for case, tokens in row.cells:
                begun = time.monotonic()
                cell = Cell().measure(tokens, LAYOUTS[case], options.needles, options.seed)
                seconds = (time.monotonic() - begun) / options.needles
                print(f"| {row.name} | {case} | {tokens} | {cell} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
