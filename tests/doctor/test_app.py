"""What doctor says of an app: each finding where something is wrong, and none where it is right."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from celery.schedules import crontab, schedule, solar

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import schedule_purge
from celery_idempotent.cli.doctor.app import CHECKS, checkup
from celery_idempotent.cli.doctor.app_config import shortest_interval
from celery_idempotent.cli.doctor.findings import Finding, Severity
from celery_idempotent.errors import ConfigurationError
from tests.support.doctor.apps import REDIS, SHORT, app_with, charge, resize
from tests.support.doctor.wards import by_code, severities


def found_of(app: Celery) -> dict[str, Finding]:
    section, targets = checkup(app)
    for target in targets:
        target.store.close()
    return by_code([section])


@dataclass(frozen=True)
class Case:
    """One thing that is wrong.

    Arguments:
        code: What is said of it.
        severity: How bad that is.
        wrong: How the app differs from what it should be.
        beside: What else is said of that.
        right: How it differs where the same thing is right, if the app as it should be has no say in it.
    """

    code: str
    severity: str
    wrong: dict[str, Any]
    beside: dict[str, str] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}-{self.severity}"


class InContext(Task):
    """An app's own class, as the one of Flask's documentation."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class InContextToo(InContext, IdempotentTask):
    abstract = True


KEY: dict[str, Any] = {"key": "order_id"}
SQS, AMQP = {"broker": "sqs://"}, {"broker": "amqp://"}
SQS_SAYS = {"redelivered-unknown": "info"}
AMQP_SAYS = {"publishes-unconfirmed": "info"}
HOUR = {"options": {"visibility_timeout": 3600}}
UNREFRESHED = {"idempotency_visibility_refresh": False}
LATE = {"beat": {"options": {"countdown": 7200}}}

ORDER = {"beat": {"args": ("ORD-1",)}}
HOURLY: dict[str, Any] = {"args": ("A",), "schedule": crontab(minute="0")}
DAILY: dict[str, Any] = {"args": ("A",), "schedule": crontab(minute="0", hour="4")}
FIXED: dict[str, Any] = {"policy": {**KEY, "result_ttl": "1h"}}

