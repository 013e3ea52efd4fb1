"""Asks the entry again and again, and writes down who answered. Runs inside the hosts' network.

One JSON line for each request, when it has ended: its number, begin, end (seconds since 1970),
status (0: no answer), the cell and the servers that the answer names, and the words of an error.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from pathlib import Path

TIMEOUT_SECONDS = 15.0
"""Longer than any answer of a light cell, shorter than a case."""
AT_ONCE = 60
QUESTION = {
    "model": "rehearsal",
    "messages": [{"role": "user", "content": "The secret code is HELLO-7. What is it?"}],
    "max_tokens": 4,
}


def main() -> None:
    """Ask until killed: `probe.py HOST:PORT KEY_FILE OUT EVERY_SECONDS`."""
    entry, key = sys.argv[1], Path(sys.argv[2]).read_text().strip()
    every = float(sys.argv[4])
    slots = threading.Semaphore(AT_ONCE)
    lock = threading.Lock()
    with Path(sys.argv[3]).open("a", buffering=1) as out:
        for number in range(10**9):
            slots.acquire()

            def ask(number: int = number) -> None:
                line = json.dumps(asked(entry, key, number))
                with lock:
                    out.write(line + "\n")
                slots.release()

            threading.Thread(target=ask, daemon=True).start()
            time.sleep(every)


def asked(entry: str, key: str, number: int) -> dict[str, object]:
    """Send one request; its number stands in the URL, so that HAProxy's log can be asked for it."""
    begin = time.time()
    found: dict[str, object] = {"status": 0, "cell": "", "servers": "", "error": ""}
    try:
        connection = http.client.HTTPConnection(entry, timeout=TIMEOUT_SECONDS)
        connection.request(
            "POST",
            f"/v1/chat/completions?probe={number}",
            json.dumps(QUESTION),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        found |= {
            "status": answer.status,
            "cell": answer.headers.get("X-Seatrial-Cell", ""),
            "servers": answer.headers.get("X-Light-Servers", ""),
            "error": "" if answer.status == http.HTTPStatus.OK else text[:200],
        }
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return {"number": number, "begin": begin, "end": time.time(), **found}


if __name__ == "__main__":
    main()
