"""``explain``: the history of a key in order, and the meaning of its record, in sentences."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from ..core.reservations import WaitingMessage
from ..stores.records import Reason, Record, State, is_reservation
from ..units import clean, format_duration
from .common import KeyCommand, Stores, stores_of
from .search import selected_keys
from .show import facts_of_record, unknown
from .tables import task_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore
    from ..stores.records import PastEvent


#: Columns of a line where the terminal's are not known.
COLUMNS = 80


@click.command("explain", cls=KeyCommand)
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each record, ids as they are.")
@click.pass_context
def command(ctx: click.Context, key: str | None, as_json: bool) -> None:
    """Explain what happened to KEY, and what that means.

    In order: who took it over, what was deferred, replayed, retried or lost. A first run that simply completed is
    shown by its record alone. Exits with 1 if nothing is known of the key.
    """
    stores = stores_of(ctx)
    for each in selected_keys(ctx, stores, [key] if key else [], guess=True):
        _explain(stores, each, as_json=as_json)
    ctx.exit(stores.status)


def _explain(stores: Stores, key: str, *, as_json: bool) -> None:
    known = 0
    for used, (record, history) in stores.each(lambda used: _found(used, key)):
        if record is None and not history:
            continue
        known += 1
        name = "" if stores.one else used.name
        click.echo(_as_json(key, name, record, history) if as_json else _as_text(key, name, record, history))
    if not known and not stores.status:
        unknown(stores, key)


def _found(used: NamedStore, key: str) -> tuple[Record | None, Sequence[PastEvent]]:
    return used.store.get(key), used.store.history(key)


def _as_json(key: str, store: str, record: Record | None, history: Sequence[PastEvent]) -> str:
    from ..stores.history import facts_of

    now = datetime.now(timezone.utc)
    facts: dict[str, Any] = {"key": key, **({"store": store} if store else {})}
    facts["history"] = [
        {
            "at": (now - timedelta(seconds=noted.age)).isoformat(timespec="milliseconds"),
            "ago": round(noted.age, 3),
            **facts_of(noted.text),
        }
        for noted in history
    ]
    facts["now"] = None if record is None else facts_of_record(record)
    return json.dumps({**facts, "advice": advice(record)})


def _as_text(key: str, store: str, record: Record | None, history: Sequence[PastEvent]) -> str:
    width = min(max(shutil.get_terminal_size((COLUMNS, 0)).columns, 40), 120)
    lines = [clean(f"{key} in {store}" if store else key), *_lines(history, width)]
    for title, text in (("Now", describe_standing(record, history)), ("What this means", advice(record))):
        lines += textwrap.wrap(f"{title}: {clean(text)}", width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def describe_standing(record: Record | None, history: Sequence[PastEvent]) -> str:
    """Return how things stand; a release by an operator is recorded as that of a worker that was stopped."""
    from ..stores.history import facts_of

    last = facts_of(history[-1].text)["event"] if history else ""
    if record is not None and record.state is State.RELEASED and last == "ReleasedByOperator":
        return "released: by an operator"
    return describe_record(record)


def _lines(history: Sequence[PastEvent], width: int) -> list[str]:
    from ..stores.history import facts_of

    now = datetime.now()
    times = [_time(now, noted.age) for noted in history]
    ages = [f"({format_duration(noted.age)} ago)" for noted in history]
    widest, oldest = max(map(len, times), default=0), max(map(len, ages), default=0)
    lines: list[str] = []
    for when, age, noted in zip(times, ages, history, strict=True):
        begin = f"  {when:>{widest}}  {age:<{oldest}}  "
        text = clean(describe_event(facts_of(noted.text)))
        indent = " " * len(begin)
        lines += textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False) or [
            begin.rstrip()
        ]
    return lines


def _time(now: datetime, age: float) -> str:
    then = now - timedelta(seconds=age)
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_RELEASED = {
    Reason.DONE: "the run succeeded, and its task has result_ttl=0",
    Reason.FAILED: "the run failed, and the next delivery may run",
    Reason.RETRY: "the task retries",
    Reason.CRASHED: "its process died",
    Reason.SHUTDOWN: "its worker was stopped",
    Reason.REVOKED: "an operator revoked it",
    Reason.REJECTED: "the task rejected its message",
    Reason.REQUEUED: "the message goes back to its queue",
    Reason.CRASH_LOOP: "its holders kept dying",
    Reason.STARTED: "its message has begun",
}


def _why(reason: str) -> str:
    """Return the reason of a release in words; one of a newer version as it is."""
    return _RELEASED[Reason(reason)] if reason in set(Reason) else reason


def _task(task_id: object) -> str:
    """Return a task id so that a line has room for two; JSON has them whole."""
    text = str(task_id or "")
    return f"task {text[:8]}..." if _UUID.fullmatch(text) else f"task {text}" if text else "the same task"


def _duration(seconds: object) -> str:
    """Return a duration in words; what is none, as of a newer version or another program, as it is."""
    return format_duration(seconds) if isinstance(seconds, (int, float)) else str(seconds)


def _crashes(count: int) -> str:
    return f"{count} crash{'es' * (count != 1)}"


#: A sentence for each event, with the words of `_words` in it.
_SENTENCES = {
    "Acquired": "begun by {who}, {task}{begun}",
    "TakenOver": "taken over by {who}, {task}{crashed}{begun}",
    "Completed": "completed{after}",
    "Failed": "failed for good{after}: {error}",
    "Released": "released{after}: {reason}",
    "ReleaseFailed": ("ended{after}: {reason}; its lease has to run out, for the store could not record it: {error}"),
    "Replayed": "{failure}replayed to {task}",
    "Conflicted": "met by {task} while it {conflict}",
    "Deferred": "{task} deferred: its copy {copy} tries again in {delay}",
    "Superseded": "a copy of {task} dropped: a later one has taken its place",
    "KeyReused": "refused to {task}, which has other arguments",
    "CrashLooped": "refused to {task}, after {crashes} in a row",
    "LeaseLost": "{who} learned that its lease was taken over{after}: {ending}, unrecorded",
    "SettleFailed": "done by {who}{after}, and the store could not record it: {error}",
    "ReleasedByOperator": "released by {operator}{command} from {who}, {task}",
    "ForgottenByOperator": "forgotten by {operator}{command}: it was {state}{by}",
    "Published": "published {published} as {task_id}",
    "RanUnprotected": "run by {who} without a lease, since the store could not serve: {error}",
}


def _words(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the words of an event's sentence; those that it does not have are empty."""
    begun = [f"{word} {facts[name]}" for name, word in (("retries", "retry"), ("copy", "copy")) if name in facts]
    begun += ["delivered before"] * ("redelivered" in facts)
    crashes, reason = _crashes(facts.get("crashes", 0)), str(facts.get("reason", ""))
    conflict = f"is being done by {facts['held_by']} for {_task(facts.get('held_for'))}" if "held_by" in facts else ""
    words = {
        "who": facts.get("holder") or "an unknown worker",
        "task": _task(facts.get("task_id")),
        "by": f", by {_task(facts['task_id'])}" if facts.get("task_id") else "",
        "after": f" after {_duration(facts['ran'])}" if "ran" in facts else "",
        "begun": f" ({', '.join(begun)})" if begun else "",
        "crashes": crashes,
        "crashed": f", after {crashes}" if "crashes" in facts else "",
        "reason": _why(reason),
        "failure": "its failure " if facts.get("state") == State.FAILED else "",
        "conflict": conflict or "waits for a retry",
        "delay": _duration(facts.get("delay", 0)),
        "command": f" ({facts['command']})" if "command" in facts else "",
    }
    return defaultdict(str, facts | words)


