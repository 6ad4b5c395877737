"""From the request to its tasks, on real servers and workers: a request that is carried out again repeats no task."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.http.server import Reply, WebServer, fresh
from tests.support.waiting import wait_until

TASKS = "tests.support.http.tasks"
#: How often each body runs; two calls are equal. What failed is free to run again, and does with each message of it.
RUNS = dict.fromkeys(("first", "second", "third", "left", "right", "body", "a", "b", "c", "d", "e"), 1)
RUNS |= {"one": 2, "parent": 1, "callback": 1, "failing": 2, "errback": 1}


@pytest.fixture(params=["starlette", pytest.param("flask", marks=pytest.mark.smoke), "django", "django-asgi"])
def web(request: pytest.FixtureRequest, tmp_path: Path, worker_env: dict[str, str]) -> Iterator[WebServer]:
    """A server whose endpoints publish: a coroutine, in Flask a function, in Django what is called on commit."""
    server = WebServer(request.param, tmp_path, worker_env["STORE_URL"], worker_env)
    yield server
    server.stop()


def published(web: WebServer, tag: str) -> list[Any]:
    """Return the ids that each run of a request has published."""
    lines = web.runs.read_text().splitlines()
    return [json.loads(line.split(" ", 2)[2]) for line in lines if line.startswith(f"published {tag} ")]


@pytest.mark.nightly
def test_a_server_that_is_killed_after_it_published_repeats_no_task(
    web: WebServer,
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    journal: Journal,
    broker_url: str,
) -> None:
    key, path = fresh(), "/async/orders" if web.kind == "django-asgi" else "/orders"
    call = partial(web.call, key, path=path, tag=key, publish="yes", then="die")
    waits = web.kind == "flask"  # all messages are there before the first is delivered; else most of them have run
    if not waits:
        start_worker(TASKS, concurrency=2, ready=False)
    with pytest.raises((OSError, http.client.HTTPException)):
        call()
    assert len(published(web, key)) == 1
    web.revive()
    replies: list[Reply] = []

    def again() -> bool:
        replies.append(call())
        return replies[-1].status == 202

    wait_until(again, 20)
    first, second = published(web, key)
    assert first == second
    ((last, _), _) = second["chain"]
    assert replies[-1].headers["Location"] == f"/jobs/{last}"
    if waits:
        start_worker(TASKS, concurrency=2)
    wait_until(lambda: messages(broker_url) == 0, 60, lambda: f"all to be done:\n{journal}")
    assert {name: journal.count("ran", name) for name in RUNS} == RUNS
    app = client_app(TASKS)
    assert [app.AsyncResult(second[name][0][0]).get(timeout=10) for name in ("chain", "chord")] == ["third", "body"]