CASES = [
    Case("nothing-idempotent", "warning", {"idempotent": False}),
    Case(
        "base-missing",
        "error",
        {"idempotent": False, "plain_task": {"idempotency": KEY}},
        {"nothing-idempotent": "warning"},
        right={"plain": True},
    ),
    Case(
        "app-class-left-out",
        "warning",
        {"own_class": InContext},
        right={"own_class": InContext, "task": {"base": InContextToo}},
    ),
    Case("setting-unknown", "error", {"idempotency_stores": f"{REDIS}/1"}),
    Case("setting-unknown", "error", {"idempotence": {}}),
    Case("beat-option-unknown", "error", {"beat": {"options": {"idempotence_key": "k"}}}, right=LATE),
    # An interval as long as result_ttl is too short: the record is made after the tick.
    Case("beat-key-fixed", "error", ORDER, right={"beat": {}}),
    Case("beat-key-fixed", "error", {"beat": {"kwargs": {"order_id": "ORD-1"}, "schedule": timedelta(hours=24)}}),
    Case("beat-key-fixed", "error", {"beat": {"args": ("A",), "schedule": schedule(3600)}}),
    Case("beat-key-fixed", "error", {"beat": DAILY}, right={**FIXED, "beat": DAILY}),
    Case("beat-key-fixed", "error", {**FIXED, "beat": HOURLY}),
    Case("beat-key-fixed", "error", {"beat": {**HOURLY, "schedule": crontab(minute="0", hour="4,9", day_of_week="1")}}),
    Case(
        "beat-key-fixed",
        "error",
        {"policy": {"lease_ttl": 30}, "beat": {"options": {"idempotency_key": "nightly"}}},
        {"beat-without-key": "info"},
        right={"policy": {"key": ("order_id",), "result_ttl": 50}, **ORDER},
    ),
    Case(
        "beat-key-fixed",
        "error",
        {"policy": {"lease_ttl": 30}, "beat": {"options": {"task_id": "nightly"}}},
        right={"policy": {"key": ("order_id",), "result_ttl": 50}, "beat": {"options": {"task_id": "nightly"}}},
    ),
    Case(
        "beat-key-fixed",
        "warning",
        {"policy": {"key": lambda order_id: order_id}, **ORDER},
        right={"policy": {"key": lambda: "what the clock says"}, **ORDER},
    ),
    Case(
        "beat-key-fixed",
        "warning",
        {"policy": {"key": lambda order_id: order_id}, **ORDER},
        right={"policy": {"key": lambda order_id: str(uuid4())}, **ORDER},
    ),
    Case("plain-tasks", "info", {"plain": True}),
    Case("early-ack", "warning", {"policy": {**KEY, "allow_early_ack": True}, "task": {"acks_late": False}}),
    Case("lost-child-fails", "warning", {"task": {"reject_on_worker_lost": False}}),
    Case("failure-not-acked", "info", {"task": {"acks_on_failure_or_timeout": False}}),
    Case("failure-not-acked", "info", {"task": {"acks_on_timeout": False}}),
    Case("beat-without-key", "info", {"policy": {"lease_ttl": 30}, "beat": {}}, right={"beat": {}}),
    Case("runs-unprotected", "info", {"policy": {**KEY, "on_store_error": "run"}}),
    Case("lease-short", "warning", {"policy": {**KEY, "lease_ttl": 2}}),
    Case("lease-long", "warning", {"policy": {**KEY, "lease_ttl": "20m"}}),
    Case("lease-unbounded", "info", {"task_time_limit": None}, right={"task": {"soft_time_limit": 60}}),
    Case("lease-unbounded", "info", {"task_time_limit": 0}, right={"policy": {**KEY, "max_lease": "5m"}}),
    Case(
        "limits-not-enforced",
        "info",
        {"worker_pool": "threads"},
        right={"worker_pool": "threads", "policy": {**KEY, "max_lease": "15m"}},
    ),
    Case("lease-ends-before-limit", "warning", {"policy": {**KEY, "max_lease": 90}}),
    Case("result-ttl-short", "error", {"policy": {**KEY, "result_ttl": 20}}),
    Case("result-ttl-short", "error", {"policy": {**KEY, "result_ttl": "1h"}, **LATE}, right=LATE),
    Case("unique-not-shared", "error", {"task": {"unique": "order_id"}, "idempotency_store": "memory://"}),
    Case("unique-expires", "info", {"task": {"unique": "order_id", "expires": 60}}, right={"task": {"expires": 60}}),
    Case(
        "unique-expires",
        "info",
        {"task": {"unique": "order_id"}, "beat": {"options": {"expires": 50}}},
        right={"beat": {"options": {"expires": 50}}},
    ),
    Case("turns-without-key", "warning", {"policy": {"result_ttl": 0}}, right={"policy": {**KEY, "result_ttl": 0}}),
    Case("failure-ttl-short", "warning", {"policy": {**KEY, "failure_ttl": 20}}),
    Case("visibility-long", "warning", {"options": {}}, right=HOUR | SQS),
    Case("visibility-short", "warning", {"options": {**SHORT, "visibility_timeout": 5}}),
    Case("visibility-shorter-than-eta", "warning", {**SQS, **HOUR, **LATE}, SQS_SAYS, right=LATE),
    Case(
        "visibility-shorter-than-eta",
        "warning",
        {**HOUR, **UNREFRESHED, "task": {"autoretry_for": (OSError,), "default_retry_delay": 7200}},
        {"visibility-not-refreshed": "info"},
        right={"task": {"autoretry_for": (OSError,), "default_retry_delay": 7200}},
    ),
    Case("visibility-shorter-than-tasks", "warning", {**SQS, "options": {"visibility_timeout": 60}}, SQS_SAYS),
    Case("visibility-not-refreshed", "info", {**HOUR, **UNREFRESHED}),
    Case(
        "soft-shutdown-long",
        "warning",
        {"worker_soft_shutdown_timeout": 30.0},
        right={"worker_soft_shutdown_timeout": 10.0},
    ),
    Case(
        "restore-seldom",
        "info",
        {"options": {"visibility_timeout": 30}, **UNREFRESHED},
        {"visibility-not-refreshed": "info", "visibility-shorter-than-tasks": "warning"},
        right={"options": {"visibility_timeout": 30}},
    ),
    Case(
        "nobody-restores",
        "warning",
        {"worker_pool": "gevent", "policy": {**KEY, "max_lease": "15m"}, **HOUR, **UNREFRESHED},
        {"visibility-not-refreshed": "info"},
        right={"worker_pool": "gevent", "policy": {**KEY, "max_lease": "15m"}},
    ),
    Case(
        "nobody-restores",
        "warning",
        {"worker_pool": "solo", "policy": {**KEY, "max_lease": "15m"}},
        right={"worker_pool": "threads", "policy": {**KEY, "max_lease": "15m"}},
    ),
    Case("sqs-visibility", "error", {**SQS, "options": {"visibility_timeout": 50_000}}, SQS_SAYS, right=SQS | HOUR),
    Case("sqs-visibility", "warning", {**SQS, "options": {}}, SQS_SAYS, right=SQS | HOUR),
    Case("broker-forgets", "warning", {"broker": "memory://"}),
    Case("broker-forgets", "warning", {"broker": "filesystem://"}),
    Case("broker-forgets", "warning", {"broker": "sqla+sqlite:///broker.sqlite"}),
    Case("redelivered-unknown", "info", {**SQS, **HOUR}),
    Case("publishes-unconfirmed", "info", AMQP, right=AMQP | {"options": {"confirm_publish": True}}),
    Case("publishes-unconfirmed", "info", {"broker": "amqps://127.0.0.1//"}),
    Case(
        "consumer-timeout",
        "warning",
        {**AMQP, "task": {"time_limit": 3600}, "worker_prefetch_multiplier": 1},
        AMQP_SAYS,
        right={**AMQP, "task": {"time_limit": 3600}, "broker_channel_error_retry": True},
    ),
    Case("prefetch-long", "warning", {"worker_prefetch_multiplier": 0}),
    Case(
        "prefetch-long",
        "info",
        {"task": {"time_limit": 600}},
        right={"task": {"time_limit": 600}, "worker_prefetch_multiplier": 1},
    ),
    Case("cancels-on-connection-loss", "info", {"worker_cancel_long_running_tasks_on_connection_loss": True}),
    Case("deduplicates-twice", "info", {"worker_deduplicate_successful_tasks": True}),
    Case("runs-eagerly", "error", {"task_always_eager": True}),
    Case("result-backend-missing", "info", {"result_backend": None}, right={"task": {"ignore_result": True}}),
    Case(
        "results-not-kept",
        "info",
        {"policy": {**KEY, "store_result": False}},
        right={"policy": {**KEY, "store_result": False}, "task": {"ignore_result": True}},
    ),
    Case(
        "large-results-expire",
        "warning",
        {"policy": {**KEY, "large_results": "backend", "result_ttl": "7d"}},
        right={"policy": {**KEY, "large_results": "backend", "result_ttl": "7d"}, "result_expires": 7 * 86400},
    ),
    Case(
        "large-results-expire",
        "error",
        {"policy": {**KEY, "large_results": "backend"}, "result_backend": "rpc://"},
        right={"policy": {**KEY, "large_results": "backend"}, "result_expires": None},
    ),
    Case("store-unsaid", "info", {"idempotency_store": None}, {"store-shared": "warning"}),
    Case("store-shared", "warning", {"idempotency_store": f"{REDIS}/0"}),
    Case("store-shared", "warning", {"idempotency_store": "redis://localhost/2"}),
]


