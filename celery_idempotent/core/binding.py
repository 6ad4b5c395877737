"""One function or task with its policy: the keys of its calls, their guard, and the receivers of their events."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import Future
from functools import cache, cached_property
from types import NoneType
from typing import Any

from ..errors import ConfigurationError, MissingKey
from ..events import Event
from ..stores.base import Store
from ..stores.records import Claim
from . import keys
from .breaker import Breaker
from .file_results import check_prefix
from .guard import Guard
from .heartbeat import Heartbeat
from .history import DeliveryEvents, history
from .policy import Policy
from .reservations import Confirmations
from .results import Codec

#: The option's word for a framework's own keeper of results.
BACKEND = "backend"

heartbeat = Heartbeat()
breaker = Breaker()
confirmations = Confirmations(breaker)

#: Makes the guard of every binding instead, while a test has it so (`celery_idempotent.testing`); None elsewhere.
substitute: Callable[[Binding], Guard] | None = None
#: Whether those guards guard nothing.
switched_off = False


class Binding:
    """One function or task with its policy; frameworks derive theirs, which name its store.

    Arguments:
        name: What keys and events call it.
        signature: Its own; see `keys.own_signature`.
        policy: Its options.
        namespace: How its keys begin.
        hidden: A decorator hides which arguments the body gets (default: it does not).

    Raises:
        ConfigurationError: an option does not fit the signature, or cannot be used here.
    """

    #: What to do about a scope that is missing.
    scope_hint = "fix the scope function"
    #: Name of the argument that is the object of a method; "" where none is.
    receiver = ""
    #: Name of the class that declares the method.
    receiver_class = ""

    def __init__(
        self, name: str, signature: inspect.Signature, policy: Policy, namespace: str, *, hidden: bool = False
    ) -> None:
        policy.check_signature(signature, name, hidden=hidden)
        if policy.large_results not in (None, BACKEND):
            check_prefix(str(policy.large_results))
        signature = keys.with_own_defaults(signature)
        self.name, self.signature, self.policy, self.namespace = name, signature, policy, namespace
        self.hidden = hidden
        self._defaults = keys.defaults_of(signature)
        self._positional = keys.positional(signature)
        self._names = set(signature.parameters)

    def _store(self) -> Store:
        """Return the store that remembers its operations."""
        raise NotImplementedError

    def _codec(self) -> Codec:
        """Return what writes and reads its results."""
        raise NotImplementedError

    @property
    def guard(self) -> Guard:
        """Its guard; made when the first delivery needs it."""
        return self._guard if substitute is None else substitute(self)

    @cached_property
    def _guard(self) -> Guard:
        return self.make_guard()

    def make_guard(self, kind: type[Guard] = Guard, store: Store | None = None) -> Guard:
        """Return a guard of this class, on this store (default: its own)."""
        return kind(self._store() if store is None else store, self.policy, self._codec(), heartbeat, breaker)

    def claim(self, key: str, owner: str, **fields: Any) -> Claim:
        """Return what a delivery requests of the store.

        Arguments:
            key: The key of its operation.
            owner: Proof of its lease.
            fields: What else its framework knows, as in `Claim`.

        Raises:
            MissingKey: the id of its message is no text that a store could hold.
        """
        policy = self.policy
        given = fields.get("message_id") or fields.get("task_id") or ""
        if not (isinstance(given, str) and given.isascii()):  # the key itself is ASCII, see `keys`
            _check_id(given)
        return Claim(
            key=key,
            owner=owner,
            lease_ttl=policy.lease_ttl,
            keep_ttl=policy.failure_ttl,
            max_crashes=policy.max_crashes,
            holder=current_holder(),
            **fields,
        )

    def events_of(self, claim: Claim, task_id: str) -> DeliveryEvents:
        """Return what emits the events of the delivery that makes this claim."""
        return DeliveryEvents(claim, self.name, task_id, self._note if self.policy.history else None)

    def _note(self, event: Event) -> None:
        history.note(self.guard.store, event, max(self.policy.result_ttl, self.policy.failure_ttl))

    def operation(
        self, given: object, default: str, args: Any, kwargs: Any, headers: Mapping[str, Any] | None
    ) -> tuple[str, dict[str, object] | None]:
        """Return the store's key of one delivery, and its arguments by name, or None where the key is its id.

        Arguments:
            given: The key that the producer gave, or None.
            default: The id that is the key where there is no other.
            args: Of the call.
            kwargs: Of the call.
            headers: The producer's headers, where the scope may be.

        Raises:
            TypeError: the arguments do not fit the function.
            MissingKey: they do not name the operation.
        """
        source = self.policy.key
        if given is None and source is None:
            return keys.compose_default(self.namespace, self.name, default), None
        if given == "":
            raise MissingKey(
                f"Expected idempotency_key of {self.name} to name the operation, got an empty one. "
                "Leave it out or fill it."
            )
        arguments = self.arguments(args, kwargs)
        key = keys.resolve(source, arguments) if given is None and source is not None else given
        scope = None if self.policy.scope is None else self._scope(self.policy.scope, arguments, headers)
        return keys.compose(self.namespace, self.name, key=key, scope=scope), arguments

    def arguments(self, args: Any, kwargs: Any) -> dict[str, object]:
        """Return the arguments of a call by name, as `keys.bind` does.

        Raises:
            TypeError: they do not fit; with what the function takes, which Python's own message leaves out.
        """
        names, kwargs = self._positional, kwargs or {}
        if names is not None and len(args) <= len(names):  # as most are called
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            every = {**self._defaults, **named}
            if len(named) == len(args) + len(kwargs) and every.keys() == self._names:
                return dict(zip(names, map(every.__getitem__, names), strict=True))
        try:
            return keys.bind(self.signature, args, kwargs)
        except TypeError as error:
            raise TypeError(
                f"Expected arguments of {self.name}{self.signature}, which these do not fit: {error}"
            ) from None

    def slot(
        self,
        source: keys.KeySource,
        args: Any,
        kwargs: Any,
        headers: Mapping[str, Any] | None,
        message: tuple[str, ...],
    ) -> str:
        """Return the key of the reservation that a message with these arguments holds while it waits.

        Arguments:
            source: What its calls share, as in `Unique`.
            args: Of the call.
            kwargs: Of the call.
            headers: The producer's headers, where the scope may be.
            message: What the message has beside its arguments.

        Raises:
            TypeError: the arguments do not fit the function.
            MissingKey: they do not name it.
        """
        arguments = self.arguments(args, kwargs)
        scope = None if self.policy.scope is None else self._scope(self.policy.scope, arguments, headers)
        return keys.compose_slot(self.namespace, self.name, source, arguments, scope=scope, message=message)

    def _scope(self, scope: Any, arguments: Mapping[str, object], headers: Mapping[str, Any] | None) -> object:
        value = (headers or {}).get(scope) if isinstance(scope, str) else keys.resolve(scope, arguments, "scope")
        if value is None or value == "":
            raise MissingKey(
                f"Expected a scope for {self.name} from {scope!r}, got {value!r}. "
                f"Without it two tenants could share a key: {self.scope_hint}."
            )
        return value

    @cached_property
    def compares(self) -> bool:
        """Whether calls with the same key must share their arguments; those that take turns need not."""
        return self.policy.fingerprint is not False and self.policy.result_ttl > 0

    def is_final(self, error: BaseException) -> bool:
        """Return whether the policy remembers this failure; it never remembers an error of the declaration itself."""
        return isinstance(error, self.policy.remember_failures) and not isinstance(error, ConfigurationError)

    def fingerprint(self, arguments: Mapping[str, object] | None) -> str:
        """Return the digest of the arguments that calls with the same key must share; "" to compare none.

        Arguments:
            arguments: What `operation` returns of them.

        Raises:
            MissingKey: an argument has no value that could be compared.
        """
        option = self.policy.fingerprint
        if not self.compares or arguments is None:
            return ""
        leave_out = set(option) if isinstance(option, tuple) else set()
        if self.receiver and not keys.has_fields(arguments[self.receiver]):
            # Of an object without fields only the class counts, where it inherits the method: it may do other work.
            cls = keys.class_name(arguments[self.receiver])
            if cls == self.receiver_class:
                leave_out.add(self.receiver)
            arguments = {**arguments, self.receiver: cls}
        return keys.fingerprint(arguments, leave_out=leave_out, defaults=self._defaults)


_UNFINISHED = (Generator, AsyncGenerator, AsyncIterator, Future)
#: Classes of whose values the work is done, as of most that are returned.
_DONE = {NoneType, bool, int, float, str, bytes, dict, list, tuple}


def check_returned(name: str, value: Any, remedy: str) -> Any:
    """Return what a body returned, unless its work is still to be done.

    Arguments:
        name: The task or function.
        value: What its body returned.
        remedy: What to do, for the error.

    Raises:
        ConfigurationError: it is a coroutine or another awaitable, the future of a pool, a generator, what `contextlib`
            has made of one, or an asynchronous iterator.
    """
    if type(value) in _DONE:
        return value
    # Of a function with @contextmanager the body has not even begun.
    manages = type(value).__module__ == "contextlib" and isinstance(getattr(value, "gen", None), _UNFINISHED)
    if not (inspect.isawaitable(value) or isinstance(value, _UNFINISHED) or manages):
        return value
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that it was never awaited
    raise ConfigurationError(
        f"Expected {name} to have done its work when it returns, got {type(value).__name__}: its result would be "
        f"recorded before there is one. {remedy}"
    )


def _check_id(given: Any) -> None:
    try:
        str.encode(given)
    except (UnicodeEncodeError, TypeError):
        raise MissingKey(
            f"Expected a task id that is text, which UTF-8 can encode, got {given!r}. Publish the task with another "
            "task_id, or with none."
        ) from None


@cache
def holder(pid: int) -> str:
    """Return how people find this process."""
    return f"{socket.gethostname()}:{pid}"


def current_holder() -> str:
    """Return host and pid of this process."""
    return holder(os.getpid())


#: Attribute of what @idempotent returns: how the keys of the function begin.
GUARDED_AS = "_idempotent_as"
#: Attribute of what either decorator returns, for functions and for jobs: its binding.
BINDING = "_idempotent_binding"
