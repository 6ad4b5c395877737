"""What the applications of the tests do, for every framework: what a request's query says, and a note of each run."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery_idempotent import current_lease
from celery_idempotent.http import UNGUARDED

RUNS = Path(os.environ.get("RUNS", "runs"))


def options() -> dict[str, object]:
    """Return the options of the middleware, as the test has them."""
    return {
        "store": os.environ["STORE_URL"],
        "scope": None,
        "lease_ttl": 2,
        "exempt": ["/exempt"],
        "response_max_bytes": 1000,
        "request_max_bytes": 10_000,
        "keep_headers": ["X-Kept"],
        "drop_headers": ["X-Dropped"],
        "docs_url": "https://shop.test/keys",
        "remember": remember,
        "fingerprint_headers": ["Accept-Language"],
    }


def caller(key: str | None) -> object:
    """Return the account of an API key."""
    return UNGUARDED if key == "pass" else key


def remember(response: object) -> object:
    """Have a response decide, by a header."""
    wish = response.header("x-remember")  # type: ignore[attr-defined]
    return {"yes": True, "no": False, "fact": "fact"}.get(wish or "")


def publish(query: dict[str, str]) -> Any:
    """Publish the tasks of a request, and return the result that its client is to poll."""
    from tests.support.http import tasks  # which has an app of Celery's, that few tests need

    return tasks.publish(query["tag"])


class Answer(NamedTuple):
    """A response, of parts that come one after another."""

    status: int
    headers: list[tuple[str, str]]
    parts: Iterator[bytes]


def note(text: str) -> None:
    """Count a run outside the process."""
    with RUNS.open("a") as file:
        file.write(f"{text}\n")


def answer(path: str, query: dict[str, str], body: bytes) -> Answer:
    """Do what a request is about."""
    lease = current_lease()
    tag = query.get("tag", "-")
    note(f"{tag} {'lease' if lease is not None and lease.fence else 'bare'} {path}")
    runs = sum(line.startswith(f"{tag} ") for line in RUNS.read_text().splitlines())
    time.sleep(float(query.get("seconds", "0")))
    match query.get("then"):
        case "raise":
            raise ValueError("the handler failed")
        case "die":
            if runs == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    headers = [
        ("Content-Type", query.get("type", "text/plain")),
        ("Location", f"/orders/{runs}"),
        ("Set-Cookie", "session=secret"),
        ("X-Request-Id", f"r{runs}"),
        ("RateLimit-Remaining", "9"),
        ("X-Kept", "kept"),
        ("X-Dropped", "dropped"),
        ("Vary", "Accept"),
    ]
    if "remember" in query:
        headers.append(("X-Remember", query["remember"]))
    content = f"run {runs} of {hashlib.sha256(body).hexdigest()[:8]} ".encode()
    content = content.ljust(int(query.get("bytes", "0")), b".")
    if query.get("binary"):
        content += b"\xff\x00"
    return Answer(int(query.get("status", "201")), headers, parts(content, query))


def parts(content: bytes, query: dict[str, str]) -> Iterator[bytes]:
    """Yield the body at once, or in parts with pauses between them; or break off."""
    if query.get("status") in ("204", "304"):
        return
    yield content
    for number in range(int(query.get("parts", "0"))):
        time.sleep(float(query.get("pause", "0")))
        if query.get("then") == "break" and number:
            raise ValueError("the stream broke")
        yield f"part {number} ".encode()
