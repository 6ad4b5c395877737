"""One request: from its key to a claim, from the guard's decision to a response."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, ClassVar

from ..core import keys
from ..core.binding import Binding
from ..core.guard import Busy, Decision, Delivery, Ending, Ran, Replayed
from ..core.history import history
from ..core.lease import HeldLease, TaskIds, current_lease
from ..core.results import Codec
from ..errors import ConfigurationError, IdempotencyError, LeaseLost, MissingKey
from ..events import Event, logger
from ..functions import opened, run_guarded
from ..stores.base import Store
from ..stores.records import Claim, Reason, Record, Release, new_owner
from . import problems
from .options import INSIDE, UNGUARDED, Options
from .problems import Problem
from .request import Request, fingerprints, read_key
from .response import Recorder, Response, as_response, is_remembered, unfit_response


class Unsettled(Exception):
    """A response came of a request that may be carried out again; nothing is recorded.

    Arguments:
        response: The response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class Fact:
    """The response of a request that was carried out, of which no more is recorded than that.

    Arguments:
        response: The response, of which a part may have been sent already.
    """

    def __init__(self, response: Response) -> None:
        self.response = response


@dataclass(frozen=True, slots=True)
class Published(Event):
    """A line in the history of a request: it has published ``task_id``, which runs the task ``published``."""

    name: ClassVar = "published"
    published: str = ""


