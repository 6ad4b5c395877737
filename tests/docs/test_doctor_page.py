"""The guide on doctor lists what doctor says, shows what it prints, and the guide on production satisfies it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.cli.common import Exit
from celery_idempotent.cli.doctor import any_store, dynamodb, postgres, redis, rq, sqlite, stores
from celery_idempotent.cli.doctor.app import CHECKS
from celery_idempotent.cli.doctor.findings import OTHERS, Check
from tests.cli.conftest import by_app
from tests.doctor.test_app import CASES
from tests.support.docs.pages import PYTHON, ROOT, blocks
from tests.support.doctor.apps import app_with, charge
from tests.support.servers import RedisServer

PAGE = "docs/guides/doctor.md"
FINDINGS = "".join((ROOT / f"docs/guides/doctor-{name}.md").read_text(encoding="utf-8") for name in ("app", "stores"))
ROW = re.compile(r"^\| `([\w-]+)` \| ([\w, ]+) \| .+ \|$", re.MULTILINE)
ANY = {*OTHERS, "claims-refused", "reservation-orphaned", "slow-store"}
TABLES: dict[str, list[Check]] = {
    "The app": CHECKS,
    "RQ": rq.CHECKS,
    "Redis": redis.SERVER_CHECKS + redis.CHECKS,
    "PostgreSQL": postgres.CHECKS,
    "SQLite": sqlite.CHECKS,
    "DynamoDB": dynamodb.CHECKS,
    "Memory": stores.MEMORY_CHECKS,
}


def page() -> str:
    return (ROOT / PAGE).read_text(encoding="utf-8")


def table(title: str) -> dict[str, set[str]]:
    """Return the severities of each code that a section of the page lists."""
    section = FINDINGS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return {code: set(severities.split(", ")) for code, severities in ROW.findall(section)}


@pytest.mark.parametrize("title", TABLES)
def test_a_table_lists_what_doctor_can_say(title: str) -> None:
    assert table(title).keys() == {check.code for check in TABLES[title]} - ANY


def test_the_table_of_any_store_lists_the_rest() -> None:
    assert table("Any store").keys() == ANY


def test_the_severities_of_the_app_are_those_that_the_tests_have_seen() -> None:
    seen: dict[str, set[str]] = {}
    for case in CASES:
        seen.setdefault(case.code, set()).add(case.severity)
    assert table("The app") == seen


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a busy machine answers is not what is tested here."""
    monkeypatch.setattr(any_store, "SLOW", 5.0)


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    """A server with the settings that the checklist names."""
    checklist = (ROOT / "docs/guides/production.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"`(maxmemory-policy|appendonly|appendfsync) (\w+)`", checklist))
    assert named.keys() == {"maxmemory-policy", "appendonly", "appendfsync"}
    return own_redis(**named, maxmemory="200mb")


def test_the_page_shows_what_doctor_prints(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    urls = {"broker": server.url(0), "idempotency_store": server.url(1), "result_backend": server.url(2)}
    said = by_app(app_with(plain=True, policy={"key": "order_id", "lease_ttl": 2}, **urls), "doctor")
    assert said.status == Exit.NO
    assert said.out.replace(f"127.0.0.1:{server.port}", "localhost:6379") in page()


def test_the_settings_of_the_production_checklist_are_well(server: RedisServer) -> None:
    """The checklist: a database of its own, a short and refreshed timeout, a business key, a time limit."""
    source = next(
        block.text
        for block in blocks("docs/guides/production.md")
        if block.language == PYTHON and "visibility_timeout" in block.text
    )
    names: dict[str, Any] = {}
    exec(source.replace("redis://localhost/0", server.url(0)), names)
    app: Celery = names["app"]
    app.conf.update(result_backend=server.url(2), idempotency_store=server.url(1), task_time_limit=120)
    for name in [name for name in app.tasks if name.startswith("pytest_celery.")]:
        app.tasks.unregister(name)
    options = {"key": "order_id", "lease_ttl": "30s", "result_ttl": "7d"}
    app.task(charge, name="charge", base=IdempotentTask, shared=False, idempotency=options)
    said = by_app(app, "doctor", "--json", "--strict")
    report = json.loads(said.out)
    wrong = [each for section in report["sections"] for each in section["findings"] if each["severity"] != "ok"]
    assert (said.status, wrong) == (Exit.OK, [])


def test_the_statuses_of_the_page_are_those_of_every_command() -> None:
    section = page().partition("| exit status |")[2].partition("\n\n")[0]
    told = {int(number) for number in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert told == {Exit.OK, Exit.NO, Exit.USAGE, Exit.UNREACHABLE, Exit.REFUSED}
