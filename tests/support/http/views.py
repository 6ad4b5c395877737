"""What the applications of the tests do, for every framework: what a request's query says, and a note of each run."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from celery_idempotent import current_lease
from celery_idempotent.http import UNGUARDED

RUNS = Path(os.environ.get("RUNS", "runs"))


def options() -> dict[str, object]:
    """Return the options of the middleware, as the test has them."""
    return {
        "store": os.environ["STORE_URL"],
        "scope": None,
        "lease_ttl": 2,
        "exempt": ["/exempt", "/uploads"],
        "response_max_bytes": 1000,
        "request_max_bytes": 10_000,
        "keep_headers": ["X-Kept"],
        "drop_headers": ["X-Dropped"],
        "docs_url": "https://shop.test/keys",
        "remember": remember,
        "fingerprint_headers": ["Accept-Language"],
    }


def uploads() -> dict[str, object]:
    """Return the options of another middleware, for what is too large to be compared."""
    return {**options(), "exempt": [], "fingerprint": "headers"}


def caller(key: str | None) -> object:
    """Return the account of an API key; an account may have several, and lose one."""
    return {"pass": UNGUARDED, "anna-2": "anna", "revoked": None}.get(key or "", key)


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


def file_of(size: int) -> Path:
    """Return a file of so many bytes."""
    path = RUNS.with_name(f"{size}.txt")
    if not path.exists():
        path.write_bytes(b"." * size)
    return path


def die_if(stage: str, query: dict[str, str], runs: int) -> None:
    """Kill this process, as the first run of a request may be."""
    if query.get("die") == stage and runs == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def order(tag: str, query: dict[str, str], runs: int) -> None:
    """Insert an order, and settle its response, in one transaction of SQLite."""
    lease = current_lease()
    assert lease is not None
    with closing(sqlite3.connect(os.environ["STORE_URL"].removeprefix("sqlite:///"))) as connection:
        connection.execute("INSERT INTO orders VALUES (?)", (tag,))
        die_if("effect", query, runs)
        lease.settle((201, {"Location": f"/orders/{tag}"}, f"order {tag}"), using=connection)
        die_if("settle", query, runs)
        connection.commit()
    die_if("commit", query, runs)


def respond(method: str, path: str, query: dict[str, str], body: bytes) -> Answer:
    """Count the runs of a tag; or do what another request is about."""
    if path == "/exempt/get-then-set":  # what one would write without leases
        known = RUNS.with_name(query["tag"])
        if known.exists():
            return Answer(201, [], iter([known.read_bytes()]))
        found = answer(path, query, body)
        known.write_bytes(content := b"".join(found.parts))
        return found._replace(parts=iter([content]))
    if method in ("GET", "HEAD") and not path.startswith("/exempt"):
        count = sum(line.startswith(f"{query.get('tag', '-')} ") for line in RUNS.read_text().splitlines())
        return Answer(200, [("Content-Type", "text/plain")], iter([b"%d" % count]))
    return answer(path, query, body)


def answer(path: str, query: dict[str, str], body: bytes) -> Answer:
    """Do what a request is about."""
    lease = current_lease()
    tag = query.get("tag", "-")
    note(f"{tag} {'lease' if lease is not None and lease.fence else 'bare'} {path}")
    runs = sum(line.startswith(f"{tag} ") for line in RUNS.read_text().splitlines())
    time.sleep(float(query.get("seconds", "0")))
    if query.get("then") == "raise" or query.get("status") == "0":
        raise ValueError("the handler failed")
    if query.get("then") == "die":
        query = {**query, "die": "handler"}
    die_if("handler", query, runs)
    if "order" in query:
        order(tag, query, runs)
    if "stream" in query:
        query = {**query, "type": "text/event-stream", "parts": "2"}
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
    content = f"run {runs} {uuid4().hex} ".encode().ljust(int(query.get("bytes", "0")), b".")
    content += body if len(body) < 100_000 else hashlib.sha256(body).hexdigest().encode()
    return Answer(int(query.get("status", "201")), headers, parts(content, query, runs))


def parts(content: bytes, query: dict[str, str], runs: int) -> Iterator[bytes]:
    """Yield the body at once, or in parts with pauses between them; or break off."""
    if query.get("status") in ("204", "304"):
        return
    yield content
    for number in range(int(query.get("parts", "0"))):
        time.sleep(float(query.get("pause", "0")))
        if query.get("then") == "break" and number:
            raise ValueError("the stream broke")
        if number:
            die_if("response", query, runs)
        yield f"part {number} ".encode()
