"""What a living worker holds is not handed out again by a Redis broker.

kombu notes when it hands a message out, and any worker puts back into its queue what has not been acked within
``visibility_timeout`` since then: also what still runs, waits for a slot, or waits for its ETA. A step of the consumer
renews the note for all that its channel holds, so that the timeout counts from the worker's last sign of life, and
may be short. The note is compared with other workers' clocks, so it is this worker's wall clock, as kombu's own.

The same step looks once a second for what no worker holds any more, and has kombu put it back. kombu itself looks every
100 s where Celery's event loop runs, and practically never with gevent and eventlet.

The worker's event loop does it: a worker whose loop is stuck holds nothing back for ever. A thread does it only while
the loop stands still for a reason: a solo pool runs a body, or the worker waits for its last bodies before it stops.
It never waits longer for a broker that does not answer than kombu's own sweep, which uses the same connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker import state

from ..errors import ConfigurationError
from ..events import in_words, logger
from .app import is_guarded
from .message import reuse_client

#: Refreshes per visibility timeout: two may fail, or come late, before the broker hands anything out again.
REFRESHES_PER_TIMEOUT = 3
#: Most seconds between two refreshes.
LONGEST_INTERVAL = 60.0
#: Seconds between two looks for messages whose worker has died.
RESTORE_INTERVAL = 1.0
#: Most seconds for which kombu's mutex of such looks outlives a worker that is killed in one; kombu's default is 300.
#: It saves work, and guards nothing: a message is put back in a transaction of its own.
LONGEST_MUTEX = 10.0
#: Most messages in one command, which no other client can interrupt; it takes half a millisecond.
BATCH = 250
#: Seconds that an event loop has for other work between two of them.
BETWEEN_BATCHES = 0.01


class UnackedMessages:
    """The unacked messages of one channel of a Redis broker.

    Arguments:
        channel: A channel of kombu's Redis transport.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.interval = min(channel.qos.visibility_timeout / REFRESHES_PER_TIMEOUT, LONGEST_INTERVAL)
        channel.qos.unacked_mutex_expire = min(channel.qos.unacked_mutex_expire, LONGEST_MUTEX)
        self.ended = threading.Event()
        self._failing: set[str] = set()
        self._unanswered = _unanswered(channel.qos)
        reuse_client(channel)

    @classmethod
    def of(cls, channel: Any) -> UnackedMessages | None:
        """Return what this channel holds, or None where its transport knows no visibility timeout."""
        qos = getattr(channel, "qos", None)
        if qos is None or not hasattr(qos, "unacked_index_key") or not qos.visibility_timeout > 0:
            return None
        return cls(channel)

    def tags(self) -> list[str]:
        """Return the delivery tags of what is held and not overdue."""
        qos = self.channel.qos
        # What was acked or put back stays listed until the next message comes. Another worker may hold it by now, and
        # may die: this one renews nothing of it. Nor of what it could not ack or put back, and has done with.
        unanswered = {tag for tag, message in copied(self._unanswered.items()) if qos._delivered.get(tag) is message}
        left_out = {*copied(qos._dirty), *unanswered, *_overdue()}
        return [tag for tag in copied(qos._delivered) if tag not in left_out]

    def refresh(self) -> None:
        """Note for all of it that it is still held; an error is logged once, and never raised."""
        for _ in self.refreshing():
            pass

    def refreshing(self) -> Iterator[None]:
        """Do as `refresh` in steps, and yield between two."""
        tags = self.tags()
        for start in range(0, len(tags), BATCH):
            if start:
                yield
            if self.ended.is_set() or self.channel.closed:
                return
            work = partial(self._refresh, tags[start : start + BATCH])
            if not self._try(work, "The broker did not note that messages are still held, trying again: %s"):
                return

    def restore(self) -> None:
        """Put back into their queues what dead workers held; an error is logged once, and never raised."""
        self._try(self._restore, "The broker was not searched for messages of dead workers, trying again: %s")

    def _try(self, work: Callable[[], None], text: str) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer has to go on
            if self.channel.closed:  # by a shutdown, while this thread was on its connection
                return False
            if text not in self._failing:
                logger.warning(text, in_words(error))
            self._failing.add(text)
            return False
        self._failing.discard(text)
        return True

    def _restore(self) -> None:
        qos = self.channel.qos
        if not self.channel.active_queues:  # as in kombu: what consumes nothing restores nothing
            return
        # One command where nothing is overdue: kombu takes a mutex for each look.
        with self.channel.conn_or_acquire() as client:
            oldest = client.zrange(f"{_prefix(client)}{qos.unacked_index_key}", 0, 0, withscores=True)
        if oldest and oldest[0][1] < time.time() - qos.visibility_timeout:
            qos.restore_visible(num=self.channel.unacked_restore_limit, interval=1)

    def _refresh(self, tags: Sequence[str]) -> None:
        # Not a client of the event loop's own connection, but one from the channel's pool, which threads may share.
        with self.channel.conn_or_acquire() as client:
            # XX: what a sweep has put back into its queue meanwhile is not to come into being again here.
            client.zadd(self.channel.qos.unacked_index_key, dict.fromkeys(tags, time.time()), xx=True)

    def keep_refreshing(self, needed: Callable[[], bool]) -> None:
        """Refresh from a thread, at once and again, whenever it is ``needed``, until it is ended."""

        def run() -> None:
            while not self.ended.is_set():
                if needed():
                    self.refresh()
                self.ended.wait(self.interval)

        threading.Thread(target=run, name="celery-idempotent-visibility", daemon=True).start()


