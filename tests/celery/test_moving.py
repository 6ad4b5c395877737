"""Tasks move here from celery-once and celery-singleton as docs/moving has it: by a class of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import celery_once.backends.redis
import celery_singleton.backends
import pytest
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_idempotent import IdempotentTask

Declare = Callable[..., Any]


@pytest.fixture
def declare(fresh_redis: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """A function that declares ``shop.reindex`` in an app of its own; all of them share broker, store and locks."""
    monkeypatch.setattr(celery_once.backends.redis, "redis", None)  # connections that outlive their app
    monkeypatch.setattr(celery_singleton.backends, "_backend", None)
    broker, store, locks = fresh_redis(), fresh_redis(), fresh_redis()
    apps = []

    def declare(**options: Any) -> Any:
        app = Celery("shop", broker=broker, backend="disabled://", set_as_current=False)
        app.conf.update(idempotency_store=store, singleton_backend_url=locks, task_ignore_result=True)
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}
        apps.append(app)

        def reindex(document: int) -> int:
            return document

        return app.task(name="shop.reindex", lazy=False, **options)(reindex)

    yield declare
    for app in apps:
        app.close()


class OnceMoving(QueueOnce, IdempotentTask):  # type: ignore[misc]
    """The first step from celery-once."""

    abstract = True


class OnceLeaving(OnceMoving):
    """The second."""

    abstract = True
    apply_async = IdempotentTask.apply_async


class SingletonMoving(Singleton, IdempotentTask):  # type: ignore[misc]
    """The first step from celery-singleton."""

    abstract = True


class SingletonLeaving(SingletonMoving):
    """The second."""

    abstract = True
    apply_async = IdempotentTask.apply_async


PATHS = pytest.mark.parametrize(
    ("old", "moving", "leaving", "options"),
    [
        (QueueOnce, OnceMoving, OnceLeaving, {"once": {"keys": ["document"], "graceful": True}}),
        (Singleton, SingletonMoving, SingletonLeaving, {"unique_on": ["document"]}),
    ],
    ids=["celery-once", "celery-singleton"],
)
OURS = {"unique": {"key": "document", "until": "done"}, "idempotency": {"key": "document", "result_ttl": 0}}


def waiting(task: Any) -> int:
    with task.app.connection_for_read() as connection:
        return int(connection.default_channel._size("celery"))


def run(task: Any) -> None:
    """Run the message that waits, as a worker of this app does."""
    with task.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=True)
        assert message is not None
        task.apply((7,), task_id=message.headers["id"], headers=dict(message.headers)).get()


@PATHS
def test_a_class_of_both_shares_the_locks_of_the_old_one_as_it_publishes_and_when_it_has_run(
    declare: Declare, old: type, moving: type, leaving: type, options: dict[str, Any]
) -> None:
    before, first = declare(base=old, **options), declare(base=moving, idempotency=OURS["idempotency"], **options)
    for publisher, other in ((before, first), (first, before)):
        publisher.delay(7)
        other.delay(7)
        assert waiting(before) == 1
        run(first)


@PATHS
def test_a_class_that_publishes_as_ours_frees_the_locks_of_the_messages_before_and_takes_none(
    declare: Declare, old: type, moving: type, leaving: type, options: dict[str, Any]
) -> None:
    first, second = (
        declare(base=moving, idempotency=OURS["idempotency"], **options),
        declare(base=leaving, **OURS, **options),
    )
    first.delay(7)
    run(second)
    second.delay(7)
    second.delay(7)
    assert waiting(second) == 1
    first.delay(7)  # whose lock the run above has freed, and the call above has not taken
    assert waiting(second) == 2


@PATHS
def test_the_class_of_the_end_shares_the_reservations_of_the_one_before(
    declare: Declare, old: type, moving: type, leaving: type, options: dict[str, Any]
) -> None:
    second, third = declare(base=leaving, **OURS, **options), declare(base=IdempotentTask, **OURS)
    for publisher, other in ((second, third), (third, second)):
        publisher.delay(7)
        other.delay(7)
        assert waiting(third) == 1
        run(other)
