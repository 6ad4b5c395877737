"""A task that replaces itself by a signature that contains the task: it ends as it does with Celery itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from celery import Celery, chain, chord

from tests.celery.canvas_app import anonymous
from tests.celery.fixtures import StartWorker
from tests.celery.journal import Journal
from tests.celery.test_canvas_as_celery import is_idle
from tests.waiting import WaitTimeout, wait_until

REPLACING = "tests.celery.replacing_app"
#: What the operation's key is made of: the task, the options of each publish, given a name.
KEYS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "the task id": ("same", lambda name: {}),
    "its producer": ("same", lambda name: {"idempotency_key": name}),
    "its arguments": ("keyed", lambda name: {}),
}


def canvases(app: Celery, which: str) -> dict[str, Any]:
    """Publish every shape, alone and in a canvas of each kind, and return the results."""
    name, options = KEYS[which]
    m = app.module
    results: dict[str, Any] = {}

    def begin(place: str, shape: str) -> Any:
        tag = f"{shape}, {place}"
        return getattr(m, name).s(order=tag, then=shape, tag=tag).set(**options(tag))

    for shape in (each for each in m.SHAPES if not each.startswith("back to")):
        results[f"{shape}, alone"] = begin("alone", shape).apply_async()
        place = "in a chain"
        results[f"{shape}, {place}"] = chain(begin(place, shape), m.collect.s(tag=f"{shape}, {place}")).apply_async()
    for shape in ("itself", "last", "first", "in a group", "in a header and a body", "three deep"):
        for place in ("in a header", "in a body", "with a callback"):
            tag = f"{shape}, {place}"
            sig, link, beside = begin(place, shape), m.collect.s(tag=tag), m.other.s(5, order=tag, tag=tag)
            if place == "with a callback":
                results[tag] = sig.set(link=[link]).apply_async()
            else:
                results[tag] = (chord([sig, beside], link) if place == "in a header" else chord([beside], sig))()
    return results


def sight(app: Celery, journal: Journal, which: str) -> dict[str, Any]:
    """Return, by canvas, what its caller got, if anything, and how often each body ran."""
    results = canvases(app, which)
    with suppress(WaitTimeout):  # what is missing then is told by name
        wait_until(lambda: all(result.ready() for result in results.values()), 45, "all results")
    wait_until(lambda: is_idle(app.conf.broker_url), 30, "all messages to be worked off")
    runs: dict[str, Counter[str]] = {name: Counter() for name in results}
    for entry in journal.entries("ran"):
        runs[entry.key][f"{entry.fields['task']} {entry.fields.get('order', '')} {entry.fields.get('then', '')}"] += 1
    return {name: (result.state, anonymous(result.result), runs[name]) for name, result in results.items()}


@pytest.mark.parametrize("which", KEYS)
def test_a_task_replaced_by_what_contains_it_ends_as_it_does_with_celery_itself(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    fresh_redis: Callable[[], str],
    tmp_path: Path,
    worker_env: dict[str, str],
    which: str,
) -> None:
    plain = {
        "PLAIN": "1",
        "BROKER_URL": fresh_redis(),
        "RESULT_URL": fresh_redis(),
        "JOURNAL": str(tmp_path / "plain journal"),
    }
    urls = {"broker_url": plain["BROKER_URL"], "result_url": plain["RESULT_URL"]}
    nodes = [start_worker(REPLACING, ready=False), start_worker(REPLACING, ready=False, env=plain, **urls)]
    for node in nodes:
        node.ready()
    theirs = sight(client_app(REPLACING, **plain), Journal(plain["JOURNAL"]), which)
    ours = sight(client_app(REPLACING), Journal(worker_env["JOURNAL"]), which)
    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert not differing, pformat(differing, width=200)
