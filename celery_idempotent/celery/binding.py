"""What an app and its tasks are bound to: store, policy, guard."""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from .. import keys
from ..errors import ConfigurationError, MissingKey
from ..files import check_prefix
from ..guard import Guard
from ..heartbeat import Heartbeat
from ..policy import Policy
from ..results import Codec
from ..stores import Store, open_store
from ..stores.breaker import Breaker
from ..stores.used import NAMESPACE
from . import worker
from .identity import Identity
from .large import BACKEND, TaskAnnex

__all__ = ["Binding", "default_namespace", "heartbeat", "store_of"]

#: Seconds after the hard time limit at which even a stuck process loses its lease.
GRACE = 60.0

heartbeat = Heartbeat()
breaker = Breaker()
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


@cache
def holder(pid: int) -> str:
    """Return how people find this process."""
    return f"{socket.gethostname()}:{pid}"


class Binding:
    """One task with its policy, as an app runs it.

    Arguments:
        task: The task; its app's configuration is read now.

    Raises:
        ConfigurationError: an option is wrong, or does not fit the task.
    """

    def __init__(self, task: Any) -> None:
        app = task._get_app()
        self.task = task
        self.policy = Policy.of(task.idempotency, base=Policy.of(app.conf.get("idempotency")))
        self.namespace = default_namespace(app, self.policy.store)
        self.signature = signature_of(task)
        self.policy.check_signature(self.signature, task.name)
        if self.policy.large_results not in (None, BACKEND):
            check_prefix(str(self.policy.large_results))
        self._guard: Guard | None = None

    @property
    def guard(self) -> Guard:
        """The guard of this task; made when the first delivery needs it."""
        if self._guard is None:
            conf, policy = self.task._get_app().conf, self.policy
            codec = Codec(
                serializer=conf.result_serializer,
                accept=conf.result_accept_content or conf.accept_content,
                compress_above=int(policy.compress_above),
                result_max_bytes=int(policy.result_max_bytes),
                compression=policy.compression,
                annex=TaskAnnex(self.task, policy.large_results),
            )
            self._guard = Guard(store_of(self.task._get_app(), policy.store), policy, codec, heartbeat, breaker)
        return self._guard

    def max_lease(self, limit: float | None) -> float | None:
        """Return for how long a delivery with this hard time limit renews its lease.

        A pool that cannot end a body at its limit, as threads, has bodies that live on and must not be overtaken.
        """
        enforced = limit if worker.enforces_limits else None
        return self.policy.max_lease or (enforced + GRACE if enforced else None)

    def explicit(self, identity: Identity) -> bool:
        """Tell whether the key is more than the task id."""
        return identity.key is not None or self.policy.key is not None

    def arguments(self, identity: Identity, args: Any, kwargs: Any) -> dict[str, object]:
        """Return the call's arguments by name, defaults applied; nothing where the key is the task id.

        Raises:
            TypeError: they do not fit the task.
        """
        return keys.bind(self.signature, args, kwargs) if self.explicit(identity) else {}

    def key(
        self, identity: Identity, task_id: str, arguments: Mapping[str, object], headers: Mapping[str, Any] | None
    ) -> str:
        """Return the store's key of one delivery, given its `arguments`.

        Raises:
            MissingKey: it cannot be told.
        """
        name = self.task.name
        if not self.explicit(identity):
            return keys.compose_default(self.namespace, name, task_id)
        if identity.key is not None:
            key = identity.key
            if key == "":
                raise MissingKey(
                    f"Expected idempotency_key of {name} to name the operation, got an empty one. "
                    "Leave it out or fill it."
                )
        else:
            key = keys.resolve(self.policy.key or (), arguments)
        return keys.compose(self.namespace, name, key=key, scope=self._scope(arguments, headers))

    def _scope(self, arguments: Mapping[str, object], headers: Mapping[str, Any] | None) -> object | None:
        scope = self.policy.scope
        if scope is None:
            return None
        value = (headers or {}).get(scope) if isinstance(scope, str) else keys.resolve(scope, arguments)
        if value is None or value == "":
            raise MissingKey(
                f"Expected a scope for {self.task.name} from {scope!r}, got {value!r}. "
                "Without it two tenants could share a key: publish the task with that header, "
                "or mend the scope function."
            )
        return value

    def fingerprint(self, arguments: Mapping[str, object]) -> str:
        """Return the digest of the arguments that calls with the same key must share; "" to compare none."""
        option = self.policy.fingerprint
        if option is False:
            return ""
        return keys.fingerprint(arguments, leave_out=() if option is True else option)


def signature_of(task: Any) -> inspect.Signature:
    """Return the signature of a task's body, without ``self``."""
    return inspect.signature(getattr(task, "_orig_run", task.run))


def current_holder() -> str:
    """Return host and pid of this process."""
    return holder(os.getpid())
