"""Both command lines, over the same store."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from celery import Celery
from click.testing import CliRunner

import celery_idempotent.stores
from celery_idempotent import IdempotentTask, cli
from celery_idempotent.cli.app import idempotency
from celery_idempotent.stores import Store
from celery_idempotent.stores.redis import RedisStore
from tests.support.cli.shelf import Shelf
from tests.support.cli.terminal import Terminal


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


class Run:
    """Runs one command on a store: `run("show", KEY)`."""

    def __init__(self, invoke: Callable[..., Said], store: Store) -> None:
        self.invoke, self.store = invoke, store

    def __call__(self, *arguments: str, answer: str | None = None) -> Said:
        said = self.invoke(self.store, arguments, answer)
        assert "Traceback" not in said.out + said.err
        return said


def pay(order_id: str) -> None:
    """Do what a task does."""


def app_with(store: object, *others: Store, **conf: object) -> Celery:
    """Return an app that nobody else sees, with a task for each of the other stores."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = store
    app.conf.update(conf)
    for number, other in enumerate(others):
        app.task(pay, name=f"pay{number}", base=IdempotentTask, idempotency={"store": other})
    return app


def by_app(app: Celery, *arguments: str, answer: str | None = None) -> Said:
    """Run `celery -A proj idempotency`, as Celery's command line has it."""
    result = _runner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app), input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


def _runner() -> CliRunner:
    try:
        return CliRunner(mix_stderr=False)  # before click 8.2
    except TypeError:
        return CliRunner()


@pytest.fixture
def by_url(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """A function that runs `celery-idempotent COMMAND --store shelf://` on a store object."""

    def run(store: Store, arguments: tuple[str, ...], answer: str | None) -> Said:
        monkeypatch.setattr(celery_idempotent.stores, "open_store", lambda url: store)
        monkeypatch.setattr("sys.stdin", io.StringIO(answer or ""))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            cli.main([*arguments, "--store", "shelf://shop:secret@here"])
        return Said(int(left.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture(params=["celery -A", "celery-idempotent"])
def invoke(request: pytest.FixtureRequest, by_url: Callable[..., Said]) -> Callable[..., Said]:
    """One command line after the other."""
    if request.param == "celery-idempotent":
        return by_url

    def run(store: Store, arguments: tuple[str, ...], answer: Any) -> Said:
        return by_app(app_with(store), *arguments, answer=answer)

    return run


@pytest.fixture(params=["celery -A", pytest.param("celery-idempotent", marks=pytest.mark.thorough)])
def in_terminal(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Callable[..., Terminal]]:
    """A function that runs a command on the Redis store in a real terminal of 80 columns, by either command line."""
    opened: list[Terminal] = []

    def run(*arguments: str, **env: str) -> Terminal:
        if request.param == "celery-idempotent":
            command, env = ("-m", "celery_idempotent.cli"), {"CELERY_IDEMPOTENT_STORE": redis_url, **env}
        else:
            command = ("-m", "celery", "-A", "tests.support.celery.shop", "idempotency")
            env = {"STORE_URL": redis_url, "BROKER_URL": "memory://", "RESULT_URL": "cache+memory://", **env}
        opened.append(Terminal(*command, *arguments, **env))
        return opened[-1]

    yield run
    for terminal in opened:
        with terminal:
            pass


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def on_shelf(invoke: Callable[..., Said], shelf: Shelf) -> Run:
    """Commands on a store of this process, by either command line."""
    return Run(invoke, shelf)


@pytest.fixture
def redis_store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(redis_url)
    yield store
    store.close()


@pytest.fixture
def on_redis(invoke: Callable[..., Said], redis_store: RedisStore) -> Run:
    """Commands on a Redis store, by either command line."""
    return Run(invoke, redis_store)
