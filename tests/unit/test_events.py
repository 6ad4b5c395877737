"""What happened is told to everybody who asked, and what they make of it hurts nobody."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from rq.timeouts import HorseMonitorTimeoutException, JobTimeoutException

from celery_idempotent import events
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.events import (
    Acquired,
    Completed,
    Conflicted,
    CrashLooped,
    Deferred,
    Event,
    Failed,
    KeyReused,
    LeaseLost,
    PublishRepeated,
    PublishReplaced,
    PublishSkipped,
    RanUnprotected,
    Released,
    ReleaseFailed,
    Replayed,
    SettleFailed,
    StoreFailed,
    StoreRecovered,
    Superseded,
    TakenOver,
    add_counter,
    add_hook,
    emit,
    log,
    receivers,
    remove_counter,
    remove_hook,
)
from tests.support.unit.scripted import listening

LEVELS = {
    Acquired: logging.DEBUG,
    Completed: logging.DEBUG,
    Conflicted: logging.INFO,
    CrashLooped: logging.ERROR,
    Deferred: logging.INFO,
    Failed: logging.INFO,
    LeaseLost: logging.WARNING,
    PublishRepeated: logging.INFO,
    PublishReplaced: logging.INFO,
    PublishSkipped: logging.INFO,
    RanUnprotected: logging.WARNING,
    Released: logging.INFO,
    ReleaseFailed: logging.ERROR,
    Replayed: logging.INFO,
    KeyReused: logging.ERROR,
    SettleFailed: logging.ERROR,
    StoreFailed: logging.ERROR,
    StoreRecovered: logging.WARNING,
    Superseded: logging.INFO,
    TakenOver: logging.WARNING,
}

heard = pytest.fixture(listening)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, logger="celery_idempotent"):
        yield caplog


def test_every_event_has_its_level() -> None:
    public = {getattr(events, name) for name in events.__all__}
    assert {kind for kind in public if isinstance(kind, type) and issubclass(kind, Event)} - {Event} == set(LEVELS)


@pytest.mark.parametrize("kind", LEVELS, ids=lambda kind: kind.__name__)
def test_an_event_is_logged_at_the_level_it_deserves(kind: type[Event], lines: pytest.LogCaptureFixture) -> None:
    log(kind("k"))
    assert [(line.levelno, line.name, line.getMessage()) for line in lines.records] == [
        (LEVELS[kind], "celery_idempotent", f"{kind.__name__} key=k")
    ]


def test_a_line_says_what_is_known_and_leaves_out_what_is_not(lines: pytest.LogCaptureFixture) -> None:
    log(TakenOver("idem:t:k", "shop.charge", "id-1", fence=7))
    assert lines.records[0].getMessage() == "TakenOver key=idem:t:k task=shop.charge task_id=id-1 fence=7"


def test_a_line_is_one_and_commands_no_terminal_whatever_a_field_holds(lines: pytest.LogCaptureFixture) -> None:
    log(TakenOver("k", "t", "evil\x1b[2J\nTakenOver key=other"))
    [line] = lines.records
    assert line.getMessage() == "TakenOver key=k task=t task_id=evil\\x1b[2J\\nTakenOver key=other"
    assert line.__dict__["data"]["task_id"] == "evil\x1b[2J\nTakenOver key=other"


def test_a_line_carries_its_data_for_structured_logs(lines: pytest.LogCaptureFixture) -> None:
    log(Deferred("k", "t", "i", delay=0.5, copy=2))
    line: Any = lines.records[0]
    assert line.event == "Deferred"
    assert line.data == {"key": "k", "task": "t", "task_id": "i", "holder": "", "delay": 0.5, "copy": 2}


def test_what_collects_errors_makes_one_issue_of_each_kind_whatever_the_lines_are_about(
    lines: pytest.LogCaptureFixture,
) -> None:
    """Sentry and the like group lines by what was to be formatted: a muted issue must not mute another kind."""
    for key in ("A", "B%"):
        log(SettleFailed(key))
        log(KeyReused(key))
    assert {line.msg for line in lines.records} == {"SettleFailed %s", "KeyReused %s"}
    assert lines.records[-1].getMessage() == "KeyReused key=B%"


def test_what_nobody_listens_to_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="celery_idempotent"):
        emit(Acquired("k"))
        emit(Replayed("k"))
    assert [line.getMessage() for line in caplog.records] == ["Replayed key=k"]


def test_an_event_without_more_is_told_with_its_key_alone() -> None:
    for kind in LEVELS:
        rest = [getattr(kind("k"), field.name) for field in dataclasses.fields(kind)[1:]]
        assert set(rest) <= {"", 0}, kind


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Acquired("k").key = "other"  # type: ignore[misc]


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_every_event_is_logged_unless_somebody_takes_the_log_away(lines: pytest.LogCaptureFixture) -> None:
    emit(Replayed("k"))
    remove_hook(log)
    try:
        emit(Replayed("k"))
    finally:
        add_hook(log)
    assert len(lines.records) == 1


def test_a_hook_hears_every_event_until_it_is_removed(heard: list[Event]) -> None:
    emit(Acquired("k"))
    emit(Completed("k"))
    remove_hook(heard.append)
    emit(Acquired("k"))
    assert heard == [Acquired("k"), Completed("k")]


def test_a_hook_may_hear_some_kinds_alone_and_be_asked_each_time() -> None:
    heard: list[Event] = []
    kinds: set[type[Event]] = {Completed}
    add_hook(heard.append, kinds)
    try:
        assert [bool(receivers(Completed)), receivers(Acquired)] == [True, []]
        emit(Acquired("k"))
        emit(Completed("k"))
        emit(TakenOver("k"))  # a class is no sign for its subclasses
        kinds.add(Acquired)
        emit(Acquired("k"))
        assert receivers(Acquired)
    finally:
        remove_hook(heard.append)
    assert heard == [Completed("k"), Acquired("k")]
    assert not receivers(Completed)


@pytest.mark.parametrize(
    "kinds",
    [{"LeaseLost"}, {Event}, {LeaseLost, Event}, [LeaseLost("k")], {int}, "LeaseLost", LeaseLost],
    ids=["names", "base", "base too", "an event", "no event", "a name", "a class"],
)
def test_kinds_of_which_no_event_is_are_refused(kinds: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected kinds to be a set .* got .*LeaseLost|int|Event.*\. Name"):
        add_hook(print, kinds)
    assert not any(hook is print for hook, _ in events._hooks)


async def _pager(event: Event) -> None:
    """Be a coroutine that nothing would await."""


class _Pager:
    async def __call__(self, event: Event) -> None:
        """Be one too."""


@pytest.mark.parametrize("hook", [_pager, _Pager(), partial(_pager), "pager"], ids=["def", "object", "partial", "text"])
def test_a_hook_that_cannot_be_called_as_a_function_is_refused(hook: Any) -> None:
    before = len(events._hooks)
    with pytest.raises(ConfigurationError, match="Expected a hook to be a function of one event, without async, got"):
        add_hook(hook)
    assert len(events._hooks) == before


def test_the_log_hears_what_its_logger_writes(caplog: pytest.LogCaptureFixture) -> None:
    [kinds] = [kinds for hook, kinds in events._hooks if hook is log]
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        with caplog.at_level(level, logger="celery_idempotent"):
            assert {kind for kind in LEVELS if kind in kinds} == {kind for kind in LEVELS if LEVELS[kind] >= level}


def test_a_hook_that_was_not_added_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="not in list"):
        remove_hook(lambda event: None)


def test_a_hook_that_raises_is_logged_and_hurts_nobody(lines: pytest.LogCaptureFixture) -> None:
    after: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no such table")

    add_hook(broken)
    add_hook(after.append)
    try:
        emit(Failed("k"))
    finally:
        remove_hook(broken)
        remove_hook(after.append)
    assert after == [Failed("k")]
    line = lines.records[-1]
    assert line.levelno == logging.ERROR
    assert "test_a_hook_that_raises" in line.getMessage()
    assert line.getMessage().endswith("failed on Failed")
    assert "no such table" in lines.text


def test_what_ends_the_process_passes_a_hook() -> None:
    def stop(event: Event) -> None:
        raise SystemExit(1)

    add_hook(stop)
    try:
        with pytest.raises(SystemExit):
            emit(Failed("k"))
    finally:
        remove_hook(stop)


def time_limits() -> list[Exception]:
    """Return what Celery's and RQ's workers raise."""
    return [SoftTimeLimitExceeded(), JobTimeoutException("too long"), HorseMonitorTimeoutException("too long")]


@pytest.mark.parametrize("limit", time_limits(), ids=lambda limit: type(limit).__name__)
def test_a_time_limit_that_rings_in_a_hook_is_the_tasks_and_other_hooks_get_the_event(
    limit: Exception, heard: list[Event]
) -> None:
    def slow(event: Event) -> None:
        raise limit

    remove_hook(heard.append)
    add_hook(slow)
    add_hook(heard.append)
    try:
        with pytest.raises(type(limit)) as caught:
            emit(Failed("k"))
    finally:
        remove_hook(slow)
    assert (caught.value, heard) == (limit, [Failed("k")])


@pytest.mark.parametrize("limit", time_limits(), ids=lambda limit: type(limit).__name__)
def test_a_time_limit_that_rings_while_receivers_are_found_is_the_tasks(limit: Exception) -> None:
    def slow(kind: type[Event]) -> None:
        raise limit

    add_counter(slow)
    try:
        with pytest.raises(type(limit)):
            receivers(Failed)
    finally:
        remove_counter(slow)


def test_a_hook_may_remove_itself_while_others_wait_for_the_event(heard: list[Event]) -> None:
    def once(event: Event) -> None:
        remove_hook(once)

    remove_hook(heard.append)
    add_hook(once)
    add_hook(heard.append)
    emit(Failed("k"))
    assert heard == [Failed("k")]
