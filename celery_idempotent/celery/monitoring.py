"""Celery events for monitors, such as Flower, of what became of a task.

They are sent by the worker's main process, over the connection of its other ``task-*`` events, and only while those
are sent (``-E``, or `enable_events`). A child hands its news to it through a pipe, which is read at once, and before
the task's last event is sent in any case: a monitor keeps the state that such an event sets until then. A first run
sends none.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any
from weakref import ref

from celery.bootsteps import RUN

from ..events import KINDS, Event, add_hook, logger

#: What is sent: each is a state of its task until the next one, or until the task has ended.
MONITORED = frozenset(kind for kind in KINDS if kind.monitored)
#: The field of each event that has the facts; a monitor's own fields are left alone.
FIELD = "idempotency"
#: What a pipe takes at once or not at all, on every system (PIPE_BUF is 4096 on Linux, 512 at least).
LONGEST = 4000
#: Longest text in a piece of news, in characters.
LONGEST_TEXT = 500

#: The task of which a call is being published, while an event of that is emitted: in a thread of a web process, neither
#: is it the current task, nor its app the current app.
published: ContextVar[Any] = ContextVar("published", default=None)

_ends: tuple[int, int] | None = None
_main = 0
_consumer: Callable[[], Any] | None = None
#: the process and the thread in which it consumes
_consumes: tuple[int, int] = (0, 0)
_unread = b""
#: A thread may take it again: a signal's handler sends events too, wherever the main thread is.
_reading = threading.RLock()
#: whether the thread that has the lock is reading
_busy = False


def prepare(*, children: bool = True) -> None:
    """Listen; open the pipe into which children that are forked later write, if there will be any.

    Without it nothing is read: eventlet's ``os.read`` waits also for what must not be waited for.
    """
    global _ends, _main, _unread
    if _main != os.getpid():
        _ends, _unread = None, b""
        add_hook(send, MONITORED)
    if children and _ends is None:
        _ends = os.pipe()
        for end in _ends:
            os.set_blocking(end, False)
    _main = os.getpid()


def reader() -> int | None:
    """Return the file descriptor that news can be read from in the worker's main process."""
    return _ends[0] if _ends is not None else None


def attach(consumer: Any) -> None:
    """Send through the event dispatcher of this consumer from now on."""
    global _consumer, _consumes
    _consumer, _consumes = ref(consumer), (os.getpid(), threading.get_ident())


def consumer() -> Any:
    """Return the consumer that was attached last, or None."""
    return _consumer() if _consumer is not None else None


def consumes_here() -> bool:
    """Return whether the calling thread is the one in which a worker consumes, and so must not wait for a store."""
    if _consumes != (os.getpid(), threading.get_ident()):
        return False
    attached = consumer()
    return attached is not None and attached.blueprint.state == RUN


def send(event: Event) -> None:
    """Send what has become of a task."""
    facts = asdict(event)
    name = event.name
    _hand_over(name, facts.pop("task"), facts.pop("task_id"), facts)


def send_resumed(key: str, task: str, task_id: str, copy: int) -> None:
    """Send that a task which was deferred begins to run."""
    _hand_over("resumed", task, task_id, {"key": key, "copy": copy})


def _hand_over(name: str, task: str, task_id: str, facts: dict[str, Any]) -> None:
    if not _main:
        return
    short = {field: value[:LONGEST_TEXT] if isinstance(value, str) else value for field, value in facts.items()}
    news = {"name": name, "task": task, "task_id": task_id, "facts": {"outcome": name, **short}}
    if os.getpid() == _main:
        _send(news)
        return
    line = json.dumps(news).encode() + b"\n"
    try:
        if _ends is not None and len(line) <= LONGEST:
            os.write(_ends[1], line)
    except OSError:  # full, because the main process is busy: monitors miss it, and the task goes on
        pass


def flush() -> None:
    """Send what children have handed over so far; it neither waits for them nor raises.

    Called by a signal's handler in the middle of itself, it leaves the rest to the call that was interrupted.
    """
    global _busy
    if _ends is None or os.getpid() != _main:
        return
    with _reading:
        if _busy:
            return
        _busy = True
        try:
            _flush(_ends[0])
        finally:
            _busy = False


def _flush(end: int) -> None:
    global _unread
    while True:
        try:
            _unread += os.read(end, 65536)
        except BlockingIOError:
            break
    *lines, _unread = _unread.split(b"\n")
    for line in lines:
        try:
            _send(json.loads(line))
        except Exception:  # noqa: BLE001 - whatever it is, it must not reach the task whose event was about to be sent
            logger.exception("What has become of a task could not be sent to monitors: %s", line.decode())


def _send(news: dict[str, Any]) -> None:
    attached = consumer()
    dispatcher = getattr(attached, "event_dispatcher", None)
    if attached is None or dispatcher is None:
        return
    task = attached.app.tasks.get(news["task"])
    if getattr(task, "send_events", True):
        kind = f"task-{news['name'].replace('_', '-')}"
        dispatcher.send(kind, uuid=news["task_id"], name=news["task"], **{FIELD: news["facts"]})
