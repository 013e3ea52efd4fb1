"""The light engine speaks SGLang's wire format, and names the releases behind each answer."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rehearsal.light import build, engine, router, web
from seatrial.build import read_build
from seatrial.engine import Engine

OVERRIDE = json.dumps({"index_topk": 1024, "index_key_dtype": "bf16"})


def given(*words: str) -> argparse.Namespace:
    """Return an engine's command line, read."""
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    common = ("--host=127.0.0.1", "--served-model-name=m", f"--json-model-override-args={OVERRIDE}")
    return parser.parse_args([*common, *words])


@contextmanager
def serving(route: web.Route) -> Iterator[str]:
    """Serve the pages on a free port until the block ends."""
    server = web.Server(("127.0.0.1", 0), web.handler(route))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where this test's fault switches lie."""
    monkeypatch.setattr(web, "SWITCHES", tmp_path)
    monkeypatch.setattr(web, "RELEASE", "r7")
    monkeypatch.setenv("SGLANG_PLUGINS", "light")
    return tmp_path


def test_a_cell_answers_and_names_who_did(switches: Path) -> None:
    """Through the router: prefill, then decode, which fetches what prefill has."""
    prefill = engine.Engine(given("--disaggregation-mode=prefill"))
    decode = engine.Engine(given("--disaggregation-mode=decode"))
    with serving(prefill.route) as first, serving(decode.route) as last:
        port = first.rpartition(":")[2]
        named = argparse.Namespace(
            host="127.0.0.1", prefill=[[first, port]], decode=[last], worker_urls=[]
        )
        with serving(router.Router(named).route) as url, Engine(url, 5.0) as door:
            assert door.is_ready("/readiness")
            assert sorted(door.workers()) == sorted([first, last])
            answer = door.chat("The secret code is ZEBRA-1. What is the secret code?", 16)
            assert answer.text == "The secret code is ZEBRA-1."
            assert door.generate("The harbour is", 4, is_exact=True).completion_tokens == 4
            question = {"messages": [{"role": "user", "content": "Hello?"}]}
            _, who = web.call(f"{url}/v1/chat/completions", question)
    assert [word.partition("@")[0] for word in who.split()] == [
        "router=r7",
        "prefill=r7",
        "decode=r7",
    ]


def test_a_switch_is_for_one_release(switches: Path) -> None:
    """The old release does not see what the new one is told to do."""
    one = engine.Engine(given())
    switch = switches / "combined.json"
    with serving(one.route) as url, Engine(url, 5.0) as door:
        switch.write_text(json.dumps({"release": "r8", "fault": "never-ready"}))
        assert door.is_ready()
        switch.write_text(json.dumps({"release": "r7", "fault": "never-ready"}))
        assert not door.is_ready()
        switch.write_text(json.dumps({"release": "r7", "fault": "forget"}))
        assert door.chat("The secret code is ZEBRA-1. Well?", 16).text == "I do not know."


def test_metrics_count_what_runs(switches: Path) -> None:
    """The page that draining and the identity gate read."""
    with serving(engine.Engine(given()).route) as url, Engine(url, 5.0) as door:
        (sample,) = door.metrics("seatrial_plugin_info")
        assert sample.labels["index_topk"] == "1024"
        assert [one.value for one in door.metrics("sglang:num_running_reqs")] == [0.0]


def test_a_light_build_is_a_build(tmp_path: Path, repository: Path) -> None:
    """Named by its files, packed by the role's own program, described by the one schema."""
    lock = tmp_path / "light.lock"
    lock.write_text(build.lock("1"))
    digest = build.make(lock, repository / "kernels", tmp_path)
    described = read_build((tmp_path / f"{digest}.json").read_text())
    assert described.digest == digest
    assert (tmp_path / f"{digest}.tar.zst.sha256").exists()
    lock.write_text(build.lock("2"))
    assert build.make(lock, repository / "kernels", tmp_path) != digest
