"""Ask real engines of several widths whether their selection held a needle.

    python rehearsal/selection_table.py --python BUILD/bin/python --model MODEL_DIR

Starts an SGLang for each index_topk with ``--enable-return-indexer-topk``, asks all of them the
same questions, and prints the table of docs/measurements.md: coverage or ranking? What it shows is
a simulation, tuned on purpose: it says nothing about any production model.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rehearsal.recall_table import URL, Row, server
from seatrial.diagnosis import Look, diagnose, look
from seatrial.engine import Engine
from seatrial.recall import Form, Prompt, Question, Scale, ask, compose

WIDTHS = (512, 1024, 2048)
QUESTIONS = ((2000, 0.0), (5200, 0.0), (5200, 0.5), (5200, 1.0), (8000, 0.0))
SECONDS = 300.0


def prompts(engine: Engine, seed: int) -> list[tuple[int, float, Prompt]]:
    """Return the questions at their lengths, as this tokenizer counts."""
    scale = Scale()
    found = []
    for tokens, depth in QUESTIONS:
        question = Question(Form.PLAIN, tokens, depth, seed)
        outcome = ask(lambda prompt: engine.chat(prompt.messages, 24), scale, question)
        found.append((tokens, depth, compose(outcome.question)[0]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="interpreter of a CPU build")
    parser.add_argument("--model", type=Path, required=True, help="folder made by model.py")
    parser.add_argument("--dtype", default="fp8_e4m3", help="dtype of the index keys")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asked: list[tuple[int, float, Prompt]] = []
    looks: list[list[Look]] = [[] for _ in QUESTIONS]
    for width in WIDTHS:
        row, told = Row(options.dtype, width, ()), ["--enable-return-indexer-topk"]
        with server(options.python, options.model, row, told), Engine(URL, SECONDS) as engine:
            asked = asked or prompts(engine, options.seed)
            for found, (_, _, prompt) in zip(looks, asked, strict=True):
                found.append(look(engine, prompt, width))
    print(f"simulation; index keys in {options.dtype}, seed {options.seed}", flush=True)
    print("| tokens | depth | judged at index_topk | cause |\n|---|---|---|---|", flush=True)
    for found, (tokens, depth, _) in zip(looks, asked, strict=True):
        for place, width in enumerate(WIDTHS[:-1]):
            print(f"| {tokens} | {depth:.0%} | {width} | {diagnose(found[place:]).said} |")


if __name__ == "__main__":
    main()
