"""A task is published when Django commits, also with `IdempotentTask` in the place of Celery's own class."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import ConfigurationError
from tests.support.django_app.project import Project


def published(rolled_back: bool, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
    """Return how many messages there are before the end of the transaction, and after it."""
    from celery.signals import before_task_publish
    from django.db import transaction

    from tests.support.django_app.orders.tasks import charge

    keys: list[object] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        keys.append(headers)

    before_task_publish.connect(note)
    try:
        with transaction.atomic():
            getattr(charge, method)(*args, **options)
            before = len(keys)
            transaction.set_rollback(rolled_back)
    finally:
        before_task_publish.disconnect(note)
    return before, len(keys)


@pytest.mark.parametrize(
    ("method", "args", "options"),
    [
        ("delay_on_commit", ("ORD-1", 999), {}),
        ("apply_async_on_commit", (("ORD-1", 999),), {"idempotency_key": "req-1"}),
    ],
)
def test_a_call_is_published_by_the_commit_alone(
    sqlite_project: Project, method: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert sqlite_project.run(published, False, method, args, options) == (0, 1)
    assert sqlite_project.run(published, True, method, args, options) == (0, 0)


@pytest.mark.parametrize(
    ("method", "args", "options"),
    [
        ("delay_on_commit", ("ORD-1", 999), {"idempotency_key": "req-1"}),
        ("apply_async_on_commit", (("ORD-1", 999),), {"idempotency_kee": "req-1"}),
        ("apply_async_on_commit", (), {"kwargs": {"idempotency_key": "req-1"}}),
        ("apply_async_on_commit", ((), {"idempotency_key": "req-1"}), {}),
    ],
)
def test_a_mistaken_key_is_refused_before_the_commit(
    sqlite_project: Project, method: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="idempotency_key"):
        sqlite_project.run(published, True, method, args, options)


def test_without_django_the_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("shop", set_as_current=False, broker="memory://")

    @app.task(base=IdempotentTask)
    def ship(order_id: str) -> None: ...

    monkeypatch.setitem(sys.modules, "django.db", None)
    with pytest.raises(ConfigurationError, match="Expected Django"):
        ship.delay_on_commit("ORD-1")