class HttpBinding(Binding):
    """A middleware's options, on one store.

    Arguments:
        options: The options.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        keep, drop = (_lower(names) for names in (options.keep_headers, options.drop_headers))
        self.recorder = Recorder(keep, drop, options.response_max_bytes)
        namespace = options.namespace
        if options.celery_app is not None:
            from ..celery.app import default_namespace

            namespace = default_namespace(options.celery_app, options.store)
        super().__init__(options.name, inspect.Signature(), options.policy, namespace)

    def _store(self) -> Store:
        if self.options.store is None:
            from ..celery.app import store_of

            return store_of(self.options.celery_app)
        if str(self.options.store).startswith("memory:"):  # whether its server has other processes is not known here
            logger.warning(
                "The middleware %s has the store memory://: each process of its server knows the requests that it got "
                "itself, until it ends, and carries out those of others again. Use it in tests alone; else write "
                'store="redis://host:6379/1".',
                self.name,
            )
        return opened(self.options.store)

    def _codec(self) -> Codec:
        policy = self.policy
        return Codec(
            compress_above=int(policy.compress_above),
            result_max_bytes=int(policy.result_max_bytes),
            compression=policy.compression,
            prepare=self._written,
        )

    def _written(self, value: object) -> object:
        if isinstance(value, Fact):
            return self.recorder.write(value.response, fact=True)
        return self.recorder.write(as_response(value))

    # -- what is decided before the body is read -----------------------------------------------------------------------

    def key_of(self, request: Request) -> str | None:
        """Return the key of a request; None if it has none, and may pass.

        Raises:
            Problem: the key is malformed, or missing and required.
            ConfigurationError: the option ``header`` made none that is text.
        """
        header = self.options.header
        if callable(header):
            key, header = header(request.native), "the key"
            if not isinstance(key, (str, NoneType)):
                raise ConfigurationError(
                    "header: expected the key as text, or None for a request that has none, got "
                    f"{type(key).__name__}: return str(...) of it"
                )
        else:
            key = read_key(header, request.values(header))
        if not key and self.options.required:
            raise problems.missing(header)
        return key or None

    def scope_of(self, request: Request) -> Any:
        """Return what the option ``scope`` makes of a request; of a coroutine function an awaitable."""
        scope = self.options.scope
        if callable(scope):
            return scope(request.native)
        if scope is None or scope is INSIDE:
            return scope
        return request.value(scope)

    def account_of(self, value: Any) -> Any:
        """Return the caller in what a scope returned, or `UNGUARDED`.

        Raises:
            Problem: there is none.
            ConfigurationError: it is nothing of which a key can be made.
        """
        if value is UNGUARDED or self.options.scope is None:
            return value
        for part in _parts(value):
            if part is True:
                raise _unfit_scope("True", "it would be the same for all callers")
            empty = not part if isinstance(part, bytes) else part is None or part is False or part == ""
            if empty or not getattr(part, "is_authenticated", True):
                raise problems.unknown_caller()
            # A header holds what its client wrote.
            made = isinstance(part, str) and not isinstance(self.options.scope, str)
            if made and (found := keys.find_address(part)):
                raise _unfit_scope(found[0], "the address of an object is another one in each process")
        return value

    def check_length(self, request: Request) -> None:
        """Refuse a body that is announced as too large.

        Raises:
            Problem: it is.
        """
        if self.reads_body and (request.length or 0) > self.options.request_max_bytes:
            raise problems.too_large(self.options.request_max_bytes)

    @property
    def reads_body(self) -> bool:
        """Whether bodies are read before the application is called."""
        return self.options.fingerprint != "headers"

    def delivery(self, request: Request, key: str, account: Any, body: bytes) -> HttpDelivery:
        """Return the delivery of a request whose body was read.

        Raises:
            ConfigurationError: the scope is nothing of which a key can be made.
        """
        try:
            # Hashed: keys are logged, and an account may be an e-mail address, or the secret in a header.
            caller = None if account is None else keys.digest(account, "the account")
            name = keys.compose(self.namespace, self.name, key=key, scope=caller)
        except MissingKey as error:
            raise _unfit_scope(type(account).__name__, error) from error
        options = self.options
        digests = fingerprints(request, body, options.fingerprint, options.fingerprint_headers)
        return HttpDelivery(self, key, name, *digests)


def _parts(account: Any) -> Iterator[Any]:
    """Yield what an account is made of, however deep within others; the whole where it is one."""
    if not isinstance(account, (tuple, list, Mapping)):
        yield account
        return
    for part in account.values() if isinstance(account, Mapping) else account:
        yield from _parts(part)


def _unfit_scope(found: str, why: object) -> ConfigurationError:
    return ConfigurationError(
        f"scope: expected the account of a verified caller as text or a number, got {found}: return its id ({why})"
    )


def _lower(names: Sequence[str]) -> frozenset[bytes]:
    return frozenset(name.lower().encode() for name in names)


def _note(binding: HttpBinding, claim: Claim, task: str, task_id: str) -> None:
    """Note in the history of a request that it has published a task."""
    event = Published(claim.key, binding.name, task_id, task, holder=claim.holder)
    history.note(binding.guard.store, event, binding.policy.result_ttl)


class HttpDelivery(Delivery):
    """One request.

    Arguments:
        binding: The middleware's.
        key: As the client gave it.
        name: The key in the store.
        digest: Its fingerprint.
        twin: Makes the one with or without the last slash of its path.
    """

    alone = True
    #: as in `Pending`
    is_begun = True

    def __init__(self, binding: HttpBinding, key: str, name: str, digest: str, twin: Callable[[], str]) -> None:
        super().__init__()
        self.binding, self.key, self.patience = binding, key, binding.policy.wait_timeout
        self._twin = twin
        owner = new_owner()
        claim = binding.claim(name, owner, task_id=owner, fingerprint=digest)
        self.identify(binding.events_of(claim, owner))
        if binding.options.propagate:
            # With the digest: a key that is free again may come with another request, whose tasks are others.
            note = partial(_note, binding, claim)  # of nothing that refers to this, which would wait for the collector
            self.task_ids = TaskIds(f"{name} {digest}", binding.policy.result_ttl, note)

    @property
    def is_running(self) -> bool:
        """Whether this is what is being carried out here: the same middleware is around this one."""
        return self.is_under(current_lease())

    def is_under(self, held: HeldLease | None) -> bool:
        """Whether this is what is being carried out under a lease."""
        claim = self.claim
        if held is None or not held.open:
            return False
        return (held.key, held.lease.claim.fingerprint) == (claim.key, claim.fingerprint)

    def agrees(self, record: Record) -> bool:
        """Return whether it is the request of this record, which a redirection had sent to the other path."""
        twin = self._twin()
        if record.fingerprint != twin:
            return False
        self.claim = replace(self.claim, fingerprint=twin)
        return True

    def body(self, held: HeldLease) -> Any:
        """Raise: the application is called by the middleware, between the steps of the guard."""
        raise NotImplementedError

    async def response_of(self, body: Callable[[], Awaitable[Any]]) -> Response:
        """Return the response of the application, or what is known of it; raise what `run_guarded` raises."""
        return await run_guarded(self.binding.guard, self, body, self.answer, self.binding.options.settle_timeout)

    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record: nothing that failed is remembered."""
        if isinstance(error, LeaseLost):
            return Release(Reason.REQUEUED)
        return Release(Reason.FAILED if isinstance(error, Exception) else Reason.SHUTDOWN)

    def checked(self, result: object) -> object:
        """Return the response that the view is to settle itself; raise ConfigurationError for what is none."""
        response = as_response(result)
        try:
            self.binding.recorder.write(response)
        except (AttributeError, TypeError, ValueError) as error:
            raise unfit_response(result, error) from error
        return response

    def result_of(self, response: Response, *, sent: bool = False) -> Response | Fact:
        """Return what is recorded of a response.

        Arguments:
            response: The application's.
            sent: Whether its client has it already, so that its body is not at hand.

        Raises:
            Unsettled: nothing is.
        """
        wish = self._wish(response)
        if wish is None:
            wish = is_remembered(response.status)
        if not wish:
            raise Unsettled(response)
        return Fact(response) if sent or wish == "fact" else response

    def _wish(self, response: Response) -> object:
        """Return what the option ``remember`` wants; None if that is for the status to decide."""
        remember = self.binding.options.remember
        try:
            wish = None if remember is None else remember(response)
        except Exception:  # noqa: BLE001 - the user's own: what the request has done must not be done again for it
            logger.exception("The option remember raised for a response with %d: its status decides", response.status)
            return None
        if isinstance(wish, str) and wish not in ("", "fact"):  # a slip for its one word: the body may have secrets
            logger.error('remember: expected True, False, None or "fact", got %r, which is taken for "fact"', wish)
            return "fact"
        return wish

    def result_of_error(self, error: Exception) -> Response | Fact:
        """Return what is recorded of an exception that left the application: a bare 500, where that is remembered.

        Raises:
            Exception: the error, which is not.
        """
        if self.binding.options.remember is None or isinstance(error, (IdempotencyError, Unsettled)):
            raise error
        try:
            kept = self.result_of(Response(500))
        except Unsettled:
            raise error from None
        # Its server does not learn of it, which would write an error page of its own.
        logger.error("A request with the key %s raised, which is kept as 500: %r", self.key, error, exc_info=error)
        return kept

    def ended_by(self, error: Exception) -> tuple[Response | Fact | None, Exception | None]:
        """Return what is recorded of such an exception, or else the exception to be recorded as the end."""
        try:
            return self.result_of_error(error), None
        except Exception as failure:  # noqa: BLE001 - as a rule the same
            return None, failure

    def answer(self, decision: Decision) -> Response:
        """Return the response for what the guard has decided."""
        match decision:
            case Ran(Fact() as fact):
                return fact.response
            case Ran(value):
                return as_response(value)
            case Replayed(value, _):
                found = self.binding.recorder.read(value)
                if found is None:
                    return self.refuse(problems.not_kept(self.key, value.get("status"), value.get("location")))
                return found
            case Busy() as busy:
                return self.refuse(problems.of_decision(self.key, busy))
        raise AssertionError(f"the guard decided nothing but {decision!r}")  # pragma: no cover

    def answer_error(self, error: Exception) -> Response:
        """Return the response for what the guard raised; raise it again if it is none of this library's."""
        if isinstance(error, Unsettled):
            return error.response
        problem = problems.of_error(self.key, error)
        if problem is None:
            raise error
        if problem.status >= 500:
            logger.error("A request with the key %s is answered %d: %s", self.key, problem.status, error)
        return self.refuse(problem)

    def refuse(self, problem: Problem) -> Response:
        """Return the response for a problem."""
        return problem.response(self.binding.options.docs_url)
