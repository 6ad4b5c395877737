"""The history of keys: events noted beside their records, off the hot path, by one thread per process, in batches.

A first run that completes is not noted; its record holds all of it. The rest is worth more than the store's time and
less than a task's: a note may be late, come twice, or be lost, and no task waits for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import StoreUnreachable
from ..events import Acquired, Completed, Conflicted, Deferred, Event, receivers, send
from ..stores.base import Store
from ..stores.records import HISTORY_LIMIT, Claim, HistoryEntry

logger = logging.getLogger("celery_idempotent.history")

#: Seconds in which notes are gathered before they are written.
PAUSE = 0.5
#: Notes that wait at most; beyond them, the oldest fall out. It bounds what a storm of duplicates can cost.
PENDING = 1000
#: How often a batch is tried while the store cannot serve.
TRIES = 3
#: Seconds that the end of a process may wait for the last notes.
PATIENCE = 1.0

#: What happens to every operation that is done.
_PLAIN = (Acquired, Completed)


def _repeats(event: Event) -> bool:
    """Return whether much the same was noted lately: of a message that is deferred for hours, each doubling will do."""
    return isinstance(event, Deferred) and event.copy & (event.copy - 1) != 0


class _Pending(NamedTuple):
    store: Store
    event: Event
    keep: float
    since: float


def _newest(batch: list[_Pending]) -> list[_Pending]:
    """Leave out what the store would drop at once: of a storm on one key, most."""
    counts: Counter[str] = Counter()
    kept = []
    for pending in reversed(batch):
        counts[pending.event.key] += 1
        if counts[pending.event.key] <= HISTORY_LIMIT:
            kept.append(pending)
    return kept[::-1]


class DeliveryEvents:
    """Emit the events of one delivery, and note in the history all from the first one on that is not a plain run's.

    Arguments:
        claim: What the delivery requests: a copy, a retry and what is redelivered are no plain run.
        task: The task's name (default: none).
        task_id: The message's id (default: none).
        note: Notes an event in the history of its key (default: no history is kept).
    """

    __slots__ = ("_eventful", "_note", "claim", "task", "task_id")

    def __init__(
        self, claim: Claim, task: str = "", task_id: str = "", note: Callable[[Event], None] | None = None
    ) -> None:
        self.claim, self.task, self.task_id, self._note = claim, task, task_id, note
        self._eventful = bool(claim.copy or claim.retries or claim.redelivered)

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Emit an event of this kind; one that nothing receives is counted, and not made."""
        hooks, claim = receivers(kind), self.claim
        # Of a copy that meets the holder again, its deferral is noted.
        if self._note and (self._eventful or kind not in _PLAIN) and not (kind is Conflicted and claim.copy):
            self._eventful = True
            hooks.append(self._note)
        if hooks:
            send(kind(claim.key, self.task, self.task_id, holder=claim.holder, **fields), hooks)


