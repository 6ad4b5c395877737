"""One delivery of a Celery message: request -> claim, decision of the guard -> Celery's control flow."""

from __future__ import annotations

import logging
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from types import NoneType
from typing import Any

from amqp.exceptions import FrameSyntaxError, MessageNacked
from celery import states
from celery.app.task import Task
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, OperationalError, Reject, Retry, SoftTimeLimitExceeded, WorkerLostError
from kombu.exceptions import OperationalError as BrokerError

from .. import events
from ..core.backoff import Backoff, retry_if_interrupted
from ..core.binding import check_returned
from ..core.guard import Busy, Decision, Delivery, Dropped, Ending, Ignored, Ran, Replayed
from ..core.history import DeliveryEvents
from ..core.lease import HeldLease, running
from ..core.reservations import Token
from ..errors import Conflict, LeaseLost, PreviouslyFailed, ResultUnavailable, StoreError
from ..stores.records import RETRIES_LIMIT, Outcome, Reason, Record, Release, State, attempt_number
from ..stores.rules import SECOND
from . import canvas, message, monitoring, pool, unique
from .app import TaskBinding, is_done_since, is_shared, meta_of
from .declarations import UNFINISHED
from .message import DeliveryState

#: Part of a task's own time limit that may be spent waiting for the store.
PATIENCE = 0.8
#: Seconds to pause (less up to half, at random), first and at most, before a message goes back to its queue: it comes
#: straight back, and must not spin.
REQUEUE_PAUSE = (2.0, 30.0)
#: Exit codes of a pool's child that is ended by a signal, as billiard has them.
SIGNALLED = {number - 256 for number in signal.Signals}
#: Most seconds between two looks at a message that can neither run nor be published again.
SLOT_PAUSE = 5.0
#: Seconds after a retry is due during which nothing else may begin: clocks differ, and a worker may be busy.
RETRY_GRACE = 1.0
#: Seconds that a duplicate waits for what is to go on with its operation without a look whether that has failed. Most
#: retries are due sooner, and leave the failure of another delivery of their id in the result backend.
LONG_WAIT = 3600.0
#: Seconds after a task was replaced by others during which its duplicates wait for their result. Some leave none.
REPLACED_WAIT = 600.0
#: Arguments that no body can change in place.
_UNCHANGEABLE = {str, int, float, bool, bytes, NoneType}


class TaskLeaseLost(LeaseLost, Ignore):
    """`LeaseLost` inside a task: as Celery's `Ignore`, so that ``autoretry_for=(Exception,)`` lets it pass."""


