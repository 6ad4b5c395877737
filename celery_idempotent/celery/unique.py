"""Unique publishing: a call of a task is not published while a message that will do the same work is waiting.

A publisher passes `publish`, a message that goes on (a retry, what continues a replaced task) `publish_next`. A worker
gives the reservation of a message back when its body is about to run (`begin`), or when its operation has ended
(`end`). `core/reservations.py` has what a reservation is.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic, time
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from celery import states
from celery._state import _task_stack, get_current_worker_task
from celery.app.task import Task
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.connection import ConnectionPool
from kombu.utils.uuid import uuid

from ..core import reservations
from ..core.backoff import Backoff, never
from ..core.binding import breaker, confirmations, current_holder, heartbeat
from ..core.guard import STORE_PAUSE
from ..core.lease import HeldLease
from ..core.policy import Unique
from ..core.reservations import BUDGET, UNCONFIRMED, Reserved, Token, WaitingMessage
from ..errors import AlreadyPublished, ConfigurationError, MissingKey, StoreError
from ..events import PublishRepeated, PublishReplaced, PublishSkipped, in_words, logger, receivers, send
from ..stores.base import Store
from ..stores.memory import MemoryStore
from ..stores.records import Lease, Reason, Record, State, new_owner
from . import monitoring
from .app import is_backend, is_shared, store_of
from .message import (
    ANSWER_TIMEOUT,
    META_HEADER,
    RESERVATION,
    STATE_ATTRIBUTE,
    UNGUARDED,
    came_from,
    delays_natively,
    given_key,
    ignores_result,
    own_header,
    read_key,
    reuse_client,
    sent_arguments,
    without_delay,
)

#: What of an app may not be skipped; it was logged.
_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

#: Why a call was published: it could not wait any longer to know whether a message waits; one of the two expires first.
SOONER = "expires sooner"
#: Seconds by which the clocks of two machines may differ.
SKEW = 5.0
#: Options of messages that are parts of a canvas.
OF_CANVASES = {"chain", "chord", "group_id", "replaced_task_nesting"}

#: Slots for whose messages this process has skipped its last call of them, and of how many it knows that.
_skipped_for: set[str] = set()
REMEMBERED = 10_000

#: What names the broker of a connection.
_ADDRESS = ("transport_cls", "hostname", "port", "virtual_host")

Send = Callable[..., Any]
T = TypeVar("T")


def publish(
    task: Any,
    given: object,
    args: Any,
    kwargs: Any,
    ids: dict[str, Any],
    options: dict[str, Any],
    send: Send,
    derived: str = "",
) -> Any:
    """Publish a call, or return the result of the message that will do its work.

    Arguments:
        task: The task.
        given: The option ``unique`` of the call; None: the task's.
        args: Of the call.
        kwargs: Of the call.
        ids: What else `apply_async` was given: ``task_id``, ``producer``, ``link``, ``link_error``.
        options: The other options of the call.
        send: Publishes it, with the options that it is given.
        derived: The id that follows from the request that makes the call; an earlier run of that request may have
            published it (default: the call has a random one).

    Raises:
        AlreadyPublished: a message waits, and the task has ``on_duplicate="raise"``.
        ConfigurationError: the call gives wrong options.
        Exception: what publishing raises.
    """
    token = _token_of(options)
    if token is not None:
        return publish_next(task, token, args, kwargs, ids, options, send)
    wanted = task._binding.unique if given is None else task._binding.unique_of(given)
    if wanted is None or not _may_be_skipped(task, ids, options):
        return send(**{**ids, "task_id": ids["task_id"] or derived or None}, **options)
    return _Call(task, wanted, args, kwargs, ids, options, derived).publish(send)


def _may_be_skipped(task: Any, ids: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call may share the message of another one, and whether another may share its own."""
    if ids["task_id"] or ids["link"] or ids["link_error"] or "parent_id" in options:
        return False  # with a parent's id Celery calls what it dispatches for a task that has ended
    if not OF_CANVASES.isdisjoint(options) and any(options.get(name) for name in OF_CANVASES):
        return False
    app = task._get_app()
    if _goes_elsewhere(app, ids["producer"], options):
        return False
    if app.conf.task_always_eager or task.name.startswith(UNGUARDED):
        return False
    if is_backend(task.backend, "rpc", "RPCBackend") and not _ignores_result(task, options):
        return False  # its result is a message to one caller
    if monitoring.consumes_here() and get_current_worker_task() is None:
        return False  # it would hold up the messages of a worker
    transport = _transport(app)
    if transport.driver_type == "memory":
        return _not_shared(app, task, "the broker memory:// is this process's own")
    if transport.task_protocol == 1:
        return _not_shared(app, task, "a message of task_protocol 1 has no headers to name what it has reserved")
    if isinstance(task._binding.guard.store, MemoryStore):
        return _not_shared(app, task, "the store memory:// is this process's own, and no worker could free what it has")
    return True