def test_an_app_as_the_guides_have_it_is_well() -> None:
    assert severities(found_of(app_with())) == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_wrong_is_said_with_what_to_do(case: Case) -> None:
    found = found_of(app_with(**case.wrong))
    assert severities(found) == {case.code: case.severity, **case.beside}
    assert found[case.code].remedy


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_right_is_not_said(case: Case) -> None:
    assert case.code not in severities(found_of(app_with(**case.right)))


def test_every_check_is_shown_both_ways() -> None:
    shown = {case.code for case in CASES}
    assert {check.code for check in CHECKS} == shown


def test_a_task_that_is_declared_wrongly_is_named_and_the_store_is_examined_all_the_same() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.idempotency_store = f"{REDIS}/1"
    app.task(charge, name="charge", base=IdempotentTask, shared=False, idempotency={"key": "ordr_id"})
    section, targets = checkup(app)
    finding = by_code([section])["configuration"]
    assert finding.severity is Severity.ERROR
    assert isinstance(finding.error, ConfigurationError)
    assert "charge" in finding.found
    assert "did you mean 'order_id'?" in finding.found
    assert [target.name for target in targets] == [f"{REDIS}/1"]


def test_a_module_that_is_not_there_is_one_finding() -> None:
    def load() -> None:
        raise ConfigurationError("there is no module 'tasks'")

    assert severities(by_code([checkup(app_with(), load)[0]])) == {"configuration": "error"}


