"""Fixtures for tests with real workers. `tests/conftest.py` loads them, so that every directory has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from celery import Celery

from celery_idempotent.celery import unique
from tests.support.celery.apps import close_app, load_app, private_shared_tasks
from tests.support.celery.business import Business
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode

NODES = pytest.StashKey[list[WorkerNode]]()
JOURNAL = pytest.StashKey[Journal]()

LOG_LINES = 400


class StartWorker(Protocol):
    """Starts a worker of this test; the arguments are `WorkerNode`'s."""

    def __call__(self, app_module: str = ..., *, ready: bool = True, **options: Any) -> WorkerNode: ...


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the journal and the logs of the workers, which end with what they did, to the report of a failed test."""
    report = yield
    if report.failed:
        if JOURNAL in item.stash:
            report.sections.append(("journal", str(item.stash[JOURNAL])))
        for node in item.stash.get(NODES, []):
            node.abort()
            lines = node.logs().splitlines()
            text = "\n".join(["..."] * (len(lines) > LOG_LINES) + lines[-LOG_LINES:])
            report.sections.append((f"log of {node.name()}", text))
    return report


@pytest.fixture(autouse=True)
def own_shared_tasks() -> Iterator[None]:
    """Tasks that a test declares are not registered in the apps of the tests after it."""
    with private_shared_tasks():
        yield


@pytest.fixture
def broker_url(fresh_redis: Callable[[], str]) -> str:
    """An empty database for the broker."""
    return fresh_redis()


@pytest.fixture
def store_url(fresh_redis: Callable[[], str]) -> str:
    """An empty database for the idempotency store."""
    return fresh_redis()


@pytest.fixture
def business(store_url: str) -> Business:
    """The tables of a shop in the store's database; for tests whose store has one."""
    business = Business(store_url)
    business.create()
    return business


@pytest.fixture
def result_url(fresh_redis: Callable[[], str]) -> str:
    """An empty database for the result backend."""
    return fresh_redis()


@pytest.fixture
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """The journal that this test's tasks write to."""
    journal = Journal(tmp_path / "journal")
    request.node.stash[JOURNAL] = journal
    return journal


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    """The gates at which this test's tasks wait."""
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.open_all()


@pytest.fixture
def worker_env(broker_url: str, store_url: str, result_url: str, journal: Journal, gates: Gates) -> dict[str, str]:
    """The environment from which app modules read their settings; a test may add to it before it starts anything."""
    return {
        "BROKER_URL": broker_url,
        "STORE_URL": store_url,
        "RESULT_URL": result_url,
        "JOURNAL": str(journal.path),
        "GATES": str(gates.directory),
    }


@pytest.fixture
def client_app(worker_env: dict[str, str]) -> Iterator[Callable[..., Celery]]:
    """Load an app module afresh, configured as the workers are: `client_app("tests.support.celery.my_app")`.

    More environment as keywords: `client_app("tests.support.celery.my_app", VISIBILITY_TIMEOUT="3")`.
    """
    apps: list[Celery] = []

    def load(app_module: str = "tests.support.celery.plain_app", **env: str) -> Celery:
        apps.append(load_app(app_module, {**worker_env, **env}))
        return apps[-1]

    yield load
    for app in apps:
        close_app(app)


@pytest.fixture
def patient_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls of unique tasks wait for the store; a machine that is busy for 0.25 s would have them published."""
    monkeypatch.setattr(unique, "BUDGET", 30.0)


@pytest.fixture
def start_worker(request: pytest.FixtureRequest, tmp_path: Path, worker_env: dict[str, str]) -> Iterator[StartWorker]:
    """A function that starts a worker and waits until it is ready; at the end of the test it is killed.

    `start_worker("tests.support.celery.my_app", concurrency=1, visibility_timeout=3, env={...})`, with `ready=False` to
    start several at once and then `node.ready()` each.
    """
    nodes: list[WorkerNode] = request.node.stash.setdefault(NODES, [])

    def start(app_module: str = "tests.support.celery.plain_app", *, ready: bool = True, **options: Any) -> WorkerNode:
        options.setdefault("name", f"worker{len(nodes) + 1}")
        urls = {key: options.pop(key, worker_env[key.upper()]) for key in ("broker_url", "store_url", "result_url")}
        env = {**worker_env, **{key.upper(): value for key, value in urls.items()}, **options.pop("env", {})}
        node = WorkerNode(app_module, **urls, directory=tmp_path, env=env, **options)
        nodes.append(node)
        node.start()
        if ready:
            node.ready()
        return node

    yield start
    for node in nodes:
        node.teardown()
    leftovers = {node.name(): node.members() for node in nodes if node.members()}
    assert not leftovers, f"processes were left behind: {leftovers}"