def _goes_elsewhere(app: Any, producer: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a call may go to another broker than the app's, whose messages do not stand for each other."""
    if options.get("connection") is not None:
        return True
    if producer is None:
        return False
    given, own = producer.connection, app.connection_for_write()
    if own.alt and given.alt == own.alt:  # the same URLs, of which it may have taken another one
        return False
    return [getattr(given, name) for name in _ADDRESS] != [getattr(own, name) for name in _ADDRESS]


def _not_shared(app: Any, task: Any, why: str) -> bool:
    known = _warned.setdefault(app, set())
    if why not in known:
        known.add(why)
        logger.warning("Every call of %s and other unique tasks is published: %s.", task.name, why)
    return False


class _Call:
    """One call of a task that is unique.

    Arguments:
        task: The task.
        wanted: Its options.
        args, kwargs, ids, options, derived: As `publish` is given them.
    """

    def __init__(
        self,
        task: Any,
        wanted: Unique,
        args: Any,
        kwargs: Any,
        ids: Mapping[str, Any],
        options: dict[str, Any],
        derived: str,
    ) -> None:
        self.task, self.wanted, self.options = task, wanted, options
        self.app, self.store = task._get_app(), task._binding.guard.store
        self.args, self.kwargs = args or (), kwargs or {}
        #: with those that the task is published with in any case
        self.all = {**task._get_exec_options(), **options}
        # Where only the newest counts, two messages of one id cannot be: the older one ends as revoked.
        self.derived = "" if wanted.newest else derived
        self.ids = {**ids, "task_id": self.derived or None}
        self.id, self.end = self.derived or uuid(), 0.0
        #: the store's key of its operation; "" where that follows from its id
        self.operation = ""
        #: how long it waits, where that is this module's to decide
        self.countdown = wanted.debounce
        # What is this thread's own; the store is waited for in another one.
        self.own, self.in_transaction = _own_tokens(), _in_transaction()

    def publish(self, send: Send) -> Any:
        """Publish the call, or return the result of the message that stands for it."""
        wanted = self.wanted
        if wanted.debounce is not None and (self.all.get("countdown") or self.all.get("eta")):
            raise ConfigurationError(
                f"Expected no countdown or eta for {self.task.name}, whose debounce decides when it runs. "
                "Pass unique=False to publish this call by itself."
            )
        try:
            token, note = self._token(), self._note()
            for written in (note.eta, note.expires):
                _time(written, self.app)  # which raises what is no time
        except (MissingKey, TypeError, ValueError) as error:
            # The worker reports the key, and Celery a wrong option; nothing may be lost for want of a key.
            known, why = _warned.setdefault(self.app, set()), f"{self.task.name}: {type(error).__name__}"
            if why not in known:  # once: each call may have it
                known.add(why)
                logger.error("%s is published whatever waits: %s", self.task.name, error)
            return send(**self.ids, **self.options)
        self.end = monotonic() + BUDGET  # of the store: the key of large arguments takes longer to make
        try:
            found = _ask(self.store, partial(self._reserve, token, note))
        except StoreError as error:
            self._emit(PublishRepeated, token, self.id, reason="store", error=str(error))
            return self._send(send, token, sure=False)
        if found == "begun":
            return send(**self.ids, **self.options)
        if isinstance(found, str):
            self._emit(PublishRepeated, token, self.id, reason=found)
            return self._send(send, token, sure=False)
        if isinstance(found, Record):
            return self._skip(found, token)
        return self._send(send, self._granted(found, token), sure=True)

    # -- what it needs of the store ------------------------------------------------------------------------------------

    def _token(self) -> Token:
        binding, wanted, headers = self.task._binding, self.wanted, self.options.get("headers")
        given = self._given_key()
        args, kwargs = sent_arguments(self.task, self.args, self.kwargs, self.all)
        message = {**self._route(), "ignore_result": self._is_ignored(), **_kind_of(wanted)}
        if given is not None or binding.policy.key is not None:  # else the task id is the key
            self.operation, _ = binding.operation(given, self.id, args, kwargs, headers)
            message["operation"] = self.operation
        beside = tuple([f"{name}={value}" for name, value in message.items() if value])
        slot = binding.slot(wanted.key, args, kwargs, headers, beside)
        owner = self.derived or new_owner()  # of messages with one id, the first that starts frees what they hold
        return Token(slot, owner, 0, wanted.until, wanted.for_, wanted.newest, wanted.throttle or 0.0)

    def _given_key(self) -> object:
        return read_key(given_key(self.options))

    def _route(self) -> dict[str, Any]:
        """Return where the message goes; and have it go there, also where a router would choose again."""
        router = self.app.amqp.router
        routed = router.route(dict(self.all), self.task.name, self.args, self.kwargs, self.task)
        if router.routes:
            self.options = {
                **self.options,
                **{n: routed[n] for n in ("queue", "exchange", "routing_key") if routed.get(n)},
            }
        parent = get_current_worker_task()
        if parent is not None and "priority" not in routed and self.app.conf.task_inherit_parent_priority:
            routed["priority"] = (parent.request.delivery_info or {}).get("priority")
        queue, exchange = routed.get("queue"), routed.get("exchange")
        return {
            "queue": getattr(queue, "name", queue),
            "exchange": getattr(exchange, "name", exchange),
            "routing_key": routed.get("routing_key"),
            "priority": routed.get("priority"),
        }

    def _is_ignored(self) -> bool:
        return _ignores_result(self.task, self.options)

    def _note(self) -> WaitingMessage:
        return self._due(_note_of(self.app, self.id, self.all))

    def _due(self, note: WaitingMessage) -> WaitingMessage:
        """Return the note with the time at which this module has the message run, if it decides that."""
        if self.countdown is None:
            return note
        due, expires = self.app.now() + timedelta(seconds=self.countdown), self._lifetime()
        if expires is not None:
            note = note._replace(expires=_text(due + timedelta(seconds=expires)))
        return note._replace(eta=_text(due))

    def _lifetime(self) -> float | None:
        """Return after how many seconds it expires, if that is how its expiry is given: after it is due."""
        expires = self.all.get("expires")
        return expires if isinstance(expires, (int, float)) else None

    def _reserve(self, token: Token, note: WaitingMessage, store: Store) -> Reserved | Record | str:
        """Take the slot for this call; or return the record of the message that stands for it, "begun", or why not."""
        is_sent = token.owner in confirmations  # read first: it leaves them once the record shows it
        own = store.get(token.slot) if self.derived else None
        if own is not None and own.owner == token.owner and own.state is State.IN_PROGRESS:
            met = WaitingMessage.read(own.holder)
            if (is_sent or reservations.is_confirmed(own)) and met is not None and not self._ended(store, met):
                return own
        found = self._take(token, note, store)
        # Read once the slot is taken: where the work begins after that, the message that it began with frees the slot.
        if self.derived and isinstance(found, Reserved) and self._has_begun(store):
            reservations.release(store, replace(token, fence=found.lease.fence), Reason.DONE)
            return "begun"
        return found

    def _has_begun(self, store: Store) -> bool:
        """Return whether the work of this id has begun, so that another message of the id may have none to do."""
        binding = self.task._binding
        if binding.policy.key is not None or self._given_key() is not None:
            return False  # which stands for the same operation, as do the calls that are skipped for it
        return store.get(binding.default_key(self.id)) is not None

    def _take(self, token: Token, note: WaitingMessage, store: Store) -> Reserved | Record | str:
        if token.throttle and not note.eta:
            remaining = reservations.throttle(store, token, note.holder)
            if remaining:
                self.countdown = remaining
                note = self._due(note)
        doubt, follow = partial(self._doubt, store, note), partial(self._follow, note)
        look = token.slot in _skipped_for
        found = reservations.reserve(store, token, note, doubt, self.end, confirmations, follow, look=look)
        if isinstance(found, Record):
            if len(_skipped_for) >= REMEMBERED:
                _skipped_for.clear()
            _skipped_for.add(token.slot)
        elif look:
            _skipped_for.discard(token.slot)
        return found

    def _follow(self, note: WaitingMessage, record: Record, met: WaitingMessage) -> tuple[WaitingMessage, str]:
        """Return the note of this message, and whether it replaces the one that waits or why that runs as well."""
        reason, wanted = reservations.REPLACED, self.wanted
        if self._expires_sooner(note, met):
            reason = SOONER
        # What is due must run: a stream of calls must not take its place again and again.
        if wanted.debounce is not None:
            left = wanted.longest_wait - reservations.waited(record, met)
            if left <= 0:
                reason, left = reservations.OVERDUE, wanted.longest_wait
            self.countdown = min(wanted.debounce, left)
        elif wanted.throttle is not None and (self.countdown is not None or not note.eta):
            left = wanted.throttle - reservations.waited(record, met)
            if left <= 0:
                reason, self.countdown = reservations.PERIOD_OVER, wanted.throttle
        return self._due(note)._replace(latest=_time(met.eta, self.app)), reason

    def _expires_sooner(self, one: WaitingMessage, other: WaitingMessage) -> bool:
        skew = self._skew() if self._lifetime() else 0.0
        return _expiry(one.expires, self.app) < _expiry(other.expires, self.app) - skew

    def _skew(self) -> float:
        """Return by how many seconds times of gathered messages may differ; it is less than a period."""
        return 0.0 if self.countdown is None else self._most_skew()

    def _most_skew(self) -> float:
        return min(SKEW, (self.wanted.throttle or 0.0) / 2)

    def _doubt(self, store: Store, own: WaitingMessage, record: Record, met: WaitingMessage) -> str:
        """Return why a message that waits does not do for this call; "" if it does."""
        # What a throttle gathers is due at the end of its period, by the clock of its publisher.
        # The end of a period may have gathered a call for now already, and wait for a worker.
        throttle = self.wanted.throttle or 0.0
        now = time() + self._most_skew() if throttle else 0.0
        later = _time(met.eta, self.app) - _time(own.eta, self.app, now) - self._skew()
        # Another process called just after this one had begun the period: what it gathers is due at the end of that.
        gathers = throttle and not own.eta and later < throttle
        if later > 0 and not gathers:
            return "due later"
        if self._expires_sooner(met, own):
            return SOONER
        if not self.own.isdisjoint((record.owner, met.task_id)):
            return "own message"  # which would end its own chain
        if self.in_transaction:
            return "open transaction"  # before whose commit the message may start
        return self._ended(store, met) or (reservations.GATHERS if later > 0 else "")

    def _ended(self, store: Store, met: WaitingMessage) -> str:
        """Return what the result backend knows of a message that has begun, or ended."""
        backend = self.task.backend
        if not is_shared(backend):  # also where results are ignored: it may have that the message was revoked
            return ""
        look = partial(backend.get_task_meta, met.task_id, cache=False)
        # Outside tasks a Redis that hangs holds up a call of plain Celery too, which subscribes to the result there.
        as_celery = is_backend(backend, "redis", "RedisBackend") and get_current_worker_task() is None
        try:
            state = (look() if as_celery else reservations.within(BUDGET, look, "result backend"))["status"]
        except SoftTimeLimitExceeded:  # of the body that publishes
            raise
        except Exception as error:  # noqa: BLE001 - the backend's own; in doubt, publish
            logger.warning("What became of %s is not known, so a call is published: %s", met.task_id, in_words(error))
            return "result backend"
        begun = state == states.STARTED and self.wanted.until == "start" and not self._stands_aside(store, met)
        return str(state) if begun or state in states.READY_STATES else ""

    def _stands_aside(self, store: Store, met: WaitingMessage) -> bool:
        """Return whether a message is deferred for another one: Celery stores STARTED before the lease is asked for."""
        record = store.peek(self.operation) if self.operation else None
        return record is not None and record.task_id not in ("", met.task_id)

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def _skip(self, record: Record, token: Token) -> Any:
        met = WaitingMessage.read(record.holder) or WaitingMessage("")
        if self.wanted.on_duplicate == "raise" and met.task_id != self.derived:
            error = AlreadyPublished(
                f"{self.task.name} waits as task {met.task_id}, published {record.held_for:.1f} s ago. Call it with "
                'unique=False, or have it skipped with on_duplicate="skip".'
            )
            error.task_id, error.age = met.task_id, record.held_for
            raise error
        self._emit(PublishSkipped, token, met.task_id, age=record.held_for)
        result = self.task.AsyncResult(met.task_id)
        result.ignored = self._is_ignored()
        parent = get_current_worker_task() if self.options.get("add_to_parent", True) else None
        if parent is not None:
            parent.add_trail(result)
        return result

    def _granted(self, found: Reserved, token: Token) -> Token:
        if found.instead is not None:
            older = WaitingMessage.read(found.instead.holder)
            replaced = older.task_id if older is not None else ""
            if found.reason == reservations.REPLACED:
                self._emit(PublishReplaced, token, self.id, replaced=replaced)
            else:
                self._emit(PublishRepeated, token, self.id, reason=found.reason, waiting=replaced)
        declared = self.task._binding.unique
        # Any message of a task that has its messages replaced looks whether it was.
        newest = token.newest or (declared is not None and declared.newest)
        return replace(token, fence=found.lease.fence, newest=newest, late=found.late)

    def _send(self, send: Send, token: Token, *, sure: bool) -> Any:
        options = {**self.options, "headers": _with_token(self.options, token)}
        if self.countdown is not None:
            options["countdown"], expires = self.countdown, self._lifetime()
            if expires is not None:
                options["expires"] = self.countdown + expires
            if delays_natively(self.app):
                options["countdown"] = -(-self.countdown // 1)
        return _send_confirmed(self.task, token, {**self.ids, "task_id": self.id}, options, send, sure=sure)

    def _emit(self, kind: Any, token: Token, task_id: str, **fields: Any) -> None:
        hooks = receivers(kind)
        if hooks:
            before = monitoring.published.set(self.task)
            try:
                send(kind(token.slot, self.task.name, task_id, holder=current_holder(), **fields), hooks)
            finally:
                monitoring.published.reset(before)


def publish_next(
    task: Any, token: Token, args: Any, kwargs: Any, ids: Mapping[str, Any], options: dict[str, Any], send: Send
) -> Any:
    """Publish a message that goes on with one which had a reservation: a retry, or what a task is replaced by.

    Until its start, it takes the slot again if that is free; until its end, it keeps what it has. Where only the newest
    counts and a later message has the slot, it keeps its token, by which it is dropped once that one has begun. Where
    its arguments name another slot, or it goes to another queue, it has none: what it does is not what calls of the
    first are skipped for.
    """
    store, wait = task._binding.guard.store, _seconds_until(options, task._get_app())
    headers = dict(options.get("headers") or {})
    own = {name: value for name, value in own_header(headers).items() if name != RESERVATION}
    if _is_moved(task, options) or not _names_slot_of(token, task, args, kwargs, options):
        _forget_own(token)
        Reservation(token, store).end()
        return send(**ids, **{**options, "headers": {**headers, META_HEADER: own}})
    if token.until == "done":
        _forget_own(token, wait)
        _try(store, lambda store: reservations.confirm(store, token, wait))  # before: a message may start at once
        return send(**ids, **options)
    again, note = replace(token, owner=new_owner(), fence=0), _note_of(task._get_app(), str(ids["task_id"]), options)
    note = note._replace(begun=token.fence, latest=time() + token.late if token.late else 0.0)
    # It has the slot yet if it is retried before its body begins.
    claim = again.claim(UNCONFIRMED, sender=token.owner, note=note.write())
    found = _try(store, lambda store: None if _is_outdated(store, token) else store.acquire(claim))
    if not isinstance(found, Lease):
        return send(**ids, **(options if token.newest else {**options, "headers": {**headers, META_HEADER: own}}))
    again = replace(again, fence=found.fence)
    options = {**options, "headers": {**headers, META_HEADER: {**own, RESERVATION: again.header()}}}
    return _send_confirmed(task, again, ids, options, send, sure=True)


def _is_outdated(store: Store, token: Token) -> bool:
    """Return whether a later message has had the slot, where only the newest counts."""
    record = store.peek(token.slot) if token.newest else None
    return record is not None and record.fence > token.fence


def _is_moved(task: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a message may differ from that which its body came from, as with ``retry(queue=...)``.

    It may go to another queue, or there with another priority, or differ in whether its result is stored.
    """
    request = task.request_stack.top
    if request is None:
        return False
    info, queue = request.delivery_info or {}, options.get("queue")
    if _ignores_result(task, options) != ignores_result(task, request):
        return True
    inherits = task._get_app().conf.task_inherit_parent_priority
    priority = options.get("priority", task.priority)
    if (priority or 0) != (info.get("priority") or 0) and not (priority is None and inherits):
        return True
    if queue is not None and options.get("exchange") is None:
        return not came_from(task._get_app(), info, getattr(queue, "name", queue))
    given = [options.get(name) for name in ("exchange", "routing_key")]
    came = without_delay(*(info.get(name) or "" for name in ("exchange", "routing_key")))
    return any(new and new != old for new, old in zip(given, came, strict=True))


def _names_slot_of(token: Token, task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a message with these arguments does what calls of a slot are skipped for."""
    request = task.request_stack.top
    if request is not None and [*(request.args or ())] == [*(args or ())] and (request.kwargs or {}) == (kwargs or {}):
        return True
    binding = task._binding
    if binding.unique is None:  # the key is an option of one call
        return False
    try:
        args, kwargs = sent_arguments(task, args or (), kwargs or {}, options)
        slot = binding.slot(binding.unique.key, args, kwargs, options.get("headers"), ("any",))
    except (MissingKey, TypeError):
        return False
    return bool(_without_message(slot) == _without_message(token.slot))


def _kind_of(wanted: Unique) -> dict[str, str]:
    """Return what distinguishes messages that are unique by other options, as one call may give them."""
    key = wanted.key
    names = "a callable" if callable(key) else key if isinstance(key, str) else ",".join(key or ())
    return {"key": names, "until": wanted.until if wanted.until != "start" else ""}


def _without_message(slot: str) -> str:
    return slot.rpartition(":")[0]


def _send_confirmed(
    task: Any, token: Token, ids: Mapping[str, Any], options: dict[str, Any], send: Send, *, sure: bool
) -> Any:
    app, store = task._get_app(), task._binding.guard.store
    with _confirming(app, ids.get("producer"), options.get("timeout")) as (sending, certain):
        result = send(**{**ids, **options, **sending})
    if result is None:
        _refuse_to_publish_later(task)
    if not getattr(send, "whole", True):
        _give_back_unsent(task, token, str(ids["task_id"]))
    elif sure and certain:
        wait = _seconds_until(options, app)
        if token.newest:  # a message that it replaces may be due now, and runs unless this one is confirmed
            _try(store, lambda store: reservations.confirm(store, token, wait))
        else:
            confirmations.add(store, token, wait)
    return result


def _give_back_unsent(task: Any, token: Token, task_id: str) -> None:
    """Give back what a message was to free, which went out under another id, or was not published here."""
    known = _warned.setdefault(task._get_app(), set())
    if task.name not in known:
        known.add(task.name)
        logger.error(
            "Every call of %s is published, since none goes out under its task id, as %s was to. Check that what "
            "overrides apply_async() among its bases hands on all options, also task_id and headers.",
            task.name,
            task_id,
        )
    Reservation(token, task._binding.guard.store).end()


def _refuse_to_publish_later(task: Any) -> None:
    """Refuse a class behind `IdempotentTask` whose ``apply_async`` publishes when a transaction is committed.

    By then the producer that it was given is another's, and other calls are skipped for a message that may never come.

    Raises:
        ConfigurationError: the task has such a class.
    """
    bases = type(task).__mro__
    root = next(base for base in reversed(bases) if "_binding" in vars(base))  # IdempotentTask
    for base in bases[bases.index(root) + 1 :]:
        if "apply_async" in vars(base) and not issubclass(Task, base):
            raise ConfigurationError(
                f"Expected the apply_async of {base.__name__} to publish {task.name} at once and to return its result, "
                "got None. If it publishes when a transaction is committed, a unique task must not count its message "
                f"before that: write {base.__name__} before {root.__name__} among the bases: "
                f"class Base({base.__name__}, {root.__name__})."
            )


def _ask(store: Store, call: Callable[[Store], T]) -> T:
    """Return what a call makes of a store, for which a publisher waits no longer than `BUDGET`.

    Raises:
        StoreError: the store cannot serve, or not in time.
    """
    quick = store.bounded(BUDGET / 2)
    if quick is not None:
        return breaker.call(quick, call, quick)
    return reservations.within(BUDGET, partial(breaker.call, store, call, store))


def _try(store: Store, call: Callable[[Store], T]) -> T | None:
    """Return what `_ask` returns, None where it raises: no call fails for want of a reservation."""
    try:
        return _ask(store, call)
    except StoreError as error:
        logger.info("A reservation is not known: %s", error)
        return None


# -- in a worker -------------------------------------------------------------------------------------------------------


class Reservation:
    """The reservation of the message that a delivery answers.

    Arguments:
        token: What the message carries.
        store: The store of its task.
    """

    def __init__(self, token: Token, store: Store) -> None:
        self.token, self.store = token, store
        #: whether it was given back
        self.over = False
        self._held: HeldLease | None = None

    def replaced_by(self) -> str | None:
        """Return the id of the message that took the place of this one, "" if it has none any more, None for none."""
        try:
            return reservations.replaced_by(self.store, self.token)
        except StoreError as error:
            logger.warning("Whether a later message replaces this one is not known, so it runs: %s", error)
            return None

    def begin(self, on_store_error: str, patience: float, stopping: Callable[[], bool]) -> StoreError | None:
        """Give it back before the body runs, or keep it until the operation has ended.

        Returns the store's error if it could not be given back, and the task is to run all the same.

        Raises:
            StoreError: it could not be given back, and the policy is ``on_store_error="raise"``, or ``"wait"`` and the
                patience of the delivery is at its end.
        """
        if self.token.until == "done":
            with suppress(StoreError):
                self._check_place()
                self._begin_period()
            ttl = self.token.hold + UNCONFIRMED
            held = HeldLease(self.store, Lease(self.token.claim(ttl), self.token.fence), monotonic() - ttl)
            self._held = heartbeat.watch(held)
            return None
        pauses = Backoff(STORE_PAUSE, patience, stopping)
        while True:
            try:
                self._started()
            except StoreError as error:
                if on_store_error == "run":
                    return error
                if on_store_error == "raise" or not pauses.wait():
                    raise
            else:
                return None

    def _check_place(self) -> None:
        """Log that the store has no record of it, if this is the first that this process looks for there."""
        if self.store not in _looked_in:
            record = self.store.peek(self.token.slot)
            _looked_in.add(self.store)
            if record is None:
                logger.warning(
                    "The store of this worker has no record of the reservation %s. Check that its publisher has the "
                    "same idempotency_store; else the store did not answer its publisher, or it has waited for more "
                    "than %g s.",
                    self.token.slot,
                    self.token.hold,
                )

    def _started(self) -> None:
        self._check_place()
        self._begin_period()
        reservations.release(self.store, self.token, Reason.STARTED)
        self.over = True

    def _begin_period(self) -> None:
        if self.token.throttle:
            reservations.throttle(self.store, self.token, current_holder(), runs=True)

    def begin_later(self, publish_again: Callable[[Token | None], object]) -> None:
        """Give it back as soon as the store answers, then publish once more: calls may have been skipped meanwhile.

        Arguments:
            publish_again: Publishes one more message, which carries the token it is given, if any.
        """
        _late[self] = publish_again

        def work() -> None:
            pauses = Backoff(STORE_PAUSE, self.token.hold, never)
            while True:
                try:
                    self._started()
                    break
                except StoreError:
                    if not pauses.wait():
                        _late.pop(self, None)
                        return
            self._publish_again(None)

        threading.Thread(target=work, name="celery-idempotent-reservation", daemon=True).start()

    def _publish_again(self, token: Token | None) -> None:
        publish = _late.get(self)
        if publish is None:  # the other thread was faster
            return
        try:
            publish(token)
        except Exception:  # noqa: BLE001 - the broker's own
            logger.exception("What calls of %s were skipped for meanwhile is not published", self.token.slot)
        _late.pop(self, None)

    def forget(self, wait: float = 0.0) -> None:
        """Renew it no more; the message, or what is published to go on with it in ``wait`` seconds, still has it."""
        if self._held is not None:
            self._held.lease = reservations.confirmed(self.token, wait)  # after a renewal that is on its way
            heartbeat.forget(self._held)
            self._held = None

    def defer(self, delay: float) -> None:
        """Keep it for as long as a deferred copy of the message waits.

        Not one whose claim had no answer: the store may have got that when the message had begun already.
        """
        if not self.over and self.token.fence:
            _try(self.store, lambda store: reservations.confirm(store, self.token, delay))

    def end(self, reason: Reason = Reason.DONE) -> None:
        """Give it back, since nothing will be done for it any more; an error of the store is logged."""
        self.forget()
        if self.over:
            return
        for last in (False, True):
            try:
                reservations.release(self.store, self.token, reason)
                break
            except Exception as error:  # noqa: BLE001 - a time limit that rings here comes once; else it ends by itself
                if last or isinstance(error, StoreError):
                    hold = self.token.hold
                    logger.warning("The reservation %s ends by itself, in %g s: %s", self.token.slot, hold, error)
                    break
        self.over = True


#: Stores in which this process has looked for the reservation of a message.
_looked_in: WeakSet[Store] = WeakSet()
#: What is given back later, and what publishes the task of each once more.
_late: dict[Reservation, Callable[[Token | None], object]] = {}


def hand_over() -> None:
    """Publish, as this process ends, messages that give back at their start what it could not.

    Its threads end with it, and with the token a message has yet to do what calls are skipped for.
    """
    for reservation in list(_late):
        reservation._publish_again(reservation.token)


def reservation_of(task: Any, header: Token | None) -> Reservation | None:
    """Return the reservation of a message that carries this token."""
    return None if header is None else Reservation(header, task._binding.guard.store)


def _forget_own(token: Token, wait: float = 0.0) -> None:
    """Have the body that publishes what goes on in its place, in ``wait`` seconds, renew nothing after that."""
    state = _current_state()
    own = getattr(state, "reservation", None)
    if own is not None and own.token.owner == token.owner:
        own.forget(wait)


def _own_tokens() -> set[str]:
    """Return the owners of the reservations of the bodies that call here, one within another, and their task ids.

    Another message of such an id, as a retry of an earlier delivery, may be dropped once it comes. A thread that a body
    has started knows of none: for one, they are all that this process renews.
    """
    requests = [request for task in _task_stack.stack for request in task.request_stack.stack]
    if all(request.called_directly or request.is_eager for request in requests):
        return {holding.lease.owner for holding in heartbeat.holdings()}
    held = [getattr(request.__dict__.get(STATE_ATTRIBUTE), "reservation", None) for request in requests]
    ids = {request.id for request in requests if request.id and not request.called_directly}
    return ids | {own.token.owner for own in held if own is not None and not own.over}


def _current_state() -> Any:
    task = get_current_worker_task()
    request = task.request_stack.top if task is not None else None
    return None if request is None else request.__dict__.get(STATE_ATTRIBUTE)


# -- messages, brokers, times ------------------------------------------------------------------------------------------


def _token_of(options: Mapping[str, Any]) -> Token | None:
    own = own_header(options.get("headers"))
    return Token.read(own.get(RESERVATION)) if RESERVATION in own else None


def _with_token(options: Mapping[str, Any], token: Token) -> dict[str, Any]:
    headers = options.get("headers") or {}
    return {**headers, META_HEADER: {**own_header(headers), RESERVATION: token.header()}}


def _ignores_result(task: Any, options: Mapping[str, Any]) -> bool:
    option = options.get("ignore_result")
    return bool(task.ignore_result if option is None else option)


def _note_of(app: Any, task_id: str, options: Mapping[str, Any]) -> WaitingMessage:
    """Return the note of a message that is published with these options."""
    expires = options.get("expires")
    if expires is None:  # by which Celery has the broker drop it, too
        expires = options.get("expiration")
    if isinstance(expires, (int, float)):
        expires = app.now() + timedelta(seconds=expires)
    return WaitingMessage(task_id, _text(_due(options, app)), _text(expires), holder=current_holder())


def _text(when: object) -> str:
    return when.isoformat() if isinstance(when, datetime) else str(when or "")


def _due(options: Mapping[str, Any], app: Any) -> Any:
    countdown = options.get("countdown")
    return app.now() + timedelta(seconds=countdown) if countdown else options.get("eta")


def _time(written: str, app: Any, never: float = 0.0) -> float:
    """Return a time that a message has, in seconds since 1970; ``never`` where it has none."""
    if not written:
        return never
    found: datetime = maybe_make_aware(maybe_iso8601(written), app.conf.timezone)
    return found.timestamp()


def _expiry(written: str, app: Any) -> float:
    return _time(written, app, float("inf"))


def _seconds_until(options: Mapping[str, Any], app: Any) -> float:
    if options.get("countdown"):
        return float(options["countdown"])
    due = _time(_text(options.get("eta")), app)
    return max(0.0, due - time()) if due else 0.0


def _in_transaction() -> bool:
    """Return whether a transaction of Django's is open here: what waits may start before its commit."""
    if "django.db" not in sys.modules:
        return False
    from django.conf import settings
    from django.db import connections

    if not settings.configured:  # another library has imported it, and there is no database
        return False
    opened = connections.all(initialized_only=True)
    # Without autocommit one begins with the first statement, and Django does not know whether that was.
    return any(each.in_atomic_block or (each.connection is not None and not each.autocommit) for each in opened)


class _Transport(NamedTuple):
    """How an app publishes."""

    driver_type: str
    driver_name: str
    task_protocol: int


_transports: WeakKeyDictionary[Any, _Transport] = WeakKeyDictionary()


def _transport(app: Any) -> _Transport:
    """Return how an app publishes; its configuration takes longer to ask than the rest of a call's checks."""
    found = _transports.get(app)
    if found is None:
        transport = app.connection_for_write().transport
        found = _Transport(transport.driver_type, transport.driver_name, app.conf.task_protocol)
        _transports[app] = found
    return found


class _OwnConnections(ConnectionPool):
    """Connections of this process; a child of multiprocessing would shut their sockets down as it closes them."""

    close_after_fork = False


#: By app: the process that made it, and its producers whose channels confirm.
_confirming_pools: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


@contextmanager
def _confirming(app: Any, producer: Any, timeout: float | None = None) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the options to publish with, and whether that returns with the broker's word.

    RabbitMQ confirms, and drops, what no queue is bound for, unless that is mandatory. While it is short of memory or
    disk it confirms nothing: no try waits for longer than ``timeout`` (default: as long as for a copy).
    """
    transport = _transport(app)
    if transport.driver_name != "py-amqp":
        yield {"producer": producer}, True
        if transport.driver_type == "redis":
            _reuse_client(app)
        return
    options = app.conf.broker_transport_options or {}
    if producer is not None or options.get("confirm_publish"):
        of_its_own = producer is not None and getattr(producer.connection, "transport_options", None)
        confirms = bool((of_its_own or options).get("confirm_publish"))
        yield {"producer": producer, **({"mandatory": True} if confirms else {})}, confirms
        return
    pid, pool = _confirming_pools.get(app, (0, None))
    if pid != os.getpid():
        from kombu.pools import ProducerPool

        connection = app.connection_for_write(transport_options={"confirm_publish": True})
        limit = app.pool.limit
        make: Any = ProducerPool
        own: Any = _OwnConnections
        pool = make(connections=own(connection, limit=limit), limit=limit, Producer=app.amqp.Producer)
        _confirming_pools[app] = (os.getpid(), pool)
    with pool.acquire(block=True) as confirming:
        try:
            yield {"producer": confirming, "mandatory": True, "timeout": timeout or ANSWER_TIMEOUT}, True
        except BaseException:
            confirming.connection.collect()  # what comes later would be taken for the answer to something else
            raise


def _reuse_client(app: Any) -> None:
    """Have the connection that was used last send by one client from now on, if the app keeps it.

    It is looked at where it lies. To hold it while Celery publishes would block for ever where the base class of a
    task, a router or a text of an argument publishes too, and the pool has no other one.
    """
    with suppress(IndexError, AttributeError):  # none is kept; it was never opened, or not to a Redis
        channel = app.producer_pool.connections._resource.queue[-1]._default_channel
        if channel is not None:
            reuse_client(channel)


def token_in(headers: Mapping[str, Any] | None) -> Token | None:
    """Return the token in the headers of a message, whatever else they are."""
    return _token_of({"headers": headers}) if isinstance(headers, Mapping) else None


def release_unrun(sender: Any = None, message: Any = None, **_: Any) -> None:
    """Give back what a message holds that a worker cannot read, or whose task it does not know."""
    token = token_in(getattr(message, "headers", None))
    if token is not None:
        end_in_background(lambda: store_of(sender.app), token)


def end_unrun(task: Any, error: Exception) -> None:
    """Give back what a message holds whose delivery an error ends before the task is called.

    Not where it comes again, or a retry or a replacement that has been published goes on with it.
    """
    request = task.request_stack.top
    if request is None:
        return
    state = request.__dict__.get(STATE_ATTRIBUTE)
    token = state.identity.reservation if state is not None else token_in(request.__dict__)
    again = isinstance(error, Retry) or (isinstance(error, Reject) and error.requeue)
    if token is not None and not again and not getattr(state, "continued", False):
        Reservation(token, task._binding.guard.store).end()


def end_in_background(store: Callable[[], Store], token: Token, reason: Reason = Reason.DONE) -> None:
    """Give a reservation back, in a thread: a worker's main process must not wait for a store."""

    def work() -> None:
        try:
            Reservation(token, store()).end(reason)
        except ConfigurationError as error:
            warn(error)

    def warn(error: Exception) -> None:
        logger.warning("The reservation %s ends by itself, in %g s: %s", token.slot, token.hold, error)

    try:
        threading.Thread(target=work, name="celery-idempotent-reservation", daemon=True).start()
    except RuntimeError as error:  # there are too many, and what called has a message to go on with
        warn(error)