class History:
    """Write notes into their stores, half a second's at a time.

    The thread is started by the first note and again after a fork. A process that is killed loses the notes of its last
    half second.
    """

    def __init__(self) -> None:
        self._registered = False
        self._reset()

    def _reset(self) -> None:
        self._some, self._hurry = SignalSafeEvent(), SignalSafeEvent()
        self._starting = threading.Lock()
        self._pending: deque[_Pending] = deque(maxlen=PENDING)
        self._again: list[_Pending] = []
        self._writing = False
        self._failures: WeakKeyDictionary[Store, int] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        #: how many notes were lost in this process
        self.lost = 0
        self._fell_out = 0
        self._pid = os.getpid()  # last, as in `Heartbeat`

    def note(self, store: Store, event: Event, keep: float) -> None:
        """Note an event in a store soon; never waits, and never raises.

        Arguments:
            store: Where the event's key is; one that keeps no history is left alone.
            event: What happened.
            keep: Seconds for which it is worth keeping.
        """
        if not store.keeps_history or _repeats(event):
            return
        if self._pid != os.getpid():  # the thread stayed behind in the parent, and what it has to write
            self._reset()
        pending = self._pending
        self._fell_out += len(pending) == PENDING
        pending.append(_Pending(store, event, keep, monotonic()))
        if not self._some.is_set():
            self._some.set()
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def _start(self) -> None:
        if self._starting.locked():  # by who starts it just now: perhaps this thread, which a signal has interrupted
            return
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                return
            if not self._registered:
                self._registered = True
                atexit.register(self.flush)
            thread = threading.Thread(target=self._run, name="celery-idempotent-history", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end, or there are too many threads
                return
            self._thread = thread

    def flush(self, patience: float = PATIENCE) -> bool:
        """Have what is pending written now, and return whether it was, for the end of a process.

        Arguments:
            patience: Seconds to wait at most.
        """
        # By its own thread: when the interpreter ends, no other can be started, and this one must not wait for a store.
        if self._pid != os.getpid() or self._thread is None or not self._thread.is_alive():
            return True
        self._hurry.set()
        end = monotonic() + patience
        while self._some.is_set() or self._writing:
            if monotonic() >= end:
                break
            time.sleep(0.002)
        self._hurry.clear()
        return not self._some.is_set() and not self._writing

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._hurry.wait(PAUSE)
            self._writing = True
            self._some.clear()
            try:
                self.write()
            except Exception:  # whatever it was, the next notes need their thread
                logger.exception("Notes could not be written")
            finally:
                self._writing = False

    def write(self) -> None:
        """Write what is pending, a batch for each store."""
        batches: dict[Store, list[_Pending]] = defaultdict(list)
        again, self._again = self._again, []
        for pending in again:
            batches[pending.store].append(pending)
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            batches[pending.store].append(pending)
        for store, batch in batches.items():
            self._write(store, batch)
        if self._fell_out:
            logger.log(
                logging.DEBUG if self.lost else logging.WARNING,
                "%d notes fell out of the history of their keys: more than %d came in %s s",
                *(self._fell_out, PENDING, PAUSE),
            )
            self.lost, self._fell_out = self.lost + self._fell_out, 0
        if self._again:
            self._some.set()

    def _write(self, store: Store, batch: list[_Pending]) -> None:
        batch = _newest(batch)
        now = monotonic()
        failed: Exception
        try:
            store.append_history(
                [HistoryEntry(each.event.key, text_of(each.event), now - each.since, each.keep) for each in batch]
            )
        except StoreUnreachable as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - a store of another author, or one that refuses: no task fails for it
            failed = error
            self._failures[store] = max(self._failures.get(store, 0), TRIES - 1)
        else:
            self._failures.pop(store, None)
            return
        failures = self._failures[store] = self._failures.get(store, 0) + 1
        if failures < TRIES:
            self._again += batch
            return
        self.lost += len(batch)
        if failures == TRIES:  # once, until it serves again
            text = "What happens to keys is not noted in their history, which changes nothing for their tasks: %s"
            logger.warning(text, failed)


# What happened to a key, as lines beside its record: what goes into a store, and what comes out of it again.
#
# Durations cross the contract, points in time do not: a note holds how long ago it happened.

#: Letters of one word in a note. The text of an error can be long, and is in the log.
LONGEST = 200
#: Fields that the key makes redundant.
_KNOWN = {"key", "task"}


def text_of(event: Event) -> str:
    """Return an event as one line of JSON, without its key and without what is empty."""
    entry: dict[str, Any] = {"event": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name in _KNOWN or value in ("", 0):
            continue
        if field.name == "ending":  # of an exception its type alone: its message may have arguments in it
            value = value.partition(":")[0]
        entry[field.name] = round(value, 3) if isinstance(value, float) else value
        if isinstance(value, str):
            entry[field.name] = value[:LONGEST]
    return json.dumps(entry, separators=(",", ":"))


class SignalSafeEvent:
    """What `threading.Event` is.

    That one takes its lock by code in Python. A time limit that rings between the lock and the code behind it leaves it
    locked, and the next thread to set it waits for ever. ``with`` on the lock itself cannot be interrupted there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = threading.Condition(self._lock)
        self._up = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._up

    def set(self) -> None:
        """Set it, and wake the threads that wait for that."""
        with self._lock:
            self._up = True
            self._raised.notify_all()

    def clear(self) -> None:
        """Lower it."""
        self._up = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        with self._lock:
            if not self._up:
                self._raised.wait(timeout)
            return self._up


#: The history that this process writes.
history = History()
