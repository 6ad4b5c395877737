"""The admin shows records, explains them, changes none, and reads no further than it shows."""

from __future__ import annotations

import html
import re
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest

from tests.django_app.test_migrations import STORE, opened
from tests.support.django_app.project import Project

RECORDS = "/admin/celery_idempotent/record/"
SECRET = "secret-result"


def remember(key: str) -> str:
    """Have the store remember an operation that is done, and return its key."""
    from celery_idempotent.stores import Claim, HistoryEntry, Lease, Outcome, State
    from tests.support.django_app.orders.tasks import charge

    store, name = opened(), charge.key_for(order_id=key, cents=1)
    lease = store.acquire(Claim(key=name, owner=uuid4().hex, task_id=key, lease_ttl=60.0, keep_ttl=60.0))
    assert isinstance(lease, Lease)
    store.append_history([HistoryEntry(name, '{"event": "Deferred", "task_id": "<b>", "copy": 1}', ago=1.0, keep=60.0)])
    store.settle(lease, Outcome(State.COMPLETED, SECRET.encode()), ttl=60.0)
    return name


def hold(key: str) -> str:
    from celery_idempotent.stores import Claim
    from tests.support.django_app.orders.tasks import charge

    name = charge.key_for(order_id=key, cents=1)
    opened().acquire(Claim(key=name, owner=uuid4().hex, task_id=key, lease_ttl=60.0, keep_ttl=60.0, holder="worker:1"))
    return name


def client(*, may: bool = True) -> Any:
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    name = uuid4().hex
    user = User.objects.create_user(name, password="x", is_staff=True)
    if may:
        user.user_permissions.add(Permission.objects.get(codename="view_record"))
    found = Client()
    found.force_login(user)
    return found


def page(query: str = "", *, may: bool = True) -> tuple[int, str]:
    """Return the status and the text of a page."""
    answer = client(may=may).get(f"{RECORDS}{query}")
    text = answer.content.decode()
    return answer.status_code, html.unescape(re.sub(r"\s+", " ", text.partition('id="content"')[2] or text))


def page_of(key: str) -> tuple[int, str]:
    from django.contrib.admin.utils import quote

    return page(f"{quote(key)}/change/")


def changes(key: str) -> list[int]:
    """Return the statuses of requests that would change something."""
    from django.contrib.admin.utils import quote

    paths = ("add/", f"{quote(key)}/delete/", f"{quote(key)}/change/")
    return [client().post(f"{RECORDS}{path}", {"post": "yes"}).status_code for path in paths]


def statements(query: str) -> list[str]:
    """Return the statements on the store's table."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as captured:
        page(query)
    return [each["sql"] for each in captured.captured_queries if '"expires"' in each["sql"]]


@pytest.mark.parametrize("query", ["{key}", "{id}", "orders.charge", "idem:orders"])
def test_records_are_found_by_key_task_and_number(project: Project, query: str) -> None:
    number = f"ORD-{uuid4().hex}"
    key = project.run(remember, number)
    status, text = project.run(page, f"?q={query.format(key=key, id=number)}")
    assert status == 200
    assert key in text
    assert "completed" in text
    assert SECRET not in text
    assert key not in project.run(page, "?q=ORD-none")[1]


def expire(key: str) -> None:
    from celery_idempotent.django.models import Record

    Record.objects.filter(key=key).update(expires=1)


def test_what_has_expired_is_not_shown(project: Project) -> None:
    key = project.run(remember, uuid4().hex)
    project.run(expire, key)
    assert key not in project.run(page, f"?q={key}")[1].replace(f'value="{key}"', "")


def test_what_is_in_progress_can_be_shown_alone(project: Project) -> None:
    done, held = project.run(remember, uuid4().hex), project.run(hold, uuid4().hex)
    _, text = project.run(page, "?state=in_progress")
    assert held in text
    assert "lease until" in text
    assert done not in text


def test_a_record_is_explained_without_its_result(project: Project) -> None:
    key = project.run(remember, uuid4().hex)
    status, text = project.run(page_of, key)
    assert status == 200
    assert "duplicates are answered with its result and do not run" in text
    assert "task <b> deferred: its copy 1" in text
    assert SECRET not in text


def test_what_workers_write_is_no_markup(sqlite_project: Project) -> None:
    key = sqlite_project.run(remember, uuid4().hex)
    assert b"task &lt;b&gt; deferred" in sqlite_project.run(raw_page, key)


def raw_page(key: str) -> bytes:
    from django.contrib.admin.utils import quote

    content: bytes = client().get(f"{RECORDS}{quote(key)}/change/").content
    return content


def test_nothing_can_be_changed(project: Project) -> None:
    key = project.run(hold, uuid4().hex)
    assert project.run(changes, key) == [403, 403, 403]
    assert project.run(page_of, key)[0] == 200


def page_without_right() -> int:
    return page(may=False)[0]


def test_to_see_records_takes_the_right_to_view_them(sqlite_project: Project) -> None:
    assert sqlite_project.run(page_without_right) == 403


def read_beyond(most: int) -> tuple[int, list[str]]:
    """Return how many records a list shows of so many at most, and its statements."""
    from celery_idempotent.django import admin

    for _ in range(most + 1):
        remember(uuid4().hex)
    with (
        mock.patch.object(admin, "MOST", most),
        mock.patch.object(admin.RecordAdmin, "list_max_show_all", most // 2),
        mock.patch.object(admin.RecordAdmin, "list_per_page", 1),
    ):
        shown = page("?q=orders.charge&all=")[1].count("orders.charge</td>")
        return shown, statements("?q=orders.charge&all=")


def test_nothing_counts_or_reads_more_records_than_are_listed(project: Project) -> None:
    shown, found = project.run(read_beyond, 4)
    assert shown == 1
    counted = [each for each in found if "COUNT" in each]
    assert counted
    assert all("LIMIT 4" in each for each in counted)
    assert all("LIMIT" in each or "IN (" in each for each in found)
    assert not any(word in each for each in found for word in ("LIKE", "payload"))


def test_where_no_store_is_in_a_database_there_are_no_records(sqlite_project: Project) -> None:
    assert sqlite_project.run(page, **{STORE: "memory://"})[0] == 403
    assert "expected a store in a database" in sqlite_project.run(read_records, **{STORE: "memory://"}).lower()


def read_records() -> str:
    from celery_idempotent.django.models import Record
    from celery_idempotent.errors import ConfigurationError

    try:
        return str(list(Record.objects.all()))
    except ConfigurationError as error:
        return str(error)
