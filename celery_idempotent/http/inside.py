"""Requests whose caller their view alone knows (``scope=INSIDE``): `begin` takes the lease there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from ..core.guard import Decision, Ran
from ..core.lease import HeldLease, LeaseSlot, current_lease, running
from ..errors import ConfigurationError
from ..events import logger
from ..functions import acquired, finish_within, finished
from .delivery import Fact, HttpBinding, HttpDelivery
from .options import UNGUARDED
from .problems import Problem
from .request import Request
from .response import Response

#: Where `begin` finds a request's `Pending`, or None for a request that passes: in ASGI's scope, WSGI's environ, META.
ENTRY = "celery_idempotent.pending"
#: Where a framework's request has them; Falcon's is the last.
PLACES = ("scope", "environ", "META", "env")
#: What ends a process, a task or a generator, and is no consequence of `Answered`.
EXITS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)

_UNKNOWN: Any = object()


class Answered(BaseException):
    """Raised by `begin` to leave a view that is not to run.

    The middleware discards it, and whatever becomes of it, and sends the recorded response or the refusal. It is no
    `Exception`, so that handlers of errors let it pass; ``finally`` and ``with`` close what is open.
    """


def begin(request: Any, account: object) -> HeldLease | None:
    """Take the lease of a request, in a view that is no coroutine, or in what runs before it.

    Call it once the caller is verified and allowed, before any effect, and before the response begins. Called again for
    the same account, it returns the same lease.

    Arguments:
        request: The framework's request; or the scope of ASGI, or the environ of WSGI.
        account: The caller's id, as text or a number. None, "" and an anonymous user are refused; ``UNGUARDED`` lets
            the request pass as if it had no key.

    Returns:
        The lease, which ``current_lease()`` returns too from now on; None for a request that passes, as one without a
        key.

    Raises:
        Answered: the view is not to run: the middleware sends the recorded response, or a refusal.
        ConfigurationError: no middleware with ``scope=INSIDE`` has seen the request, the account is unfit or differs
            from that of an earlier call, the response has begun, or this is a coroutine, which awaits `abegin`.

    Example::

        def place_order(request: Request, user: Annotated[User, Depends(current_user)]):
            begin(request, user.id)
    """
    if _is_in_loop():
        raise ConfigurationError(
            "Expected begin() in a function that may wait, got a call in an event loop, which would wait for the "
            "store. Write: await abegin(request, account)."
        )
    pending = _pending_of(request)
    return None if pending is None else pending.begin(account)


async def abegin(request: Any, account: object) -> HeldLease | None:
    """Take the lease of a request, in a coroutine; otherwise as `begin`."""
    pending = _pending_of(request)
    return None if pending is None else await pending.abegin(account)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _pending_of(request: Any) -> Pending | None:
    """Return what the middleware has left for `begin`; None for a request that passes."""
    for place in (request, *(getattr(request, name, None) for name in PLACES)):
        if isinstance(place, Mapping) and ENTRY in place:
            return cast("Pending | None", place[ENTRY])
    raise ConfigurationError(
        f"Expected a request that IdempotencyMiddleware has passed on, got {type(request).__name__}: add the "
        "middleware with scope=INSIDE, and give begin() the request that the framework gives to the view. Around an "
        "application for WSGI that is mounted in one for ASGI, put the middleware for WSGI."
    )


def pass_by(place: MutableMapping[str, Any]) -> None:
    """Have `begin` let a request pass, unless a middleware around this one guards it."""
    outer = place.get(ENTRY)
    place[ENTRY] = outer if isinstance(outer, Pending) and not outer.is_closed else None


class Pending:
    """A request that is on its way to the view that knows its caller.

    Arguments:
        binding: The middleware's.
        request: The request.
        key: As the client gave it.
        body: Of the request.
        outer: What a middleware around this one has left for `begin`, in whose place this is.
    """

    def __init__(
        self, binding: HttpBinding, request: Request, key: str, body: bytes, outer: Pending | None = None
    ) -> None:
        self.binding, self.request, self.key, self.body, self.outer = binding, request, key, body, outer
        #: the lease that is held around the middleware
        self.outer_lease = current_lease()
        #: where the application finds its lease, once there is one
        self.slot = LeaseSlot()
        #: set with the lease
        self.delivery: HttpDelivery | None = None
        #: what is sent in place of the application's response
        self.answered: Response | None = None
        self._account, self._lock = _UNKNOWN, threading.Lock()
        self._taking = self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it takes no lease any more."""
        return self._closed

    @property
    def is_begun(self) -> bool:
        """Whether the view has a lease."""
        return self.slot.lease is not None

    def close(self) -> None:
        """Take no lease from now on: the response has begun, or the application has ended."""
        with self._lock:
            self._closed = True
            self.request, self.body = replace(self.request, native=None), b""  # else a circle, of scope or environ

    # -- what the view calls -------------------------------------------------------------------------------------------

    def begin(self, account: object) -> HeldLease | None:
        """Do what the function `begin` does."""
        if (delivery := self._delivery(account)) is not None:
            with self._deciding(delivery):
                self._decide(delivery, self.binding.guard.begin(delivery))
        return self._outcome()

    async def abegin(self, account: object) -> HeldLease | None:
        """Do what the function `abegin` does."""
        if (delivery := self._delivery(account)) is not None:
            with self._deciding(delivery):
                self._decide(delivery, await acquired(self.binding.guard, delivery))
        return self._outcome()

    def leave(self) -> None:
        """Leave the request to the middleware within this one, whose view begins."""
        if self.outer is not None:
            self.outer.leave()
        with self._lock:
            if self._account is _UNKNOWN:
                self._account = UNGUARDED

    def _delivery(self, account: object) -> HttpDelivery | None:
        """Return the delivery for which a lease is to be taken; None where that is decided."""
        if self.outer is not None:
            self.outer.leave()
        with self._lock:
            if self._account is not _UNKNOWN:
                self._check_again(account)
                return None
            if self._closed:
                raise _too_late()
            try:
                guarded = self.binding.account_of(account) is not UNGUARDED
                delivery = self.binding.delivery(self.request, self.key, account, self.body) if guarded else None
            except Problem as problem:
                self.answered, delivery = problem.response(self.binding.options.docs_url), None
            for held in (self.outer_lease, current_lease()):  # of the same middleware around this one, or within
                if delivery is not None and delivery.is_under(held):
                    self.slot.lease, delivery = held, None
            self._account, self._taking = account, delivery is not None
            return delivery

    def _check_again(self, account: object) -> None:
        if self._account != account:
            raise ConfigurationError(
                "Expected the account of the first begin(), got another: a request has one caller. "
                "Call begin() in one place."
            )
        if self._taking:
            raise ConfigurationError(
                "Expected one begin() at a time, got a second while the first takes the lease. Call begin() in one "
                "place."
            )

    @contextmanager
    def _deciding(self, delivery: HttpDelivery) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again if it is none of this library's
            self.answered = delivery.answer_error(error)
        finally:
            self._taking = False
            if self.answered is None and not self.is_begun:
                self._account = _UNKNOWN  # interrupted

    def _decide(self, delivery: HttpDelivery, found: HeldLease | Decision) -> None:
        if not isinstance(found, HeldLease):
            self.answered = delivery.answer(found)
            return
        with self._lock:
            if not self._closed:
                self.delivery, self.slot.lease = delivery, found
                return
        if found.fence:  # of a thread that its application has left behind
            with suppress(Answered):
                self.binding.guard.finish(delivery, found, error=Answered())
        raise _too_late()

    def _outcome(self) -> HeldLease | None:
        if self.answered is not None:
            raise Answered
        return self.slot.lease

    # -- what the middleware calls, as it calls the same of a delivery -------------------------------------------------

    async def response_of(self, body: Callable[[], Awaitable[Any]]) -> Response:
        """Run the application, record its end if it took a lease, and return the response; raise what it raises."""
        value: Any = None
        error: BaseException | None = None
        try:
            with running(self.slot):
                value = await body()
        except BaseException as raised:  # noqa: BLE001 - recorded, and raised again
            error = raised
        guarded = self._guarded()
        if guarded is None:
            return self._unrecorded(value, error)
        timeout = self.binding.options.settle_timeout
        return await finished(self.binding.guard, *guarded, value, error, guarded[0].answer, timeout)

    def finish(self, value: object = None, error: BaseException | None = None) -> Response:
        """Record the end of an application that returned ``value``, or raised ``error``; return or raise as above."""
        guarded = self._guarded()
        if guarded is None:
            return self._unrecorded(value, error)
        timeout = self.binding.options.settle_timeout
        return guarded[0].answer(finish_within(timeout, self.binding.guard, *guarded, value, error))

    def _guarded(self) -> tuple[HttpDelivery, HeldLease] | None:
        """Return what is to be finished; None where the application had no lease that holds something."""
        self.close()
        held = self.slot.lease
        return None if self.delivery is None or held is None or not held.fence else (self.delivery, held)

    def _unrecorded(self, value: Any, error: BaseException | None) -> Response:
        if self.answered is not None and not isinstance(error, EXITS):
            if error is None:
                self._log(
                    "The view for %s %s went on after begin() had raised Answered, and may have done its work again. "
                    "Let Answered pass, or raise it again."
                )
            elif not _is_answered(error):
                logger.warning("Discarded what became of Answered: %r", error, exc_info=error)
            _free_frames(error)
            return self.answered
        if error is not None:
            raise error
        if self.delivery is not None:
            return self.delivery.answer(Ran(value))
        response = cast(Response, value)
        # Else it was refused, mostly before it could begin, or replayed by a middleware within this one.
        if self._account is _UNKNOWN and response.status < 400 and not response.header("idempotent-replayed"):
            self._log(
                "A request with an idempotency key was carried out without a lease, and will be again when it is "
                "repeated: the view for %s %s did not call begin(request, account). Call it there, or exempt the path."
            )
        return response

    def _log(self, message: str) -> None:
        logger.error(message, self.request.method, self.request.path.decode("latin-1"))

    def result_of(self, response: Response, *, sent: bool = False) -> Response | Fact:
        """Return what is recorded of a response; itself where nothing is."""
        return response if self.delivery is None else self.delivery.result_of(response, sent=sent)

    def result_of_error(self, error: Exception) -> Response | Fact:
        """Return what is recorded of an exception, or raise it."""
        if self.delivery is None:
            raise error
        return self.delivery.result_of_error(error)

    def answer_error(self, error: Exception) -> Response:
        """Return the response for an error; raise it again where there was no lease, or if it is the application's."""
        if self.delivery is None:
            raise error
        return self.delivery.answer_error(error)


def _is_answered(error: BaseException) -> bool:
    """Return whether this is `Answered`, or a group of it and what task groups make of it."""
    return isinstance(error, Answered) or any(map(_is_answered, getattr(error, "exceptions", ())))


def _free_frames(error: BaseException | None) -> None:
    """Let go of the frames that an error has passed, and so of generators in them, which closes these.

    Of FastAPI's dependencies some releases close plain generators after an `Exception` alone.
    """
    if error is not None:
        error.__traceback__ = None
        for part in getattr(error, "exceptions", ()):
            _free_frames(part)


def _too_late() -> ConfigurationError:
    return ConfigurationError(
        "Expected begin() before the response begins, got it after that, when it can no longer be held back: call it "
        "in the view or in what runs before it, not in the generator of a body or in a background task."
    )