def describe_event(facts: dict[str, Any]) -> str:
    """Return what happened in a sentence, or the event's name if this version does not know it."""
    event = str(facts.get("event", ""))
    sentence = _SENTENCES.get(event)
    return " ".join((sentence.format_map(_words(facts)) if sentence else event).split())


#: How the key of a throttle's period ends, behind that of the reservation.
_PERIOD = ":~throttle"


def _message(record: Record) -> WaitingMessage:
    """Return the message that holds a reservation, as far as its record has it."""
    return WaitingMessage.read(record.holder) or WaitingMessage(record.task_id, holder=record.holder)


def _describe_reservation(record: Record) -> str:
    message = _message(record)
    if record.state is State.RELEASED:
        return f"released: {'its message has ended' if record.reason == Reason.DONE else _why(record.reason)}"
    began = f" {format_duration(record.held_for)} ago" if record.held_for else ""
    left = f"lasts {format_duration(record.remaining)}" if record.remaining else "is over"
    if record.key.endswith(_PERIOD):
        return f"throttled by the run that began at {message.holder or 'an unknown worker'}{began}; the period {left}"
    who = f"message {message.task_id}" if message.task_id else "an unknown message"
    published = f", published by {message.holder}{began}" if message.holder else ""
    due = f", due {message.eta}" if message.eta else ""
    expires = f", expires {message.expires}" if message.expires else ""
    ends = f"; the reservation {left}" if record.remaining else ", ran out"
    return f"reserved by {who} of {task_of(record.key)}{published}{due}{expires}{ends}"


