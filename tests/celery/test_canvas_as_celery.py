"""With an idempotent base of every task, Celery's canvas does what it does without."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

from celery import Celery
from celery.result import AsyncResult, GroupResult

from tests.support.celery.canvases import canvases
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.servers import open_client
from tests.support.waiting import wait_until

CANVAS = "tests.support.celery.canvas_app"
#: How many runs the canvases come to with Celery itself, and so with us.
RUNS = 245


def is_idle(broker_url: str) -> bool:
    """Say whether no queue of a Redis broker holds a message, and no worker one that it has not acked.

    A message that a worker has just fetched is in neither for a moment: first wait for what is to happen.
    """
    with open_client(broker_url) as client:
        queues = [name for name in client.scan_iter() if client.type(name) == b"list"]
        pipeline = client.pipeline().hlen("unacked")
        for name in queues:
            pipeline.llen(name)
        return not any(pipeline.execute())


def outcome(result: Any, anonymous: Callable[[object], str]) -> Any:
    """Return what a caller gets from a result, and from those it followed."""
    if isinstance(result, GroupResult):
        found: Any = [outcome(member, anonymous) for member in result]
    elif isinstance(result, AsyncResult):
        value = result.result
        if isinstance(value, list):  # whose order Celery before 5.7 leaves to chance where a member was replaced
            value = sorted(value, key=repr)
        found = (result.state, anonymous(value), bool(result.traceback), len(result.children or ()))
    else:
        found = anonymous(result)
    parent = getattr(result, "parent", None)
    return (found, outcome(parent, anonymous)) if parent is not None else found


def differences(ours: Any, theirs: Any) -> list[Any]:
    """Return both outcomes of one canvas, the runs that only we have, and those that only Celery has."""
    return [ours[0], theirs[0], ours[1] - theirs[1], theirs[1] - ours[1]]


def test_every_canvas_runs_the_same_tasks_with_the_same_messages_to_the_same_results(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    fresh_redis: Callable[[], str],
    tmp_path: Path,
    worker_env: dict[str, str],
) -> None:
    """Also where every task is unique."""
    envs = [worker_env]
    for base in ("unique", "plain"):
        urls = {"BROKER_URL": fresh_redis(), "RESULT_URL": fresh_redis(), "STORE_URL": fresh_redis()}
        envs.append({**worker_env, **urls, "BASE": base, "JOURNAL": str(tmp_path / f"{base} journal")})
    nodes = []
    for env in envs:
        urls = {name: env[name.upper()] for name in ("broker_url", "result_url", "store_url")}
        nodes.append(start_worker(CANVAS, queues=("celery", "side"), ready=False, env=env, **urls))
    for node in nodes:
        node.ready()
    apps = [client_app(CANVAS, **env) for env in envs]
    assert apps[1].module.add._binding.unique is not None
    *ours, plain = [sight(app, Journal(env["JOURNAL"])) for app, env in zip(apps, envs, strict=True)]
    for env, seen in zip(envs, ours, strict=False):
        assert Journal(env["JOURNAL"]).entries("replayed") == []
        found = {name: differences(seen[name], plain[name]) for name in plain if seen[name] != plain[name]}
        assert not found, pformat(found, width=200)


def sight(app: Celery, journal: Journal) -> dict[str, Any]:
    """Apply every canvas, and return by name what came out of it and what its tasks saw."""
    results = {name: apply() for name, apply in canvases(app.module).items()}
    wait_until(lambda: journal.count("ran") >= RUNS, 60, lambda: f"{RUNS} runs, not {journal.count('ran')}")
    wait_until(lambda: is_idle(app.conf.broker_url), 60, "all messages to be worked off")
    outcomes = {name: outcome(result, app.module.anonymous) for name, result in results.items()}
    runs: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in journal.entries("ran"):
        runs[entry.key][f"{entry.fields['task']} {entry.fields['seen']}"] += 1
    return {name: (outcomes.get(name), runs[name]) for name in {*outcomes, *runs}}