class VisibilityStep(bootsteps.StartStopStep):
    """Refresh what the consumer's channel holds, and restore what dead workers held, for each new connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        self._held: UnackedMessages | None = None

    def include_if(self, c: Any) -> bool:
        """Return whether the app wants it.

        Raises:
            ConfigurationError: the setting is neither True nor False.
        """
        wanted = c.app.conf.get("idempotency_visibility_refresh")
        if wanted not in (None, True, False):
            raise ConfigurationError(
                f"Expected idempotency_visibility_refresh to be True or False, got {wanted!r}. "
                "Write False, or leave it out."
            )
        return wanted is None or bool(wanted)

    def start(self, c: Any) -> None:
        """Begin with the channel of a new connection."""
        self._end()
        self._held = held = UnackedMessages.of(c.task_consumer.channel)
        if held is None:
            return

        def refresh(steps: Iterator[None]) -> None:
            if held.ended.is_set():
                return
            if next(steps, held) is held:
                c.timer.call_after(held.interval, partial(refresh, held.refreshing()))
            else:
                c.timer.call_after(BETWEEN_BATCHES, partial(refresh, steps))

        def restore() -> None:
            if not held.ended.is_set():
                held.restore()
                c.timer.call_after(RESTORE_INTERVAL, restore)

        c.timer.call_after(held.interval, partial(refresh, held.refreshing()))
        c.timer.call_after(RESTORE_INTERVAL, restore)
        if isinstance(c.pool, SoloPool):
            held.keep_refreshing(lambda: bool(state.active_requests))

    def stop(self, c: Any) -> None:
        """Let go of a channel whose connection is lost; keep that of a worker whose last bodies are still running."""
        held = self._held
        self._end()
        if held is not None and not held.channel.closed and c.blueprint.state == bootsteps.CLOSE:
            self._held = UnackedMessages(held.channel)
            self._held.keep_refreshing(lambda: True)

    def shutdown(self, c: Any) -> None:
        """End: the pool has stopped, and the channel is about to be closed."""
        self._end()

    def _end(self) -> None:
        if self._held is not None:
            self._held.ended.set()
            self._held = None


def _prefix(client: Any) -> str:
    """Return what a command of this client must put before a key by itself: kombu before 5.7 prefixes no ZRANGE."""
    prefixed = getattr(client, "PREFIXED_SIMPLE_COMMANDS", ("ZRANGE",))
    return "" if "ZRANGE" in prefixed else str(client.global_keyprefix)


def _unanswered(qos: Any) -> dict[str, Any]:
    """Return, by their tags, the messages that could be neither acked nor put back; later ones come to it.

    Celery logs such an error and tries no more, as where many greenlets share few connections: the message is to be
    delivered again once it has timed out.
    """
    known: dict[str, Any] | None = vars(qos).get("_unanswered")
    if known is not None:
        return known
    failed: dict[str, Any] = {}

    def watched(answer: Callable[..., None]) -> Callable[..., None]:
        def call(tag: str, *args: Any, **options: Any) -> None:
            failed[tag] = qos._delivered.get(tag)  # delivered here once more, it is another object
            answer(tag, *args, **options)
            failed.pop(tag, None)

        return call

    qos._unanswered, qos.ack, qos.reject = failed, watched(qos.ack), watched(qos.reject)
    return failed


def note_unanswered(request: Any = None, **_: Any) -> None:
    """Have the message of a delivery time out whose end Celery has failed in, in a pool without children.

    There Celery may fail once more, as where the result backend is away, and then answers the message never: it is to
    be delivered again once it has timed out, as with Celery alone. If it is answered all the same, this is forgotten.
    """
    for delivery in copied(state.active_requests):
        if delivery._request_dict is request:
            known = getattr(getattr(delivery.message.channel, "qos", None), "_unanswered", None)
            if known is not None:
                known[delivery.message.delivery_tag] = delivery.message


signals.task_internal_error.connect(note_unanswered, weak=False, dispatch_uid="celery_idempotent.unanswered")


def _overdue() -> Iterable[str]:
    """Yield the tags of what has run for longer than its policy grants a lease: others are to have it."""
    for request in copied(state.active_requests):
        task = request.task
        if is_guarded(task) and request.time_start:
            longest = task._binding.policy.max_lease
            if longest is not None and time.time() - request.time_start > longest:
                yield request.message.delivery_tag


def copied(shared: Iterable[Any]) -> list[Any]:
    """Return the members of what another thread may be changing."""
    while True:
        try:
            return list(shared)
        except RuntimeError:  # it changed in size just then
            continue
