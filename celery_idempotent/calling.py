"""Plain functions, whoever calls them: a consumer, a handler of requests, a script. Each call is a delivery."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .answers import Answer, Busy, Delivery, Ignored, Ran, Replayed
from .awaiting import run_guarded
from .binding import current_holder
from .complaints import in_progress, not_kept
from .current import running
from .errors import ConfigurationError
from .functions import GUARDED_AS, FunctionBinding, check_function, check_returned, opened, policy_of
from .holding import Holding
from .policy import Policy
from .records import Claim, new_owner
from .stores.used import NAMESPACE

__all__ = ["idempotent"]

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(
    policy: Policy | Mapping[str, Any] | None = None,
    /,
    *,
    name: str | None = None,
    namespace: str = NAMESPACE,
    serializer: str = "json",
    **options: Any,
) -> Callable[[F], F]:
    """Make each operation of a function take effect once, whoever calls it.

    The call that comes first runs the function; those that come later with the same key return what it returned. A
    coroutine function stays one, for asyncio. Nobody delivers a call again: ``on_conflict="defer"`` raises `Conflict`
    at once, and ``on_store_error="wait"`` waits for ``wait_timeout`` at most. The function as it was declared, without
    a guard, is its ``__wrapped__``.

    Arguments:
        policy: Options that several functions share (default: the library's).
        name: What keys and events call the function (default: its module and qualified name); give one where the same
            function is found under several, as that of a script is.
        namespace: How its keys begin.
        serializer: kombu's name for how results are kept.
        options: Those of `Policy`; ``store`` and ``key`` must be among them, or in ``policy``.

    Returns:
        A decorator.

    Raises:
        ConfigurationError: an option is wrong or missing, or the function yields. When the function is called, it
            raises what is in `celery_idempotent.errors`, and what its body raises.

    Example::

        @idempotent(store="redis://localhost/1", key="order_id")
        def charge(order_id, cents): ...
    """
    wanted = policy_of(policy, options)

    def decorate(function: F) -> F:
        check_function(function)
        binding = FunctionBinding(
            function,
            _complete(wanted, function.__qualname__),
            name=name,
            namespace=namespace,
            store=functools.partial(opened, wanted.store),
            serializer=serializer,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            def body(holding: Holding) -> Any:
                with running(holding):
                    return check_returned(binding.name, function(*args, **kwargs))

            delivery = _delivery(binding, body, args, kwargs)
            return _conclude(binding, delivery, binding.guard.run(delivery))

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async def body() -> Any:
                return check_returned(binding.name, await function(*args, **kwargs))

            asyncio.get_running_loop()  # before anything is asked for that another framework could not wait for
            delivery = _delivery(binding, _nothing, args, kwargs)
            conclude = functools.partial(_conclude, binding, delivery)
            return await run_guarded(binding.guard, delivery, body, conclude)

        guarded: Any = call_async if inspect.iscoroutinefunction(function) else call
        guarded.__signature__ = binding.signature  # all arguments are handed through
        setattr(guarded, GUARDED_AS, (binding.namespace, binding.name))
        return cast(F, guarded)

    return decorate


def _complete(policy: Policy, name: str) -> Policy:
    lacking = [option for option in ("store", "key") if getattr(policy, option) is None]
    if lacking:
        raise ConfigurationError(
            f"Expected {' and '.join(lacking)} of {name}, got none: a function has no app whose store it could use, "
            'and its calls have no id. Write @idempotent(store="redis://localhost/1", key="order_id").'
        )
    if isinstance(policy.scope, str):
        raise ConfigurationError(
            f"Expected the scope of {name} to be a callable over its arguments, got {policy.scope!r}: that would be "
            f"the name of a header, and a call has none. Write scope=lambda {policy.scope}: {policy.scope}."
        )
    return policy


def _nothing(holding: Holding) -> None:
    """Stand for the body of a coroutine function, which its own task runs."""


def _delivery(binding: FunctionBinding, body: Callable[[Holding], Any], args: Any, kwargs: Any) -> Delivery:
    policy, owner = binding.policy, new_owner()
    arguments = binding.arguments(None, args, kwargs)
    claim = Claim(
        key=binding.key(None, owner, arguments, None),
        owner=owner,
        lease_ttl=policy.lease_ttl,
        keep_ttl=policy.failure_ttl,
        task_id=owner,
        fingerprint=binding.fingerprint(arguments),
        max_crashes=policy.max_crashes,
        holder=current_holder(),
    )
    story = binding.story(claim)
    return Delivery(
        claim,
        body,
        binding.ending_of,
        task=binding.name,
        task_id=owner,
        patience=policy.wait_timeout,
        tell=story,
        noted=story,
        max_lease=policy.max_lease,
        alone=True,
    )


def _conclude(binding: FunctionBinding, delivery: Delivery, answer: Answer) -> Any:
    match answer:
        case Ran(value):
            return binding.as_replayed(value)
        case Replayed(value, _):
            return value
        case Ignored(_, record):
            raise not_kept(record, "the run that did it left none")
        case Busy(remaining) as busy:
            raise busy.error or in_progress(delivery.claim.key, remaining)
    raise AssertionError(f"the guard gave no answer but {answer!r}")  # pragma: no cover
