"""What an app and its tasks are bound to: store, policy, guard."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from .. import keys
from ..binding import Binding, heartbeat
from ..errors import ConfigurationError
from ..policy import Policy
from ..results import Codec
from ..stores import Store, open_store
from ..stores.used import NAMESPACE
from . import leases, worker
from .identity import Identity
from .large import TaskAnnex

__all__ = ["TaskBinding", "default_namespace", "store_of"]

#: Seconds after the hard time limit at which even a stuck process loses its lease.
GRACE = 60.0

heartbeat.renewed = leases.refresh
_stores: WeakKeyDictionary[Any, dict[str, Store]] = WeakKeyDictionary()
_lock = threading.Lock()


def store_of(app: Any, wanted: object = None) -> Store:
    """Return the store an app uses, the same object every time.

    Arguments:
        app: A Celery app.
        wanted: A store or a URL that a task's policy names; default is ``app.conf.idempotency_store``, else the app's
            Redis result
            backend, else its Redis broker.

    Raises:
        ConfigurationError: none of these is there, or the URL is wrong.
    """
    wanted = wanted or app.conf.get("idempotency_store")
    if isinstance(wanted, Store):
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        raise ConfigurationError(f"Expected idempotency_store to be a URL or a Store, got {wanted!r}.")
    with _lock:
        known = _stores.setdefault(app, {})
        name = wanted or ""
        if name not in known:
            known[name] = open_store(wanted) if wanted else _default_store(app)
        return known[name]


def _default_store(app: Any) -> Store:
    from .inherited import store_of_backend, store_of_broker

    store = store_of_backend(app) or store_of_broker(app)
    if store is None:
        raise ConfigurationError(
            "Expected somewhere to remember what is done: app.conf.idempotency_store is not set, and neither the "
            "result backend nor "
            'the broker of this app is Redis. Set app.conf.idempotency_store = "redis://host:6379/1".'
        )
    return store


def default_namespace(app: Any, store: object) -> str:
    """Return how keys begin: apps that share a Redis and tell themselves apart by a key prefix do so in it too."""
    named = app.conf.get("idempotency_namespace")
    if named or store or app.conf.get("idempotency_store"):
        return named or NAMESPACE
    options = (app.conf.result_backend_transport_options or {}, app.conf.broker_transport_options or {})
    prefix = next((found for found in (each.get("global_keyprefix") for each in options) if found), "")
    return f"{prefix}{NAMESPACE}"


class Named(NamedTuple):
    """How a delivery names its operation.

    Arguments:
        key: What its arguments or its producer name.
        operation: The store's key of the operation, the same unless it is a part of another one.
        arguments: By name, where they are to be compared with those of others; else None.
    """

    key: str
    operation: str
    arguments: dict[str, object] | None


class TaskBinding(Binding):
    """One task with its policy, as an app runs it.

    Arguments:
        task: The task; its app's configuration is read now.

    Raises:
        ConfigurationError: an option is wrong, or does not fit the task.
    """

    scope_hint = "publish the task with that header, or mend the scope function"

    def __init__(self, task: Any) -> None:
        app = task._get_app()
        policy = Policy.of(task.idempotency, base=Policy.of(app.conf.get("idempotency")))
        body, namespace = _body_of(task), default_namespace(app, policy.store)
        hidden = keys.hides_arguments(body)
        super().__init__(task.name, keys.own_signature(body), policy, namespace, hidden=hidden)
        self.task = task

    def _store(self) -> Store:
        return store_of(self.task._get_app(), self.policy.store)

    def _codec(self) -> Codec:
        conf, policy = self.task._get_app().conf, self.policy
        return Codec(
            serializer=conf.result_serializer,
            accept=conf.result_accept_content or conf.accept_content,
            compress_above=int(policy.compress_above),
            result_max_bytes=int(policy.result_max_bytes),
            compression=policy.compression,
            annex=TaskAnnex(self.task, policy.large_results),
            # A backend is its thread's own, and so is asked for each time.
            prepare=lambda value: self.task.backend.prepare_value(value),
        )

    def named(self, identity: Identity, task_id: str, args: Any, kwargs: Any, headers: Any) -> Named:
        """Return how a delivery names its operation.

        Arguments:
            identity: Who the delivery is.
            task_id: Of the message.
            args: Of the message.
            kwargs: Of the message.
            headers: What the producer said beside the arguments.

        Raises:
            TypeError: the arguments do not fit the task.
            MissingKey: the key cannot be told.
        """
        explicit = self.explicit(identity.key)
        arguments = self.arguments(identity.key, args, kwargs)
        key = self.key(identity.key, task_id, arguments, headers)
        if key in identity.within:
            # A part of what replaces the operation of that key: it cannot wait for the operation, which waits for it.
            return Named(key, keys.placed(self.default_key(f"{task_id}{identity.part}"), identity.place), None)
        return Named(key, keys.placed(key, identity.place), arguments if explicit else None)

    def default_key(self, task_id: str) -> str:
        """Return the store's key of an operation that is known by its task id."""
        return keys.compose_default(self.namespace, self.name, task_id)

    def max_lease(self, limit: float | None) -> float | None:
        """Return for how long a delivery with this hard time limit renews its lease.

        A pool that cannot end a body at its limit, as threads, has bodies that live on and must not be overtaken.
        """
        enforced = limit if worker.enforces_limits else None
        return self.policy.max_lease or (enforced + GRACE if enforced else None)


def _body_of(task: Any) -> Callable[..., Any]:
    """Return the body of a task as it was declared.

    ``task.run`` may have been replaced: for ``autoretry_for`` by Celery, in a worker by what watches its tasks. Those
    take anything and hand it through.
    """
    run = inspect.getattr_static(type(task), "run")
    bound = run.__get__(task, type(task)) if hasattr(run, "__get__") else run
    return cast(Callable[..., Any], bound)