def test_an_app_without_a_store_is_told_once() -> None:
    section, targets = checkup(app_with(idempotency_store=None, broker="amqp://", result_backend=None))
    assert targets == []
    wrong = [finding for finding in section.findings if finding.error]
    assert [finding.code for finding in wrong] == ["configuration"]
    assert "idempotency_store" in wrong[0].found


def test_a_wrong_url_is_told_without_its_password() -> None:
    found = found_of(app_with(idempotency_store="reddis://:hunter2@localhost/1"))
    assert severities(found) == {"configuration": "error"}
    assert "hunter2" not in str(found)


def test_tasks_that_are_alike_are_one_finding() -> None:
    app = app_with()
    for number in range(9):
        policy = {"key": "path", "lease_ttl": 2 + number / 10}
        app.task(resize, name=f"task-{number}", base=IdempotentTask, shared=False, idempotency=policy)
    found = found_of(app)["lease-short"]
    assert "lease_ttl is 2 s (task-0, task-1, task-2 and 6 more)" in found.found


@pytest.mark.parametrize("broker", ["rediss://127.0.0.1/0", "sentinel://127.0.0.1:26379/0", "redis://127.0.0.1/0"])
def test_redis_has_many_names(broker: str) -> None:
    options = {**SHORT, "master_name": "shop"}
    ssl = {"ssl_cert_reqs": 0} if broker.startswith("rediss") else None
    found = found_of(app_with(broker=broker, options=options, broker_use_ssl=ssl))
    assert severities(found) == {}
    assert found["broker-forgets"].found == "the broker is redis"


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("visibility-long", {"options": {"global_keyprefix": "shop"}}),
        ("visibility-shorter-than-eta", {**SQS, **LATE, "options": {"visibility_timeout": 3600, "region": "eu-1"}}),
        ("publishes-unconfirmed", {**AMQP, "options": {"read_timeout": 3}}),
    ],
)
def test_the_remedy_for_an_option_of_the_broker_keeps_the_others(code: str, wrong: dict[str, Any]) -> None:
    """Without its `global_keyprefix`, or with the default `sep` of its priorities, an app reads other queues."""
    remedy = found_of(app_with(**wrong))[code].remedy
    assert remedy.startswith("app.conf.broker_transport_options = {**app.conf.broker_transport_options, ")


def test_the_remedy_for_an_option_of_the_broker_is_as_short_as_it_can_be() -> None:
    remedy = found_of(app_with(options={}))["visibility-long"].remedy
    assert remedy.startswith('app.conf.broker_transport_options = {"visibility_timeout": 30}, ')


