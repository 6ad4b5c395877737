"""The seam in the worker's main process: it names each delivery, and speaks for children that cannot."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep, time
from typing import Any
from weakref import ref

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import states
from celery.exceptions import Ignore, Retry, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from celery.worker.request import Request

from ..core import lease
from ..errors import IdempotencyError
from ..events import Released, in_words, logger
from ..stores.base import Store
from ..stores.records import Claim, Reason, State, new_owner
from . import canvas, monitoring, unique
from . import message as messages
from . import pool as shared
from .app import TaskBinding, is_done_since, is_guarded, is_shared
from .delivery import Expired, Replaced, acks_on_timeout, put_back
from .message import DELIVERY_ENTRY, KEY_HEADER, DeliveryState

#: Longest time in seconds that the worker's main process waits for a store.
LONGEST_WAIT = 0.2
#: Longest time in seconds that a killed child may take to be gone.
KILL_TIMEOUT = 10.0
#: Deliveries that this worker has stopped and that their stores are to mark; a signal's handler may append to it.
cut_off: deque[IdempotentRequest] = deque(maxlen=10_000)


class IdempotentRequest(Request):
    """A request that gives its delivery an owner, and releases the lease of a child that died."""

    #: why this worker ends the delivery, once it does
    _exit_reason: Reason | None = None
    #: whether its body is a greenlet that was killed
    _cut_off = False
    #: whether its operation goes on after its child was lost: the message comes back, or its retry was published
    _goes_on = False
    #: whether another delivery had taken over when it hit its hard limit
    _overtaken = False
    #: the hard limit in seconds by which it has failed
    _limit_hit: float | None = None
    #: whether its token of the task's rate limit was given back
    _token_back = False
    #: the delivery of its task id that this worker had before, which it hides from Celery's remote control; weak, or
    #: each copy of a message would keep all that came before it
    _hidden: ref[Any] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "on_success" in vars(cls):  # as in what Celery makes of this class for each task
            setattr(cls, "on_success", _seeing_base_exceptions(cls.on_success))  # noqa: B010 - mypy knows no other way

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        # Overwritten whatever the message holds: an owner is the proof of one delivery and of no other.
        self._owner = new_owner()
        self._received = time()
        known = worker_state.requests.get(self.id)
        if known is not None:
            hidden = getattr(known, "_hides", None)
            self._hidden = ref(hidden if hidden in worker_state.reserved_requests else known)
        if isinstance(self._request_dict.get("headers"), dict):
            self._request_dict["headers"] = messages.headers_beside(self._request_dict)
        key = (message.properties or {}).get(KEY_HEADER)
        if key is not None:  # from a producer that has not imported us, so that nothing moved it into the headers
            self._request_dict.setdefault(KEY_HEADER, key)
        entry = self._request_dict[DELIVERY_ENTRY] = {
            "owner": self._owner,
            "content_type": message.content_type,
            "compression": (message.headers or {}).get("compression"),
            "limit": self._hard_limit() or 0,
        }
        canvas.count_parts_once(self.task.backend)  # before Celery returns a part from this process
        exchange = (self._delivery_info or {}).get("exchange")
        if exchange:  # the default one of AMQP, by which most messages come, has no name
            entry["exchange_type"] = messages.type_of(self._app, exchange)
            entry["place"] = messages.place_of(self._app, exchange, self._hostname)

    @property
    def _hides(self) -> Any:
        return None if self._hidden is None else self._hidden()

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """Do as Celery does for an operator who revokes what runs: that is no crash of the task."""
        self._announce(Reason.REVOKED)
        if self._hides in worker_state.active_requests:  # Celery found this one, and that one runs
            self._hides.terminate(pool, signal)
        return super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> Any:
        """Do as Celery does on a cold shutdown or a lost broker connection: that is no crash of the task either."""
        self._announce(Reason.SHUTDOWN)
        if is_guarded(self.task):
            cut_off.append(self)
        shared.cut_off()
        self._cut_off = pool.is_green
        if pool.is_green and self.worker_pid == pool.getpid():
            self._cut_off_others(pool, signal, options)
        try:
            return super().cancel(pool, signal, **options)
        except Exception as error:
            # Celery calls pools for what they cannot do: raised here, in a signal's handler, it would fail the body
            # that this thread is running, and leave the other bodies as they are.
            if shared.enforces_limits:
                raise
            logger.warning("Cutting off %s[%s] raised %r", self.name, self.id, error)

    def _cut_off_others(self, pool: Any, signal: Any, options: dict[str, Any]) -> None:
        """Cut off the other bodies before this one, in which the signal's handler runs: it ends with its body."""
        for other in tuple(worker_state.active_requests):
            over = other.acknowledged or other._already_cancelled or other.id in worker_state.successful_requests
            if other is not self and is_guarded(other.task) and not over:
                other.cancel(pool, signal, **options)

    def maybe_expire(self) -> bool:
        """Leave it to the delivery to decide whether the message expired, since it can read the store.

        A message that is delivered again after its expiry, while its operation runs, must not be revoked: the
        caller would see that it does not run, and Celery would have every later message of the id discarded.
        """
        return not is_guarded(self.task) and bool(super().maybe_expire())

    def acknowledge(self) -> None:
        """Acknowledge the message; not of a greenlet that was killed, which its pool reports as a success."""
        self._give_token_back()
        if self._hidden is not None:
            self._show_hidden()
        if not self._cut_off:
            super().acknowledge()

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Do as Celery does, and release the lease once a child that hit its hard limit is gone.

        Not as Celery does where the child had lost its lease before, as while it hung: its end is not that of the
        operation. But until it is killed, it may be granted another.
        """
        if soft:
            return super().on_timeout(soft, timeout)
        answer = None
        if self._put_back_if_overtaken():
            self._announce(Reason.REQUEUED)
        else:
            # What goes back to its queue to hit the limit again must not do so for ever.
            self._announce(Reason.FAILED if acks_on_timeout(self.task) else Reason.CRASHED)
            answer = super().on_timeout(soft, timeout)
            if acks_on_timeout(self.task):
                self._end_reservation(Reason.DONE)
                self._limit_hit = None if worker_state.should_terminate else timeout  # else nothing was stored
        if self.worker_pid and shared.enforces_limits:
            # billiard reports first and kills afterwards: free the key when the body has really ended. In other pools
            # the body has ended, and its "pid" is no process's.
            self._in_background(self._release_when_gone)
        return answer

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Release the lease of a child that is gone, then do as Celery does."""
        monitoring.flush()  # of a deferral, after which Celery sends no event
        self._give_token_back()
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, Expired):
            logger.info("Discarding revoked task: %s[%s]", self.name, self.id)  # as Celery does
            return self._announce_revoked("expired", False, None, True)
        if isinstance(error, Replaced):
            return self._announce_revoked(str(error), False, None, False)
        if isinstance(error, TimeLimitExceeded) and self._put_back_if_overtaken():
            return None
        own_exit, lost = isinstance(error, (SystemExit, KeyboardInterrupt)), isinstance(error, WorkerLostError)
        if not return_ok and (own_exit or lost or isinstance(error, Terminated)):
            # The child is gone. Released before Celery puts the message back, so that the next delivery does not wait
            # for the lease.
            self._within_limit(lambda: self._release(self._reason_of_loss(error)))
            if own_exit and not (self._already_cancelled or self._already_revoked):
                exc_info = _lost(error)  # Celery before 5.7 acks it, and cannot store it
        if return_ok and isinstance(error, (WorkerLostError, TimeLimitExceeded)):
            # Its child lives: its body raised that, as where a task that it waited for was lost, or an earlier run did.
            exc_info.exception = _Raised(error)
        try:
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        finally:
            # Perhaps the child could not give it back: it was lost, or Celery failed before the task was called.
            if self.acknowledged and not self._goes_on and not isinstance(error, (Ignore, Retry)):
                self._end_reservation(Reason.DONE)

    def reject(self, requeue: bool = False) -> None:
        """Do as Celery does, and take note of a message that comes back."""
        if self._hidden is not None:
            self._show_hidden()
        self._goes_on = self._goes_on or (requeue and not self.acknowledged)
        super().reject(requeue=requeue)

    def _show_hidden(self) -> None:
        """Have remote control find the delivery again that has the same task id and goes on."""
        hidden = self._hides
        if hidden is not None and hidden in worker_state.reserved_requests:
            worker_state.requests.setdefault(self.id, hidden)

    def _retry_worker_lost(self, *args: Any) -> bool:
        """Do as Celery (>= 5.7) does, and take note of a retry that it publishes."""
        self._goes_on = bool(super()._retry_worker_lost(*args))
        return self._goes_on

    def _announce_revoked(self, reason: Any, *args: Any, **options: Any) -> Any:
        """Do as Celery does, and give the message's reservation back."""
        answer = super()._announce_revoked(reason, *args, **options)
        self._end_reservation(Reason.REVOKED)
        return answer

    def _end_reservation(self, reason: Reason) -> None:
        token = unique.token_in(self._request_dict) if is_guarded(self.task) else None
        if token is not None:
            unique.end_in_background(lambda: self.task._binding.guard.store, token, reason)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002 - Celery's own name
        """Do as Celery does, after what the child has sent of this task."""
        if type != "task-started":
            monitoring.flush()
        super().send_event(type, **fields)

    def claim(self) -> Claim:
        """Return the claim of this delivery, as far as it is needed to act for its child.

        Raises:
            TypeError: the arguments do not fit the task.
            MissingKey: the message gives no key.
        """
        binding: TaskBinding = self.task._binding
        state, retries = DeliveryState.of(self._context), self._context.retries or 0
        identity = state.identity
        named = binding.named(identity, self.id, self._args, self._kwargs, self._context.headers)
        task_id = "" if named.arguments is None else self.id
        message = {"task_id": task_id, "nesting": state.nesting, "copy": identity.copy, "token": identity.token}
        return binding.claim(named.operation, self._owner, **message, retries=retries)

    @property
    def store(self) -> Store | None:
        """The store that grants its lease; None for one of Celery's own tasks, which takes none."""
        return self.task._binding.guard.store if is_guarded(self.task) else None

    def max_lease(self) -> float | None:
        """Return for how long the lease of this delivery is renewed, in seconds, or None: as long as it runs."""
        limit: float | None = self.task._binding.max_lease(self._hard_limit())
        return limit

    def _hard_limit(self) -> float | None:
        own = (self.time_limits or (None, None))[0]
        limit: float | None = own or shared.task_limits.get(self.task.name, self.task.time_limit) or shared.limits[0]
        return limit

    def _give_token_back(self) -> None:
        """Give back the token of the task's rate limit, if its body did not run.

        A deferred message takes one each time that it comes round, and would keep others from running.
        """
        consumer = monitoring.consumer()
        if consumer is None or consumer.task_buckets.get(self.task.name) is None:
            return
        if not self._token_back and shared.was_unrun(self._owner):
            self._token_back = True
            # In other pools than prefork this is some thread, and a bucket is the consumer's alone.
            consumer.call_soon(_give_back, consumer, self.task.name)

    def _announce(self, reason: Reason) -> None:
        self._exit_reason = reason
        shared.set_exit_reason(self._owner, reason)

    def _reason_of_loss(self, error: BaseException) -> Reason:
        terminating = worker_state.should_terminate not in (None, False)
        meant = terminating or isinstance(error, Terminated)
        return self._exit_reason or (Reason.SHUTDOWN if meant else Reason.CRASHED)

    def _success_was_stored(self) -> Any:
        """Return to Celery (>= 5.7) whether it may ack the message of a lost child, since its result is stored.

        Not where an earlier run under the same id has stored it, for then the message would never run. A member of a
        chord may not have returned its part yet, which Celery does after it has stored the result. Its redelivery
        replays, and returns the part unless the record or the backend has it as returned.
        """
        if not is_guarded(self.task):
            return super()._success_was_stored()
        if self._context.chord and self.task.reject_on_worker_lost:
            return False
        meta = super()._success_was_stored()
        return meta if meta and is_done_since(self.task.backend, meta, self._received) else False

    def _release(self, reason: Reason) -> None:
        if not is_guarded(self.task):
            return
        try:
            claim, binding = self.claim(), self.task._binding
            record = lease.release(binding.guard.store, claim, reason)
            if record is not None:
                binding.events_of(claim, self.id).emit(Released, reason=reason.value, fence=record.fence)
        except (IdempotencyError, TypeError) as error:
            logger.warning(
                "%s[%s]: the lost child's lease was not released and runs out by itself: %s", self.name, self.id, error
            )

    def _put_back_if_overtaken(self) -> bool:
        """Put the message of a child that hit its hard limit back if another delivery took over; return whether it did.

        On Redis it is that delivery's message too. The store has to say so at once; what was acked does not come back.
        Where a run is to lose its lease before its limit (``max_lease``), such messages could go round for ever.
        """
        if not self._overtaken and not self.acknowledged and is_guarded(self.task):
            found: list[bool] = []
            self._within_limit(lambda: found.append(self._has_heir()))
            self._overtaken = any(found)
            if self._overtaken:
                logger.warning("%s[%s] hit its hard time limit after it had lost its lease", self.name, self.id)
                worker_state.task_ready(self)
                self.reject(requeue=True)
        return self._overtaken

    def _has_heir(self) -> bool:
        """Return whether the operation is another delivery's, or was done while the body runs that hit its limit."""
        binding = self.task._binding
        if (binding.policy.max_lease or float("inf")) < (self._hard_limit() or 0):
            return False
        try:
            record = binding.guard.store.get(self.claim().key)
        except (IdempotencyError, TypeError):
            return False
        if record is None or record.state is State.RELEASED:
            return False
        if record.state is State.IN_PROGRESS:
            return bool(record.remaining > 0 and record.owner != self._owner)
        return shared.runs(self._owner)  # else it may be this one, which hangs in a hook, and would do so again

    def _release_when_gone(self) -> None:
        if _is_gone(self.worker_pid):
            self._release(self._exit_reason or Reason.FAILED)
            self._keep_failure()

    def _keep_failure(self) -> None:
        """Store once more that it hit its limit, if its child had that forgotten, which was about to be replaced."""
        backend = self.task.backend
        if self._limit_hit is None or not (self.store_errors and is_guarded(self.task) and is_shared(backend)):
            return
        try:
            if backend.get_task_meta(self.id, cache=False)["status"] == states.PENDING:
                backend.store_result(self.id, TimeLimitExceeded(self._limit_hit), states.FAILURE, request=self._context)
        except Exception as error:  # noqa: BLE001 - the backend's own
            logger.warning(
                "%s[%s]: whether its failure is stored is not known: %s", self.name, self.id, in_words(error)
            )

    def _within_limit(self, work: Callable[[], object]) -> None:
        thread = self._in_background(work)
        if thread is not None:
            thread.join(LONGEST_WAIT)

    def _in_background(self, work: Callable[[], object]) -> threading.Thread | None:
        """Begin in a thread, and return it; None where there are too many, for Celery has to go on with the message."""
        thread = threading.Thread(target=work, name="celery-idempotent-release", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("%s[%s]: its child's lease runs out by itself: %s", self.name, self.id, error)
            return None
        return thread


def _give_back(consumer: Any, task: str) -> None:
    bucket = consumer.task_buckets[task]
    if bucket is not None:
        bucket._tokens = min(bucket.capacity, bucket._get_tokens() + 1)
        consumer._schedule_bucket_request(bucket)


def request_class(wanted: Any) -> type:
    """Return the class that a task's ``Request`` attribute names."""
    found: type = symbol_by_name(wanted)
    return found


def _seeing_base_exceptions(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``on_success`` that sees what has left a body, a hook or a receiver and is no `Exception`.

    Pools without children report that as a success without a value, on which Celery's own fails: the message would be
    neither acked nor put back, and nothing would restore what this worker seems to hold. An exit puts it back, as it
    does where a child ends; all else fails the task.
    """

    @functools.wraps(inner)
    def on_success(self: IdempotentRequest, answer: Any, **options: Any) -> Any:
        error = answer.exception if isinstance(answer, ExceptionInfo) else None
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        meant = self._already_cancelled or self._already_revoked
        if error is None or error.__context__ is None or meant:
            return inner(self, answer, **options)
        if isinstance(error.__context__, (SystemExit, KeyboardInterrupt)):
            put_back("its body, a hook or a receiver left")  # it comes straight back, and may leave again
        else:
            answer.exception = error.__context__
        return self.on_failure(answer)

    return on_success


class _Raised(Exception):
    """An error of a body that Celery would take for the end of its child, whose message it puts back."""

    def __repr__(self) -> str:
        return repr(self.args[0])


def _lost(error: BaseException) -> ExceptionInfo:
    try:
        raise WorkerLostError(f"Worker exited prematurely: {error!r}.")
    except WorkerLostError:
        return ExceptionInfo()


def _is_gone(pid: int) -> bool:
    """Wait until a process of that id is gone; return whether it is."""
    end = monotonic() + KILL_TIMEOUT
    while shared.is_alive(pid):
        if monotonic() >= end:
            return False
        sleep(0.02)
    return True
