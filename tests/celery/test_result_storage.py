"""Which results Celery's backend keeps for duplicates, and what it says of those that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, states
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_idempotent import ConfigurationError, IdempotentTask, ResultUnavailable, StoreUnreachable
from celery_idempotent.celery.app import HANDOVER, TaskResultStorage
from celery_idempotent.core.results import Kind, NotStored, Origin, Payload
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner

LARGE = "x" * 100


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("inside", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=MemoryStore(), task_eager_propagates=True)
    app.conf.idempotency = {"result_max_bytes": 50, "compression": "none", "large_results": "backend"}
    yield app
    app.close()


def declare(app: Celery, **options: Any) -> Any:
    runs: list[str] = []

    def make(self: Any, name: str) -> Any:
        runs.append(name)
        return {"name": name, "text": LARGE, "pair": (1, 2)}

    task = app.task(base=IdempotentTask, bind=True, shared=False, name="make", idempotency={"key": "name"}, **options)(
        make
    )
    app.finalize()
    task.runs = runs
    return task


@pytest.fixture
def first() -> str:
    """The id of the run that made a result; the backend in memory is shared by all tests."""
    return new_owner()


def payload_of(app: Celery) -> bytes:
    [record] = app.conf.idempotency_store.scan()
    return bytes(record.payload)


def read(storage: TaskResultStorage, reference: str, age: float = HANDOVER) -> Payload:
    return storage.read(reference, lambda content: Payload(Kind.VALUE, content), age)


def test_a_result_in_the_backend_is_replayed_as_its_consumer_got_it(app: Celery) -> None:
    app.conf.task_store_eager_result = True
    task = declare(app)
    first = task.apply(("A",))
    assert payload_of(app) == f"!reference:task:{first.id}".encode()
    assert task.apply(("A",)).get() == {"name": "A", "text": LARGE, "pair": [1, 2]}
    assert task.runs == ["A"]


@pytest.mark.parametrize("why", ["eager", "ignored", "no backend", "rpc"])
def test_a_result_that_no_backend_keeps_for_others_is_unavailable(app: Celery, why: str) -> None:
    app.conf.task_store_eager_result = why != "eager"
    if why in ("no backend", "rpc"):
        app.conf.result_backend = "rpc://" if why == "rpc" else None
    task = declare(app, ignore_result=why == "ignored")
    task.apply(("A",))
    assert b"and the result backend does not keep it (no backend, rpc://, ignore_result," in payload_of(app)


def test_a_result_may_be_left_nowhere(app: Celery) -> None:
    app.conf.idempotency = {"result_max_bytes": 50}
    task = declare(app)
    task.apply(("A",))
    assert payload_of(app).endswith(b" bytes, result_max_bytes is 50")
    with pytest.raises(NotStored, match=r"^$"):
        TaskResultStorage(task, None).keep(b"x", Origin("key", 1, "id", True))
    with pytest.raises(ResultUnavailable, match="result_max_bytes is 50"):
        task.apply(("A",))


def test_a_task_that_names_no_files_says_where_the_file_is(app: Celery) -> None:
    found = read(TaskResultStorage(declare(app), "backend"), "file:///x")
    assert found == Payload(Kind.UNAVAILABLE, reason="it is at file:///x, and large_results names no place of files")


@pytest.mark.parametrize("state", sorted(states.UNREADY_STATES))
def test_a_result_that_is_on_its_way_is_waited_for_and_not_for_ever(app: Celery, first: str, state: str) -> None:
    task = declare(app)
    if state != states.PENDING:
        task.backend.store_result(first, None, state)
    storage = TaskResultStorage(task, None)
    with pytest.raises(StoreUnreachable, match=f"got {state}: it was settled 59 s ago and is on its way there"):
        read(storage, f"task:{first}", HANDOVER - 1)
    found = read(storage, f"task:{first}")
    assert found.kind is Kind.UNAVAILABLE
    assert found.reason.startswith(
        f"the result backend was to have it as task {first}, where its status is {state}: it has expired"
    )
    task.backend.store_result(first, 42, states.SUCCESS)
    assert read(storage, f"task:{first}") == Payload(Kind.VALUE, 42)


def test_a_call_of_apply_does_not_wait_for_it(app: Celery) -> None:
    app.conf.task_store_eager_result = True
    task = declare(app)
    task.backend.forget(task.apply(("A",)).id)
    with pytest.raises(StoreUnreachable, match="is on its way there"):
        task.apply(("A",))
    assert task.runs == ["A"]


@pytest.mark.parametrize("state", [states.FAILURE, states.REVOKED])
def test_what_failed_under_the_first_runs_id_is_no_result(app: Celery, first: str, state: str) -> None:
    task = declare(app)
    task.backend.store_result(first, ValueError("no"), state)
    assert f"its status is {state}" in read(TaskResultStorage(task, None), f"task:{first}", 0.0).reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContentDisallowed("pickle"), "the result backend has it and cannot read it: pickle"),
        (DecodeError("damaged"), "the result backend has it and cannot read it: damaged"),
        (ConnectionError("secret"), StoreUnreachable),
    ],
)
def test_a_backend_that_fails_is_asked_again_unless_it_cannot_read(
    app: Celery, first: str, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: Any
) -> None:
    task = declare(app)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(task.backend, "get_task_meta", fail)
    if isinstance(expected, str):
        assert read(TaskResultStorage(task, None), f"task:{first}") == Payload(Kind.UNAVAILABLE, reason=expected)
    else:
        with pytest.raises(expected, match="got ConnectionError: the operation is done") as caught:
            read(TaskResultStorage(task, None), f"task:{first}")
        assert "secret" not in str(caught.value)


def test_a_worker_without_a_backend_says_that_there_is_none(app: Celery, first: str) -> None:
    app.conf.result_backend = None
    found = read(TaskResultStorage(declare(app), None), f"task:{first}", 0.0)
    assert found.reason == f"it was left to a result backend as task {first}; here is none"


def test_a_large_result_is_not_held_in_memory_after_its_replay(app: Celery) -> None:
    app.conf.update(task_store_eager_result=True, result_cache_max=10)
    task = declare(app)
    task.apply(("A",))
    task.apply(("A",))
    assert not task.backend._cache


def test_files_take_what_no_backend_keeps(app: Celery) -> None:
    app.conf.idempotency["large_results"] = "memory://results"
    task = declare(app, ignore_result=True)
    task.apply(("A",))
    assert payload_of(app).startswith(b"!reference:memory://results/")
    assert task.apply(("A",)).get()["text"] == LARGE
    assert task.runs == ["A"]


def test_a_place_that_cannot_be_opened_is_refused_when_the_task_is_declared(app: Celery) -> None:
    app.conf.idempotency = {"large_results": "s4://bucket"}
    with pytest.raises(ConfigurationError, match=r"large_results: expected a URL that fsspec knows"):
        declare(app)