def _advice_on_reservation(record: Record) -> str:
    if record.key.endswith(_PERIOD):
        return "The next run is due when the period is over, or now: forget KEY ends the period."
    if record.state is not State.IN_PROGRESS or not record.remaining:
        return "No message holds it. The next call is published."
    return (
        "Its message waits for a worker, or runs: calls like it are not published, or replace it. If that message is "
        "gone, as after a purge of its queue, forget KEY: the next call is published then, and otherwise when the "
        "reservation is over."
    )


def end_of_reservation(record: Record) -> str:
    """Return in a sentence what may happen once a reservation that is held is none any more."""
    if record.key.endswith(_PERIOD):
        return "The next run does not wait for the end of the period then."
    return "If its message still waits, the next call is published, and both run."


def describe_record(record: Record | None) -> str:
    """Return how things stand with a record, or with none."""
    if record is None:
        return "nothing is remembered"
    if is_reservation(record.key):
        return _describe_reservation(record)
    kept = f"; kept for {format_duration(record.retention)}" if record.retention else ""
    match record.state:
        case State.IN_PROGRESS if record.remaining > 0:
            stops = ", whose worker is shutting down" if record.reason == Reason.SHUTDOWN else ""
            lease = f"its lease lasts {format_duration(record.remaining)} unless it is renewed"
            return f"in progress by {record.holder or 'an unknown worker'}, {_task(record.task_id)}{stops}; {lease}"
        case State.IN_PROGRESS:
            ran_out = "whose lease ran out" + (" in a shutdown" if record.reason == Reason.SHUTDOWN else "")
            return f"in progress by {record.holder or 'an unknown worker'}, {_task(record.task_id)}, {ran_out}{kept}"
        case State.RELEASED:
            why = _why(record.reason) or "given back"
            crashes = f"; {_crashes(record.crashes)} in a row" if record.crashes else ""
            return f"released: {why}{crashes}{kept}"
        case _:
            return f"{record.state.value} {format_duration(record.age)} ago by {_task(record.task_id)}{kept}"


def advice(record: Record | None) -> str:
    """Return what that means for the next delivery, and what to do about it."""
    from ..core.results import why_unavailable  # which loads serializers: not for a help

    if record is None:
        return "The next delivery runs, as if there had been none."
    if is_reservation(record.key):
        return _advice_on_reservation(record)
    match record.state:
        case State.IN_PROGRESS if record.remaining > 0:
            return "It is being done. Wait: duplicates do so too, and are answered once it is completed."
        case State.IN_PROGRESS:
            return "Its holder has not renewed the lease and is dead or cut off. The next delivery takes over."
        case State.RELEASED if record.reason == Reason.CRASH_LOOP:
            return (
                "This message does not run it again. Look for what kills the worker (memory, a native crash, "
                "sys.exit() in the body), fix it, and publish the task again."
            )
        case State.RELEASED if record.remaining > 0:
            within = format_duration(record.remaining)
            return f"It goes on within {within}: a retry, or what replaced it. Until then duplicates wait."
        case State.RELEASED:
            return "No worker is doing it. The next delivery runs."
        case State.FAILED:
            return "It is not run again: duplicates fail as it did. forget KEY lets it run."
        case _ if why := why_unavailable(record.payload):
            return (
                f"It is done: duplicates do not run. Its result was not kept ({clean(why)}): those whose callers wait "
                "for one fail with ResultUnavailable."
            )
        case _:
            return "It is done: duplicates are answered with its result and do not run."
