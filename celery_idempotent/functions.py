"""Functions that are guarded: which may be, and what their calls share, whoever makes them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from . import binding, keys
from .answers import Ending
from .binding import BACKEND, Binding
from .compression import LARGEST, NONE
from .errors import ConfigurationError, LeaseLost
from .files import FileAnnex
from .policy import Policy
from .records import Outcome, Reason, Release, State
from .results import Codec, Kind
from .stores import Store, open_store

__all__ = ["GUARDED_AS", "FunctionBinding", "check_function", "check_returned", "opened", "policy_of"]

#: Attribute of what @idempotent returns: how the keys of the function begin.
GUARDED_AS = "_idempotent_as"
#: By URL: functions that name the same store share it, with its connections and renewals.
_stores: dict[str, Store] = {}


def policy_of(given: object, options: Mapping[str, Any]) -> Policy:
    """Return the policy that a decorator was given, with its options laid on top.

    Raises:
        ConfigurationError: one of them is wrong, or the decorator was written without parentheses.
    """
    if inspect.isroutine(given):
        raise ConfigurationError(
            f"Expected options of @idempotent, got the function {given.__qualname__}: write @idempotent(...), "
            "with parentheses."
        )
    return Policy.of(options, base=Policy.of(given))  # type: ignore[arg-type]


def check_function(function: Any) -> None:
    """Refuse what has no one ending that could be recorded.

    Raises:
        ConfigurationError: it is no function, or it yields.
    """
    if _is_celery_task(function):
        raise ConfigurationError(
            "Expected a function to make idempotent, got a task of Celery, which @idempotent would not guard where a "
            "worker runs it: leave @idempotent out, and write @app.task(base=IdempotentTask, idempotency={...})."
        )
    wrapped = isinstance(function, (staticmethod, classmethod))  # routines too
    if wrapped or not inspect.isroutine(function):
        hint = "decorate the function within" if wrapped else "write def"
        raise ConfigurationError(f"Expected a function to make idempotent, got {function!r}: {hint}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"Expected {function.__qualname__} to return, and it yields: what a generator has done when its caller "
            "stops asking cannot be replayed. Return a list, or decorate the function that does one item's work."
        )
    try:
        keys.own_signature(function)
    except ValueError as error:
        raise ConfigurationError(
            f"Expected a function whose arguments can be told, got {function!r} ({error}): wrap it in one of your own."
        ) from None


def _is_celery_task(thing: Any) -> bool:
    """Return whether this is a task, or a proxy of one; nothing of it is asked, which would evaluate the proxy."""
    return any(base.__module__.split(".")[0] == "celery" for base in type(thing).__mro__)


def check_returned(name: str, value: Any) -> Any:
    """Return what a body returned, unless its work is still to be done: a decorator within may hide what it yields.

    Raises:
        ConfigurationError: it is a coroutine or another awaitable, or a generator.
    """
    remedy = (
        "Decorate the coroutine function itself with @idempotent, inside any other decorator, or await or exhaust that "
        "in the body."
    )
    return binding.check_returned(name, value, remedy)


def opened(wanted: object) -> Store:
    """Return the store that a policy names, or has; the same object for the same URL."""
    if not isinstance(wanted, str):
        return cast(Store, wanted)
    # Of threads that come at once each may open one, which connects to nothing; all use the first.
    return _stores.get(wanted) or _stores.setdefault(wanted, open_store(wanted))


def _receiver(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """Return the name of the argument that is the object of a method, "" where the function is none or is bound."""
    within = function.__qualname__.rpartition(".")[0]
    first = next(iter(signature.parameters), "")
    return first if first in ("self", "cls") and within and not within.endswith("<locals>") else ""


class FunctionBinding(Binding):
    """One function with its policy, on one store.

    Arguments:
        function: The function, as `check_function` lets it pass.
        policy: Its options.
        name: What keys and events call it (default: its module and qualified name).
        namespace: How its keys begin.
        store: Returns the store, when it is first needed.
        serializer: kombu's name for how results are written.

    Raises:
        ConfigurationError: an option is wrong, or does not fit the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        policy: Policy,
        *,
        name: str | None,
        namespace: str,
        store: Callable[[], Store],
        serializer: str,
    ) -> None:
        if name is None:
            name = f"{function.__module__}.{function.__qualname__}"
        told: dict[str, object] = {"name": name, "namespace": namespace}
        for option, text in told.items():
            if not (isinstance(text, str) and text):
                raise ConfigurationError(f"Expected {option} of {function.__qualname__} to be text, got {text!r}.")
        hidden = keys.hides_arguments(function)
        super().__init__(name, keys.own_signature(function), policy, namespace, hidden=hidden)
        self.receiver = _receiver(function, self.signature)
        if policy.large_results == BACKEND:
            raise ConfigurationError(
                f"Expected large_results of {name} to be a URL of files, got {BACKEND!r}, which is Celery's result "
                'backend. Write large_results="file:///var/results" or another URL that fsspec opens.'
            )
        self._open = store
        self._serializer = serializer
        self._codec()  # a wrong serializer is told where it is declared
        self._plain = Codec(serializer=serializer, compress_above=0, result_max_bytes=LARGEST, compression=NONE)

    def _store(self) -> Store:
        return self._open()

    def _codec(self) -> Codec:
        policy = self.policy
        return Codec(
            serializer=self._serializer,
            compress_above=int(policy.compress_above),
            result_max_bytes=int(policy.result_max_bytes),
            compression=policy.compression,
            annex=FileAnnex(policy.large_results) if policy.large_results else None,
        )

    def as_replayed(self, value: object) -> object:
        """Return what a body returned as a duplicate will get it, so that both get the same; itself where none will."""
        if self._serializer == "pickle" or not self.policy.store_result:
            return value
        read = self._plain.decode(self._plain.encode_value(value))
        return read.data if read.kind is Kind.VALUE else value

    def ending_of(self, error: BaseException) -> Ending:
        """Return what the record is to say, given what the body raised."""
        match error:
            case LeaseLost():
                return Release(Reason.REQUEUED)
            case asyncio.CancelledError():
                return Release(Reason.REVOKED)
            case Exception():
                if self.is_final(error):
                    return Outcome(State.FAILED, self.guard.codec.encode_exception(error))
                return Release(Reason.FAILED)
            case _:
                return Release(Reason.SHUTDOWN)