@pytest.mark.parametrize("task_cls", [InContextToo, IdempotentTask, "celery_idempotent:IdempotentTask"])
def test_the_apps_own_class_is_not_left_out_where_the_task_has_it(task_cls: Any) -> None:
    app = Celery("shop", broker=f"{REDIS}/0", set_as_current=False, task_cls=task_cls)
    app.conf.idempotency_store = f"{REDIS}/1"
    app.task(charge, name="charge", shared=False, idempotency=KEY)
    assert "app-class-left-out" not in severities(found_of(app))


def test_a_class_that_celery_itself_gives_to_the_app_is_none_of_its_own() -> None:
    """In Django it is one with `delay_on_commit`, which an idempotent task has too."""
    assert "app-class-left-out" not in severities(found_of(app_with(own_class=DjangoTask)))


def test_the_apps_own_class_is_named_with_what_it_does() -> None:
    finding = found_of(app_with(own_class=InContext))["app-class-left-out"]
    assert "InContext.__call__ of the app's own task class is not called for charge" in finding.found
    assert "class Base(InContext, IdempotentTask)" in finding.remedy


def test_a_purge_by_beat_is_known() -> None:
    app = app_with()
    assert [target.purged for target in checkup(app)[1]] == [False]
    schedule_purge(app)
    assert [target.purged for target in checkup(app)[1]] == [True]


def test_a_store_of_a_task_of_its_own_is_compared_too() -> None:
    found = found_of(app_with(policy={**KEY, "store": f"{REDIS}/0"}))
    assert severities(found) == {"store-shared": "warning"}


def test_a_store_that_is_no_redis_shares_nothing() -> None:
    assert "store-shared" not in found_of(app_with(idempotency_store="sqlite:///x.db"))


def test_the_remedy_for_a_shared_database_is_another_one() -> None:
    found = found_of(app_with(idempotency_store=f"{REDIS}/0"))
    assert 'idempotency_store = "redis://127.0.0.1:6379/1"' in found["store-shared"].remedy


@pytest.mark.parametrize(
    ("broker", "options", "remedy"),
    [
        ("rediss://:secret@db:6380/0?ssl_ca_certs=/ca.pem", SHORT, "rediss://db:6380/1?ssl_ca_certs=/ca.pem"),
        ("redis+socket:///run/redis.sock", SHORT, "unix:///run/redis.sock?db=1"),
        ("sentinel://db:26379/0", {**SHORT, "master_name": "orders"}, "redis+sentinel://sentinel/orders/1"),
    ],
)
def test_the_remedy_for_a_shared_database_is_of_the_same_server(
    broker: str, options: dict[str, Any], remedy: str
) -> None:
    app = app_with(broker=broker, options=options, idempotency_store=None, result_backend=None, task_ignore_result=True)
    assert f'idempotency_store = "{remedy}"' in found_of(app)["store-shared"].remedy


def test_that_remedy_has_what_the_settings_say_of_certificates() -> None:
    settings = {"ssl_cert_reqs": ssl.CERT_NONE, "ssl_certfile": "/own.pem"}
    app = app_with(broker="rediss://db:6380/0", idempotency_store=None, result_backend=None, broker_use_ssl=settings)
    found = found_of(app)["store-shared"].remedy
    assert '"rediss://db:6380/1?ssl_cert_reqs=CERT_NONE&ssl_certfile=/own.pem"' in found


def test_a_longer_visibility_is_rounded_up_and_no_longer_than_sqs_takes() -> None:
    for wait, longer in ((7200, 8640), (43_000, 43_200)):
        app = app_with(**{**SQS, **HOUR, "beat": {"options": {"countdown": wait}}})
        assert f'"visibility_timeout": {longer}' in found_of(app)["visibility-shorter-than-eta"].remedy


def test_the_sentence_says_what_makes_a_duplicate_late() -> None:
    wait = found_of(app_with(policy={**KEY, "result_ttl": "1h"}, **LATE))["result-ttl-short"]
    assert "7200 s late (the beat entry 'nightly')" in wait.found
    broker = found_of(app_with(policy={**KEY, "result_ttl": 20}))["result-ttl-short"]
    assert "30 s late (the visibility_timeout of the broker)" in broker.found


