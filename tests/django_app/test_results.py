"""Results in Django's database, as django-celery-results keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.django_app.project import Project, sqlite

#: Its package, and a project of its own, take longer than all else here.
pytestmark = pytest.mark.nightly
APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_celery_results"]
BODY = {"task": "tests.body", "args": [], "kwargs": {}, "options": {"task_id": "B1"}, "chord_size": 2}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project that was migrated, whose times have the zone of its process."""
    file = tmp_path_factory.mktemp("results") / "db.sqlite3"
    project = Project(DATABASES={"default": sqlite(file)}, INSTALLED_APPS=APPS, USE_TZ=False, TIME_ZONE="Asia/Tokyo")
    project.manage("migrate", "-v0")
    yield project
    project.stop()


class Died(BaseException):
    """Stands for the death of a process, in a place where only a debugger could stop it."""


def delivered(messages: list[str]) -> tuple[list[Any], list[str], list[str]]:
    """Deliver messages of a chord's two members; return what its body is published with, what ran, what notes are left.

    Arguments:
        messages: The number of the member, and "fails" or "dies" where this run of it does so, which dies once it has
            settled and before it returns its part.
    """
    from celery import Celery, Signature
    from celery.app.trace import build_tracer
    from django_celery_results.models import ChordCounter, GroupResult, TaskResult

    from celery_idempotent import IdempotentTask
    from celery_idempotent.celery import canvas

    app, ran, bodies, ending = Celery("parts", backend="django-db", set_as_current=False), [], [], [""]
    app.conf.update(idempotency_store="memory://", broker_url="memory://", result_chord_join_timeout=0.0)
    app.conf.result_backend_always_retry = False

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"}, shared=False, name="member")
    def member(order_id: str) -> str:
        ran.append(order_id)
        if ending[0] == "fails":
            raise ValueError(order_id)
        return order_id

    app.finalize()
    for model in (ChordCounter, GroupResult, TaskResult):
        model._default_manager.all().delete()
    member.backend.apply_chord(app.GroupResult("G1", [app.AsyncResult("T1"), app.AsyncResult("T2")]), BODY)
    kind = type(member.backend)
    dying = mock.patch.object(kind, "on_chord_part_return", mock.Mock(side_effect=Died, counts_once=True))
    with (
        mock.patch.object(Signature, "delay", lambda self, value: bodies.append(value)),
        mock.patch.object(kind, "chord_error_from_stack", side_effect=lambda *_, **__: bodies.append("failed")),
        mock.patch.object(canvas, "RETURNING", 0.0),
    ):
        for message in messages:
            number, _, ending[0] = message.partition(" ")
            request = {"id": f"T{number}", "group": "G1", "chord": {**BODY}, "task": member.name, "delivery_info": {}}
            request.update(args=(f"ORD-{number}",), kwargs={})
            trace = build_tracer(member.name, member, app=app)
            if ending[0] == "dies":
                with dying, pytest.raises(Died):
                    trace(f"T{number}", (f"ORD-{number}",), {}, request)
            else:
                trace(f"T{number}", (f"ORD-{number}",), {}, request)
    return bodies, ran, [*GroupResult.objects.values_list("group_id", flat=True)]


@pytest.mark.parametrize(
    ("messages", "ran", "body"),
    [
        (["1", "1", "1", "2", "1", "2"], ["ORD-1", "ORD-2"], ["ORD-1", "ORD-2"]),
        (["1 fails", "1", "2", "1"], ["ORD-1", "ORD-1", "ORD-2"], ["ORD-1", "ORD-2"]),
        (["1 fails", "1 fails", "2"], ["ORD-1", "ORD-1", "ORD-2"], "failed"),
        (["1 dies", "1", "1", "2"], ["ORD-1", "ORD-2"], ["ORD-1", "ORD-2"]),
        (["1", "2 dies", "2"], ["ORD-1", "ORD-2"], ["ORD-1", "ORD-2"]),
    ],
)
def test_a_member_that_is_redelivered_returns_its_part_of_a_chord_once(
    project: Project, messages: list[str], ran: list[str], body: object
) -> None:
    """Its backend counts parts by number: the chord would never end."""
    assert project.run(delivered, messages) == ([body], ran, [])


def noted() -> tuple[datetime, list[bool]]:
    """Store a result; return when it was, and whether that is known to be after a minute ago, and in a minute."""
    from celery import Celery

    from celery_idempotent.celery.app import is_done_since

    backend, now = Celery("times", backend="django-db", set_as_current=False).backend, time.time()
    backend.mark_as_done("T3", "done")
    meta = backend.get_task_meta("T3")
    return meta["date_done"], [is_done_since(backend, meta, now + seconds) for seconds in (-60, 60)]


def test_without_use_tz_the_time_of_a_result_is_that_of_the_process(project: Project, tmp_path: Path) -> None:
    done, since = project.run(noted)
    assert done.tzinfo is None
    assert since == [True, False]
