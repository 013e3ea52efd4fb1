"""The light engine: what `sglang.launch_server` is in a light build."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from typing import Any

from . import web

VERSION = "0.5.23"
"""What it says to be: the version whose command line and answers it imitates."""

NEEDLE = re.compile(r"The secret code is ([A-Z0-9-]+)\.")
TEMPLATE_TOKENS = 7  # what a chat template adds to a prompt
NEVER = 3600.0
EXIT_AFTER_SECONDS = 5.0  # ready, and gone while it is judged

FLAGS: dict[str, Any] = {
    "model-path": str,
    "served-model-name": str,
    "host": str,
    "port": int,
    "json-model-override-args": str,
    "mem-fraction-static": float,
    "context-length": int,
    "chunked-prefill-size": int,
    "disaggregation-mode": str,
    "disaggregation-transfer-backend": str,
    "disaggregation-bootstrap-port": int,
    "disaggregation-decode-retraction-backup": str,
    "device": str,
    "dtype": str,
    "attention-backend": str,
    "max-total-tokens": int,
    "max-prefill-tokens": int,
}
SWITCHES = ("enable-metrics", "sleep-on-idle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of SGLang's arguments that the rehearsal's units use."""
    for flag, kind in FLAGS.items():
        parser.add_argument(f"--{flag}", type=kind)
    for flag in SWITCHES:
        parser.add_argument(f"--{flag}", action="store_true")


class Engine:
    """One server of one role; a token is a word."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.role = given.disaggregation_mode or "combined"
        self.who = f"{self.role}={web.RELEASE}@{given.host}"
        self.running = 0
        self.lock = threading.Lock()

    def route(self, path: str, body: Any) -> tuple[int, Any, str]:
        """Answer a page."""
        if body is not None:
            with self.lock:
                self.running += 1
            try:
                return self.answer(path, body)
            finally:
                with self.lock:
                    self.running -= 1
        if path in {"/ready", "/health"}:
            return (503 if web.fault(self.role) == "never-ready" else 200), {}, self.who
        pages: dict[str, Any] = {
            "/server_info": self.info(),
            "/get_model_info": {"model_path": self.given.model_path, "is_generation": True},
            "/v1/models": {"data": [{"id": self.given.served_model_name}]},
            "/metrics": self.metrics(),
            "/kv": {},
        }
        return (200, pages[path], self.who) if path in pages else (404, {}, self.who)

    def answer(self, path: str, body: Any) -> tuple[int, Any, str]:
        """Answer a request; a decode server first fetches what the prefill server has."""
        trouble = web.fault(self.role)
        if trouble == "exit-when-asked":
            os._exit(1)
        if trouble == "hang":
            time.sleep(NEVER)
        if trouble == "refuse":
            return 500, {"error": "told to refuse"}, self.who
        who = self.who
        if self.role == "decode":
            try:
                _, prefilled = web.call(f"{body['light_kv']}/kv", timeout=5)
            except OSError as error:
                return 500, {"error": f"no KV from {body['light_kv']}: {error}"}, who
            who = f"{prefilled} {who}"
        text = body["text"] if path == "/generate" else body["messages"][-1]["content"]
        found = None if trouble == "forget" else NEEDLE.search(text)
        said = f"The secret code is {found[1]}." if found else "I do not know."
        return 200, self.wire(path, body, len(text.split()), said), who

    def wire(self, path: str, body: Any, prompt: int, said: str) -> Any:
        """Return an answer in SGLang's own form."""
        if path == "/generate":
            given = body["sampling_params"]
            counts = {"prompt_tokens": prompt, "completion_tokens": given["max_new_tokens"]}
            return {"text": said, "meta_info": {**counts, "finish_reason": {"type": "length"}}}
        counts = {"prompt_tokens": prompt + TEMPLATE_TOKENS, "completion_tokens": len(said.split())}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": counts}

    def info(self) -> dict[str, Any]:
        """Return what SGLang says of its own arguments."""
        said = {key: value for key, value in vars(self.given).items() if value is not None}
        own = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
        rank = {"chunked_prefill_size": self.given.chunked_prefill_size, "env_vars": own}
        command = " ".join(sys.argv)
        return {**said, "version": VERSION, "launch_command": command, "internal_states": [rank]}

    def metrics(self) -> str:
        """Return the page that Prometheus reads."""
        override = json.loads(self.given.json_model_override_args)
        labels = {
            "patch": os.environ["SGLANG_PLUGINS"],
            "digest": "light",
            "rank": "0",
            "index_topk": override["index_topk"],
            "index_key_dtype": override["index_key_dtype"],
            "allocated_width": override["index_topk"],
        }
        said = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return (
            f'sglang:num_running_reqs{{role="{self.role}"}} {self.running}\n'
            f'sglang:num_queue_reqs{{role="{self.role}"}} 0\n'
            f"seatrial_plugin_info{{{said}}} 1\n"
        )


def main() -> None:
    """Serve, or show the fault that the switch asks of a start."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    given = parser.parse_args()
    engine = Engine(given)
    asked = web.switch(engine.role)
    if asked.get("fault") == "exit-at-start":
        raise SystemExit("told to end at start")
    if asked.get("fault") == "exit-after":
        threading.Timer(EXIT_AFTER_SECONDS, os._exit, [1]).start()
    print(f"{engine.who} serves", flush=True)
    ports = [given.port, given.disaggregation_bootstrap_port]
    web.serve(
        given.host,
        [port for port in ports if port],
        engine.route,
        is_deaf=asked.get("fault") == "ignore-sigterm",
    )