def test_tasks_are_counted() -> None:
    app = app_with()
    assert found_of(app)["nothing-idempotent"].found == "1 idempotent task"
    app.task(resize, name="resize", base=IdempotentTask, shared=False, idempotency={"key": "path"})
    assert found_of(app)["nothing-idempotent"].found == "2 idempotent tasks"


class Solar:
    """Stand for a schedule of which nothing is known but that it is one."""

    def __str__(self) -> str:
        return "somebody's own"


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        (90, 90),
        (timedelta(minutes=5), 300),
        (schedule(3600), 3600),
        (crontab(), 60),
        (crontab(minute="*/15"), 900),
        (crontab(minute="0,5"), 300),
        (crontab(minute="0", hour="4"), 86_400),
        (crontab(minute="0", hour="4", day_of_week="1-5"), 86_400),
        (crontab(minute="0", hour="4", day_of_week="1"), 7 * 86_400),
        (crontab(minute="0", hour="4", day_of_month="1"), 28 * 86_400),
        (Solar(), None),
        ("soon", None),
    ],
    ids=str,
)
def test_the_shortest_time_between_two_messages_of_a_beat_entry(when: object, seconds: float | None) -> None:
    found = shortest_interval(when, Celery("beat", set_as_current=False))
    assert found == pytest.approx(seconds, abs=31 * 86_400 - 28 * 86_400 if seconds and seconds > 8 * 86_400 else 1e-6)


def test_a_schedule_by_the_sun_comes_about_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    sunset = object.__new__(solar)  # making one wants ephem, which no wheel of every Python has
    assert shortest_interval(sunset, Celery("beat", set_as_current=False)) == pytest.approx(86_400, rel=0.01)


def test_the_sentence_names_the_entry_and_the_remedy_both_ways_out() -> None:
    """Half the interval leaves room for a run that came late: beat, restarted, publishes at once what it has missed."""
    found = found_of(app_with(**ORDER))["beat-key-fixed"]
    assert "'nightly' publishes charge every 60 s" in found.found
    assert "remembered for 86400 s" in found.found
    assert 'idempotency={"key": "order_id", "result_ttl": 30}, half the interval' in found.remedy
    assert "leave the key out" in found.remedy


def test_a_setting_is_named_with_what_was_meant() -> None:
    assert "idempotency_store" in found_of(app_with(idempotency_stores="x"))["setting-unknown"].remedy
    assert "leave it out" in found_of(app_with(idempotency_zzzzzzzzzzzzzzzzzzzzzzzzzz="x"))["setting-unknown"].remedy


async def coroutine(order_id: str) -> None: ...


@pytest.mark.parametrize(
    ("body", "options", "settings", "words"),
    [
        (charge, {"key": "order_id"}, {}, 'Write idempotency={"key"'),
        (charge, {"idempotency": {"key": "order.id"}}, {}, "key=lambda order: order.id"),
        (charge, {"base": None, "idempotency": KEY}, {}, "got charge without it"),
        (coroutine, {}, {}, "asyncio.run"),
        (charge, {}, {"idempotency_store": f"{REDIS}/1?wait_replica=1"}, "Did you mean wait_replicas?"),
        (charge, {}, {"idempotency_store": "localhost:6379/1"}, "Did you mean redis://localhost:6379/1?"),
    ],
    ids=["option beside", "key of a part", "no base", "coroutine", "parameter", "scheme"],
)
def test_what_is_refused_when_declared_is_an_error_of_doctors(
    body: Any, options: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"idempotency_store": f"{REDIS}/1", **settings})
    app.task(body, name="charge", shared=False, **{"base": IdempotentTask, **options})
    app.task(resize, name="resize", base=IdempotentTask, shared=False)
    finding = found_of(app)["configuration"]
    assert finding.severity is Severity.ERROR
    assert words in finding.found