class CeleryDelivery(Delivery):
    """One delivery of a message to a task.

    Arguments:
        task: The task.
        request: Its request, as the tracer pushed it.
        run: Runs the body.
        args, kwargs: The message's arguments.
    """

    lost_error = TaskLeaseLost
    stopping = staticmethod(pool.is_stopping)
    #: The arguments as they came, once a body runs that may change them in place.
    sent: bytes | None = None
    #: Whether it was logged that the broker takes no copy.
    unpublished = False

    def __init__(self, task: Any, request: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        request._protected = 1  # Celery's word for: further calls of this task are calls of their own
        self.task, self.request, self.run, self.args, self.kwargs = task, request, run, args, kwargs
        self.binding: TaskBinding = task._binding
        self.state = DeliveryState.of(request)
        self.state.delivered = True
        self.state.continues = bool(request.callbacks or request.chain)
        if request.chord or request.chain:
            canvas.count_parts_once(task.backend)

    def answer(self) -> Any:
        """Return what the task returns, now or when it ran before, or raise the exception that ends the delivery.

        Raises:
            IdempotencyError: the task fails without having run; see `celery_idempotent.errors`.
            Expired: the message expired; the worker's main process revokes it.
            Replaced: a later message does its work; the worker's main process revokes it.
            Ignore: another copy of the message will be answered.
            Reject: the broker takes no copy.
            Exception: what the body raised.
        """
        ended: BaseException | None = None
        reservation = self.state.reservation = unique.reservation_of(self.task, self.state.identity.reservation)
        try:
            if self.state.identity.is_anothers:
                self.state.stood_aside = True
                raise Ignore(f"it goes on with a delivery to {self.state.identity.meant_for}")
            if pool.begins_nothing() and not (self.request.is_eager or was_acked(self.task, self.request)):
                raise Reject("its worker is being ended", requeue=True)
            if reservation is not None and (later := reservation.replaced_by()) is not None:
                raise Replaced(f"replaced by {later or 'a later message'}")
            self._prepare()
            return self._answer()
        except BaseException as error:
            ended = error
            if isinstance(error, Exception):
                remembered = isinstance(error, (PreviouslyFailed, *self.binding.policy.remember_failures))
                canvas.give_errback_ids(self.request, self.task.app, remembered=remembered)
            raise
        finally:
            pool.end_run(self.state.identity.owner, begun=self.state.begun)
            if reservation is not None:
                retry_if_interrupted(partial(self._leave, reservation, ended))
            # The request has its state, that has the lease, and that this delivery: nothing may wait for the collector.
            self.state.give_up = self.state.left_by = self.sent = None
            del self.request, self.args, self.kwargs, self.run, self.state

    def _leave(self, reservation: unique.Reservation, error: BaseException | None) -> None:
        """Give the reservation back, unless a message goes on with it: this one again, a copy, a retry."""
        again = isinstance(error, Reject) and error.requeue
        going_on = isinstance(error, Retry) or self.state.stood_aside or self.state.continued or again
        if going_on or not isinstance(error, (Exception, NoneType)):
            reservation.forget()
        else:
            reservation.end()

    def _prepare(self) -> None:
        task, request, backend = self.task, self.request, self.task.backend
        hard, soft = request.timelimit or (None, None)
        applied = self.state.identity.limit  # the task's own in this process may be another, by remote control
        hard = (hard or task.time_limit or pool.limits[0]) if applied is None else applied
        soft = soft or task.soft_time_limit or pool.limits[1]
        self.patience = PATIENCE * min(hard or float("inf"), soft or float("inf"))
        if request.is_eager:  # the caller waits, and may be serving a request
            self.patience = min(self.patience, self.binding.policy.wait_timeout)
        self.max_lease = self.binding.max_lease(None if request.is_eager else hard)  # no limit ends a call in place
        ignored = message.ignores_result(task, request)
        ignored = ignored or (isinstance(backend, DisabledBackend) and not request.is_eager)
        self.wants_result = bool(not ignored or request.callbacks or request.chain or request.chord)
        # Releases of Celery differ in whether a message may overrule a task that ignores its results.
        stored = not (task.ignore_result or ignored or (request.is_eager and not task.store_eager_result))
        self.published = stored and is_shared(backend)
        self._go_by()

    def _go_by(self, key: str = "") -> None:
        """Request this key of the store (default: the operation's, as the message names it)."""
        request, identity, binding = self.request, self.state.identity, self.binding
        named = binding.named(identity, request.id, self.args, self.kwargs, request.headers)
        arguments = None if key else named.arguments
        key = key or named.operation
        self.state.key, self.state.named = key, named.key
        compared = arguments is not None and binding.compares
        if arguments is not None and compared and identity.fingerprint_of != key:
            # Every message that continues this operation carries it.
            fingerprint = binding.fingerprint(arguments)
            identity.fingerprint, identity.fingerprint_of = fingerprint, key
        claim = binding.claim(
            key,
            identity.owner,
            task_id="" if arguments is None else request.id,
            nesting=self.state.nesting,
            retries=request.retries or 0,
            copy=identity.copy,
            token=identity.token,
            redelivered=bool((request.delivery_info or {}).get("redelivered")),
            sender=identity.sender,
            fingerprint=identity.fingerprint if compared else "",
            message_id=request.id,
        )
        self.identify(binding.events_of(claim, request.id))

    def _answer(self) -> Any:
        task, request = self.task, self.request
        while True:
            decision = self._run_guarded()
            if isinstance(decision, Replayed):
                claimed = canvas.chord_claim(task, request, decision.record)
                if claimed:
                    decision = Busy(claimed, request.id)  # perhaps its holder died: come back once it is gone
            if isinstance(decision, Ignored) and self._comes_back(decision):
                self._go_by(self.binding.default_key(f"{request.id}/{self.state.nesting}"))
                continue
            if not isinstance(decision, Busy):
                return self._conclude(decision)
            if not (decision.awaited and decision.remaining > LONG_WAIT and self._free_if_failed(decision)):
                self._stand_aside(decision)

    def _run_guarded(self) -> Decision:
        task, request = self.task, self.request
        try:
            self._revoke_if_expired()
            return (self.state.identity.operation and self._leave_replaced()) or self.binding.guard.run(self)
        except SoftTimeLimitExceeded as error:
            if not self.state.begun:  # perhaps just after its grant, where nothing would release
                self.binding.guard.give_back(self, error)
            raise
        except SystemExit as leaving:
            if pool.enforces_limits or request.is_eager or type(leaving) is not SystemExit:
                raise
            # No child ends with it, and Celery would neither answer the message nor give it back.
            if was_acked(task, request):
                raise WorkerLostError(f"The body left with {leaving!r}.") from leaving  # as where a child ends
            raise Reject(f"the body left with {leaving!r}", requeue=True) from leaving

    def body(self, held: HeldLease) -> Any:
        """Run the task's body."""
        task, request, state = self.task, self.request, self.state
        if request.expires and message.is_expired(task.app, request.expires):
            raise Expired(f"expired at {request.expires}")
        self.sent = None if request.is_eager else _kept(self.args, self.kwargs)  # a call in place has no copies
        # A subclass's __call__ may yet call IdempotentTask's, which then enters the body; a task's own run is the body.
        state.holding, state.entered = held, self.run == task.run
        if state.reservation is not None:
            self._begin(state.reservation)
        state.begun, state.left_by = True, None  # what before_start has published is not the body's end
        if state.identity.copy and held.fence and not held.lease.taken_over:
            monitoring.send_resumed(held.key, task.name, request.id, state.identity.copy)
        state.give_up = partial(self._give_up, held)
        try:
            pool.begin_run(state.identity.owner)
            pool.begin(held, task.name, request.id)
            with running(held):
                value = check_returned(task.name, self.run(*self.args, **self.kwargs), UNFINISHED)
        finally:
            pool.end(held)
        if state.left_by is not None and not request.is_eager:  # in place, nothing was published
            # Another message does the work, and would find it done.
            left = "%s[%s] caught what it had raised to end, and returned: it ends with it, %r"
            events.logger.warning(left, task.name, request.id, state.left_by)
            raise state.left_by
        if request.is_eager and isinstance(value, Retry):
            raise value  # from retry(throw=False): Celery runs what apply() has for its value
        return value

    def _begin(self, reservation: unique.Reservation) -> None:
        policy, patience = self.binding.policy, max(0.0, self.patience - self.waited)
        try:
            late = reservation.begin(policy.on_store_error, patience, pool.is_stopping)
        except StoreError as error:
            if policy.on_store_error == "raise" or was_acked(self.task, self.request):
                raise
            raise put_back(f"The store cannot note that the body starts ({error}), for which calls wait.") from error
        if late is not None:
            task, request, info = self.task, self.request, self.request.delivery_info or {}
            options = {name: info[name] for name in ("exchange", "routing_key", "priority") if info.get(name)}
            key, sent, given = self.state.identity.key, self.sent, (request.args, request.kwargs)

            def publish(token: Token | None) -> None:
                own = {message.META_HEADER: {message.RESERVATION: token.header()}} if token is not None else {}
                headers = {**message.without_deaths(request.headers), **own}
                args, kwargs = given if sent is None else pickle.loads(sent)  # noqa: S301 - of our own making
                Task.apply_async(task, args, kwargs, headers=headers, idempotency_key=key, **options)

            reservation.begin_later(publish)

    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record, given what the body raised."""
        state, request, codec = self.state, self.request, self.binding.guard.codec
        match error:
            case Retry():
                return self._ending_by(error)
            case Reject():
                return Release(Reason.REQUEUED if error.requeue else Reason.REJECTED)
            case Expired():
                return Release(Reason.REVOKED)
            case LeaseLost():
                return Release(Reason.REQUEUED)
            case Ignore():
                if state.continued:
                    # What comes before the continuation may take long, and no duplicate may run beside it.
                    return Release(Reason.RETRY, self.binding.policy.failure_ttl, attempt_number(state.nesting + 1, 0))
                return Outcome(
                    State.COMPLETED, codec.encode_ignored(request.id, state.nesting if state.replaced else None)
                )
            case Exception():
                if self.binding.is_final(error):
                    return Outcome(State.FAILED, codec.encode_exception(error))
                # Celery ends the whole worker for want of memory, and the broker hands the message to the next one.
                fatal = isinstance(error, MemoryError) and not request.is_eager
                return Release(Reason.CRASHED if fatal else Reason.FAILED)
            case _:
                return Release(self._reason_of_exit(error))

    def _ending_by(self, retry: Retry) -> Release:
        """Return the release of a run whose retry was published."""
        attempt = attempt_number(self.state.nesting, (self.request.retries or 0) + 1)
        # A call in place retries at once, or never, where the retry is raised to its caller (task_eager_propagates).
        if self.request.is_eager:
            return Release(Reason.RETRY, 0.0, attempt)
        # What goes on after a replacement is no new beginning: nothing else may begin once its retry is due.
        longer = self.binding.policy.failure_ttl if self.state.nesting else 0.0
        return Release(Reason.RETRY, seconds_until(retry.when) + RETRY_GRACE + longer, attempt)

    def _reason_of_exit(self, error: BaseException) -> Reason:
        if (reason := pool.exit_reason(self.state.identity.owner)) is not None:
            return reason
        if pool.is_stopping() or self.request.is_eager:
            return Reason.SHUTDOWN
        if isinstance(error, SystemExit) and error.code in SIGNALLED and pool.stops_soon():
            return Reason.SHUTDOWN
        # Celery takes an exit for the loss of a child and puts the message back: that must not go on for ever.
        comes_back = isinstance(error, (SystemExit, KeyboardInterrupt))
        comes_back = comes_back or (_is_time_limit(error) and not acks_on_timeout(self.task))
        return Reason.CRASHED if comes_back else Reason.FAILED

    def due(self, ignored: Ignored) -> float:
        """Return the seconds within which those that replaced the task may yet end; 0 to go by what is there.

        They end long before the record does: a copy that came after it would run.
        """
        record, policy, backend = ignored.record, self.binding.policy, self.task.backend
        if ignored.nesting is None or record.task_id in ("", self.request.id) or not self.wants_result:
            return 0.0
        kept = record.age + record.retention if record.retention else policy.result_ttl
        left = min(REPLACED_WAIT, kept / 2) - record.age
        if left <= 0 or self.request.is_eager or policy.on_conflict == "raise" or not is_shared(backend):
            return 0.0
        meta = meta_of(self.task.backend, ignored.reference)
        return 0.0 if meta is not None and meta["status"] in states.READY_STATES else left

    def recall(self, record: Record) -> None:
        """Leave out the errbacks that were published when the task failed."""
        canvas.forget_errbacks(self.request, record)

    def _give_up(self, held: HeldLease, retry: Retry) -> None:
        if not self.request.is_eager:  # there it is not published
            pool.end(held)
            self.binding.guard.give_up(self, held, self._ending_by(retry), retry)

    def _revoke_if_expired(self) -> None:
        """Raise `Expired` where the expiry has passed, unless the operation is, or was, done by this very task id.

        Its caller waits for that run, whose result a revocation would hide. What was begun and not settled is decided
        under the lease.
        """
        if not self.request.expires or not message.is_expired(self.task.app, self.request.expires):
            return
        guard = self.binding.guard
        try:
            record = guard.breaker.call(guard.store, guard.store.get, self.claim.key)
        except StoreError:
            return  # the guard waits for the store, or does what else the policy has
        if record is None or record.task_id != self.claim.task_id:
            expired = Expired(f"expired at {self.request.expires}")
            if record is not None and (self.claim.attempt or self.claim.copy):
                guard.give_back(self, expired, Release(Reason.REVOKED))  # sent again under its id, it is no copy
            raise expired

    def _leave_replaced(self) -> Decision | None:
        """Settle the operation that this message was published to continue, if its own is another.

        The replaced task was replaced by itself with other arguments, which are an operation of their own: what is done
        under one key must not be done under another.
        """
        replaced, request, guard = self.state.identity.operation, self.request, self.binding.guard
        if replaced == self.state.key:
            return None
        known = replaced == self.binding.default_key(request.id)
        claim = replace(self.claim, key=replaced, task_id="" if known else request.id, fingerprint="")
        ignored = Outcome(State.COMPLETED, guard.codec.encode_ignored(request.id, self.state.nesting - 1))
        delivery = _WithoutBody(DeliveryEvents(claim, self.task.name, request.id), ignored)
        found = guard.acquire_now(delivery)
        if not isinstance(found, HeldLease):
            return found if isinstance(found, (Busy, Dropped)) else None
        if found.fence:
            with suppress(Ignore):
                guard.finish(delivery, found, error=Ignore())
        return None

    def _comes_back(self, decision: Ignored) -> bool:
        """Return whether others that replaced this task were replaced by it in turn, so that this is no redelivery."""
        own = decision.record.task_id in ("", self.request.id)
        return own and decision.nesting is not None and decision.nesting < self.state.nesting

    def _free_if_failed(self, busy: Busy) -> bool:
        """Release the operation if the task that is to go on with it has failed; return whether it was released.

        The operation was replaced by a signature that ends in itself. Where something before the end has failed, the
        end never comes. A failure of before its last run is of an earlier one under the same id: but for PostgreSQL, a
        fence is the time at which the store granted it. Clocks may differ.
        """
        task_id, since = busy.holder_task_id, busy.awaited / SECOND - unique.SKEW
        meta = meta_of(self.task.backend, task_id or self.request.id) if is_shared(self.task.backend) else None
        if meta is None or meta["status"] not in states.PROPAGATE_STATES:
            return False
        if not is_done_since(self.task.backend, meta, since):
            return False
        # As the continuation that will not come, however deeply it would have been nested.
        claim = replace(
            self.claim, task_id=task_id or "", nesting=RETRIES_LIMIT - 1, copy=0, token="", redelivered=False
        )
        guard, failed = self.binding.guard, Release(Reason.FAILED)
        delivery = _WithoutBody(DeliveryEvents(claim, self.task.name), failed)
        found = guard.acquire_now(delivery)
        return isinstance(found, HeldLease) and bool(found.fence) and guard.release(delivery, found, failed)

    def _conclude(self, decision: Decision) -> Any:
        """Translate the guard's decision into Celery's control flow."""
        match decision:
            case Ran(value):
                holding = self.state.holding
                canvas.assign_callback_ids(self.request, self.task.app, holding.fence if holding else 0)
                return value
            case Replayed(value, record):
                self._continue_once(record)
                return value
            case Ignored(reference, record):
                if record.task_id in ("", self.request.id):
                    raise Ignore(f"{record.key} was done before and ended without a result of its own")
                if not self.wants_result:
                    return None
                value = self._result_of(reference)
                self._continue_once(record)
                return value
            case Dropped():
                self.state.stood_aside = True
                raise Ignore("a later copy of this message has taken its place")
        raise AssertionError(f"the guard decided nothing but {decision!r}")  # pragma: no cover

    def _continue_once(self, record: Record) -> None:
        """Leave to Celery what it has not dispatched for this task id before."""
        task, request = self.task, self.request
        if request.id in record.dispatched:
            canvas.clear_continuations(task, request)
            return
        if canvas.counts_parts(task, request) and canvas.chord_is_over(task, request):
            # Its part was counted, or there would be the group's result. Celery would report that as the body's error.
            request.chord = None
        canvas.assign_callback_ids(request, task.app, record.fence)

    def _result_of(self, task_id: str) -> Any:
        """Return what the result backend has under another task's id: that task left its result there, not with us."""
        shared = is_shared(self.task.backend)
        meta = self.task.backend.get_task_meta(task_id) if shared else {"status": "known to no result backend"}
        if meta["status"] == states.SUCCESS:
            return meta["result"]
        if meta["status"] in states.PROPAGATE_STATES and isinstance(meta["result"], BaseException):
            raise meta["result"]
        raise ResultUnavailable(
            f"{self.state.key!r} was done by task {task_id}, which ended without a result of its own "
            f"(Ignore, or replaced) and whose state is {meta['status']}. "
            "Wait for that task instead of publishing a duplicate of it."
        )

    def _stand_aside(self, busy: Busy) -> None:
        """Publish a copy of the message and end this delivery of it.

        Return, after a pause, only if no copy can be published and the message cannot be put back either.
        """
        task, request, identity = self.task, self.request, self.state.identity
        if self.state.failed is not None:  # as which the operation has ended
            raise self.state.failed
        if request.is_eager:
            if busy.error is not None:
                raise busy.error
            raise Conflict(
                f"{self.state.key!r} is being done elsewhere, and a call of apply() cannot be deferred. "
                "Call apply_async(), or try again later."
            )
        delay = message.copy_delay(task.app, identity.copy, busy.remaining)
        if self.state.reservation is not None:
            self.state.reservation.defer(delay)
        self._restore_arguments()
        publish = partial(message.publish_copy, task, request, identity, delay)
        try:
            try:
                copy = publish()
            except SoftTimeLimitExceeded:
                copy = publish()  # perhaps a second one; to ack this message without any could lose the operation
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            if not is_outage(task.app, error):
                # A message put back would be refused too, and end the worker's main process.
                logged = "%s[%s] cannot be published again (%s); it waits in its slot"
            elif was_acked(task, request):
                logged = "%s[%s]: the broker took no copy of this message (%s), which was acked; it waits in its slot"
            else:
                reason = f"The broker took no copy of this message ({error}), so it goes back to its queue."
                raise put_back(reason) from error
            level = logging.DEBUG if self.unpublished else logging.ERROR
            events.logger.log(level, logged, task.name, request.id, events.in_words(error))
            self.unpublished = True
            time.sleep(min(delay, SLOT_PAUSE))
            return
        _requeue_pauses.pause = REQUEUE_PAUSE[0]
        self.state.stood_aside = True
        self.emit(events.Deferred, delay=delay, copy=copy)
        raise Ignore(
            f"{self.state.key} is being done elsewhere; copy {copy} of this message tries again in {delay:.1f} s"
        )

    def _restore_arguments(self) -> None:
        """Take back what a body has changed in the arguments that has lost its lease."""
        if self.sent is not None:
            self.args, self.kwargs = pickle.loads(self.sent)  # noqa: S301 - of our own making
            self.request.args, self.request.kwargs = self.args, self.kwargs


class _WithoutBody(Delivery):
    """A delivery that only ends another operation.

    Arguments:
        events: Emits its events.
        end: The ending to record.
    """

    def __init__(self, events: DeliveryEvents, end: Ending) -> None:
        super().__init__()
        self.identify(events)
        self.end = end

    def body(self, held: HeldLease) -> None:
        """Do nothing; it is not run."""

    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record."""
        return self.end


#: Grows from failure to failure of this process, and starts again with the first copy that is published.
_requeue_pauses = Backoff(REQUEUE_PAUSE, float("inf"), pool.is_stopping)


def _kept(args: Any, kwargs: Any) -> bytes | None:
    """Return the arguments of a message as they came; None where no body can change them, or nothing keep them."""
    if _UNCHANGEABLE.issuperset(map(type, args)) and _UNCHANGEABLE.issuperset(map(type, kwargs.values())):
        return None
    try:
        return pickle.dumps((args, kwargs))
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001 - the code of the user's own classes; the copy will have what is there then
        return None


def was_acked(task: Any, request: Any) -> bool:
    """Return whether the broker has forgotten the message already, and does not take it back (`allow_early_ack`)."""
    return not task.acks_late and not request.is_eager


def acks_on_timeout(task: Any) -> bool:
    """Return whether Celery acks the message of a task that hits its hard time limit; else it puts it back."""
    return bool(getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout))  # one option before Celery 5.7


def _is_time_limit(error: BaseException) -> bool:
    """Return whether this is how a pool of gevent's ends a body at its hard limit."""
    gevent = sys.modules.get("gevent")
    return gevent is not None and isinstance(error, gevent.Timeout)


def put_back(reason: str) -> Reject:
    """Pause, and return what puts a message back into its queue."""
    _requeue_pauses.wait()
    return Reject(reason, requeue=True)


def is_outage(app: Any, error: Exception) -> bool:
    """Return whether the broker cannot be reached, as opposed to a broker or a serializer that refuses the message."""
    cause = error.__cause__ or error
    if isinstance(cause, FrameSyntaxError):  # AMQP has no form for a header; to kombu, a connection is lost by that
        return False
    outage: tuple[type[BaseException], ...] = (OSError, *app.connection_for_write().connection_errors)
    if cause is error and (isinstance(error, (BrokerError, OperationalError)) or _is_of_closed_channel(error)):
        return True
    return isinstance(cause, outage)


def _is_of_closed_channel(error: Exception) -> bool:
    """Return whether kombu has published on a channel that it had closed itself.

    It does so on Redis, where the connection breaks as it declares the queue: it connects again, and declares on the
    new channel.
    """
    if not isinstance(error, AttributeError) or error.obj is not None:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("kombu.transport.")


def is_nacked(error: Exception) -> bool:
    """Return whether RabbitMQ has refused a message for now, as a queue that is full does."""
    return isinstance(error.__cause__ or error, MessageNacked)


#: What a Redis answers that takes no writes for now: it is full, busy, cannot save, follows another that may be away,
#: lacks replicas, or has the rights of its user changed.
_NO_WRITES = re.compile(
    "(^|: )(OOM|MISCONF|BUSY|READONLY|NOREPLICAS) |memory > 'maxmemory'|read only replica"
    "|Link with MASTER is down|user has no permissions"
)


#: What SQS answers to a message that it never takes, as one that is too long.
_NEVER_TAKEN = re.compile("Invalid(MessageContents|ParameterValue|AttributeValue)|MissingParameter|Unsupported")


def takes_no_writes(error: Exception) -> bool:
    """Return whether a broker on Redis, or SQS, has refused a message for now; put back, it would be refused too.

    SQS does so while it throttles, or the worker's token has expired or its rights have changed; to kombu, none of that
    is an error of the connection.
    """
    cause = error.__cause__ or error
    code = _answer_of_aws(cause)
    return _NO_WRITES.search(str(cause)) is not None if code is None else not _NEVER_TAKEN.search(code)


def _answer_of_aws(error: BaseException) -> str | None:
    """Return the code with which AWS has answered, or None where it has not; its driver may not be there."""
    response = getattr(error, "response", None) if type(error).__module__.partition(".")[0] == "botocore" else None
    if not isinstance(response, dict):
        return None
    return str(response.get("Error", {}).get("Code"))


class Expired(Ignore):
    """The message expired, and the operation is neither being done nor done by its task id."""


class Replaced(Ignore):
    """A later message took the place of this one, as its task's option ``unique`` has it."""


def seconds_until(when: Any) -> float:
    """Return the seconds until a retry is due; Celery gives a number or a time."""
    if isinstance(when, datetime):
        aware = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        return max(0.0, (aware - datetime.now(timezone.utc)).total_seconds())
    return max(0.0, float(when or 0))
