"""What an app has: stores, bindings, idempotent tasks, a place for large results, and the purge task."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import product
from typing import Any, NamedTuple, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from celery import states
from celery.app.task import Task
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded
from celery.schedules import BaseSchedule
from kombu.exceptions import ContentDisallowed, DecodeError

from ..core import keys
from ..core.binding import BACKEND, Binding, heartbeat
from ..core.file_results import TASK, FileResultStorage
from ..core.policy import Policy, Unique
from ..core.results import Codec, Kind, NotStored, Origin, Payload, ResultStorage
from ..errors import ConfigurationError, MissingKey, StoreError, StoreUnreachable
from ..events import in_words, logger
from ..stores import hide_password, maintenance, open_store
from ..stores.base import Store
from ..stores.maintenance import NAMESPACE, NamedStore
from . import pool
from .message import UNGUARDED, MessageHeaders, own_header

#: Seconds after the hard time limit at which even a stuck process loses its lease.
GRACE = 60.0
#: The attribute of a task's class with what was declared and what its annotations replace it by, by option.
LAYERS = "_idempotency_layers"

heartbeat.renewed = pool.refresh
_stores: WeakKeyDictionary[Any, dict[str, Store]] = WeakKeyDictionary()
_lock = threading.Lock()


def _renew_lock() -> None:
    """Have a new lock, in a child that was just forked: a thread of its parent may have held the other."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


def store_of(app: Any, wanted: object = None, task: Any = None) -> Store:
    """Return the store an app uses, the same object every time.

    Arguments:
        app: A Celery app.
        wanted: A store or a URL that a task's policy names; default is ``app.conf.idempotency_store``, else the app's
            Redis result backend, else its Redis broker.
        task: The task that needs it, if it is one task's.

    Raises:
        ConfigurationError: none of these is there, or the URL is wrong.
    """
    wanted = app.conf.get("idempotency_store") if wanted is None else wanted
    if isinstance(wanted, Store):
        return wanted
    if wanted is not None and not isinstance(wanted, str):
        raise ConfigurationError(f"Expected idempotency_store to be a URL or a Store, got {wanted!r}.")
    if wanted == "":  # as of a variable of the environment that is not set
        raise ConfigurationError(
            "Expected idempotency_store to be a URL, got an empty one. Write redis://host:6379/1, or None for the "
            "Redis of the result backend or the broker."
        )
    with _lock:
        known = _stores.setdefault(app, {})
        name = wanted or ""
        if name not in known:
            known[name] = open_store(wanted) if wanted else _default_store(app, task)
        return known[name]


def _default_store(app: Any, task: Any) -> Store:
    store = store_of_backend(app) or store_of_broker(app)
    if store is None:
        done = "is done" if task is None else f"{task.name} of {type(task).__module__} has done"
        # Celery gives the tasks of each app to all apps of the process.
        other = (
            "" if task is None else " If the task is meant for another app alone, declare it there with shared=False."
        )
        tests = (
            " In tests, use the fixture idempotency_store, or override_store() of celery_idempotent.testing."
            if app.conf.task_always_eager
            else ""
        )
        raise ConfigurationError(
            f"Expected somewhere to remember what {done}: idempotency_store is not set in the app "
            f"{app.main or '(without a name)'}, and neither its result backend nor its broker is Redis. "
            f'Set app.conf.idempotency_store = "redis://host:6379/1".{other}{tests}'
        )
    return store


def default_namespace(app: Any, store: object) -> str:
    """Return the beginning of keys, with the key prefix by which apps that share a Redis are kept apart.

    Raises:
        ConfigurationError: the setting is no text.
    """
    named = app.conf.get("idempotency_namespace")
    if named is not None and not (named and isinstance(named, str)):
        raise ConfigurationError(
            f'Expected idempotency_namespace to be a text, got {named!r}. Write "shop", or None for the default.'
        )
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

    scope_hint = "publish the task with that header, or fix the scope function"

    def __init__(self, task: Any) -> None:
        app = task._get_app()
        with _within("the app's setting"):
            policy = Policy.of(app.conf.get("idempotency"))
        for options in declared(task, "idempotency"):
            with _within(task.name):
                policy = Policy.of(options, base=policy)
        body, namespace = _body_of(task), default_namespace(app, policy.store)
        hidden = keys.hides_arguments(body)
        super().__init__(task.name, keys.own_signature(body), policy, namespace, hidden=hidden)
        self.task = task
        #: the options of its unique publishing, or None
        self.unique: Unique | None = None
        for options in declared(task, "unique"):
            base = self.unique or default_unique(app)
            with _within(task.name):
                self.unique = Unique.of(options, base=base)
        if self.unique is not None:
            self.unique.check_signature(self.signature, self.name, hidden=self.hidden)

    def unique_of(self, wanted: object) -> Unique | None:
        """Return the options of unique publishing of a call, on top of those of the task.

        Raises:
            ConfigurationError: an option is wrong, or does not fit the task.
        """
        own = self.unique
        found = Unique.of(wanted, base=own or default_unique(self.task._get_app()))
        if found is not None:
            found.check_signature(self.signature, self.name, hidden=self.hidden)
        if found is not None and own is not None and found.newest and not own.newest:
            raise ConfigurationError(
                f"unique: expected no on_duplicate='replace' and no debounce for one call of {self.name}, got "
                f"{wanted!r}: messages that wait look whether they were replaced only where the task itself has that. "
                "Declare it in the task's own option unique."
            )
        return found

    def _store(self) -> Store:
        return store_of(self.task._get_app(), self.policy.store, self.task)

    def _codec(self) -> Codec:
        conf, policy = self.task._get_app().conf, self.policy
        return Codec(
            serializer=conf.result_serializer,
            accept=conf.result_accept_content or conf.accept_content,
            compress_above=int(policy.compress_above),
            result_max_bytes=int(policy.result_max_bytes),
            compression=policy.compression,
            storage=TaskResultStorage(self.task, policy.large_results),
            # A backend is its thread's own, and so is looked up each time.
            prepare=lambda value: self.task.backend.prepare_value(value),
        )

    def named(self, identity: MessageHeaders, task_id: str, args: Any, kwargs: Any, headers: Any) -> Named:
        """Return how a delivery names its operation.

        Arguments:
            identity: The headers of the delivery.
            task_id: Of the message.
            args: Of the message.
            kwargs: Of the message.
            headers: The producer's headers.

        Raises:
            TypeError: the arguments do not fit the task.
            MissingKey: the call gives no key.
        """
        key, arguments = self.operation(identity.key, task_id, args, kwargs, headers)
        key = identity.retried or key
        if key in identity.within:
            # A part of what replaces the operation of that key: it cannot wait for the operation, which waits for it.
            return Named(key, keys.placed(self.default_key(f"{task_id}{identity.part}"), identity.place), None)
        return Named(key, keys.placed(key, identity.place), arguments)

    def default_key(self, task_id: str) -> str:
        """Return the store's key of an operation that is known by its task id."""
        return keys.compose_default(self.namespace, self.name, task_id)

    def max_lease(self, limit: float | None) -> float | None:
        """Return for how long a delivery with this hard time limit renews its lease.

        A pool that cannot end a body at its limit, as threads, has bodies that live on and must not be overtaken.
        """
        enforced = limit if pool.enforces_limits else None
        return self.policy.max_lease or (enforced + GRACE if enforced else None)


def declared(task: Any, name: str) -> Iterator[Any]:
    """Yield what the bases of a task, itself and its annotations have as one of its options, in this order.

    Each is laid on top of what came before it: a key in a base class would go if only the last counted.
    """
    for owner in (*reversed(type(task).__mro__), task):
        layers = vars(owner).get(LAYERS, {}).get(name, [])
        for each in [*layers, vars(owner)[name]] if name in vars(owner) else layers:
            if isinstance(each, property):
                yield each.__get__(task)
            else:  # as it was declared: a callable in a class would be taken for a method
                yield each.__func__ if isinstance(each, staticmethod) else each


def default_unique(app: Any) -> Unique:
    """Return the options that every unique task of an app begins with.

    Raises:
        ConfigurationError: they are no options.
    """
    options = app.conf.get("idempotency_unique")
    if options is not None and not isinstance(options, (Unique, Mapping)):
        raise ConfigurationError(
            "Expected idempotency_unique to be a mapping of options or a Unique, which every unique task begins with, "
            f'got {options!r}. Write {{"for": "2h"}}; which tasks are unique is declared at each, or at their base '
            "class: unique=True."
        )
    with _within("the app's setting idempotency_unique"):
        return Unique.of(options or True) or Unique()


@contextmanager
def _within(place: str | None) -> Iterator[None]:
    """Name the place of an option in the errors: Celery evaluates a declaration long after its line in the program."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{place or 'a class of tasks'}: {error}") from None


def _body_of(task: Any) -> Callable[..., Any]:
    """Return the body of a task as it was declared.

    ``task.run`` may have been replaced: for ``autoretry_for`` by Celery, in a worker by what watches its tasks. Those
    take anything and hand it through.
    """
    run = inspect.getattr_static(type(task), "run")
    bound = run.__get__(task, type(task)) if hasattr(run, "__get__") else run
    return cast(Callable[..., Any], bound)


def store_of_backend(app: Any) -> Store | None:
    """Return a store on the result backend's Redis, or None if the backend is something else."""
    backend = app.backend
    if not is_backend(backend, "redis", "RedisBackend"):
        return None
    from ..stores.redis.store import direct, merged

    params = merged(backend.connparams)
    if is_backend(backend, "redis", "SentinelBackend"):
        hosts = [(host["host"], host["port"]) for host in params.pop("hosts")]
        return _sentinel(hosts, backend._transport_options, params, backend.as_uri())
    return direct(params, backend.as_uri())


def store_of_broker(app: Any) -> Store | None:
    """Return a store on the broker's Redis, or None if the broker is something else."""
    connection = app.connection_for_write()
    if connection.transport.driver_type != "redis":
        return None
    from ..stores.redis.store import direct, merged

    channel = object.__new__(connection.transport.Channel)  # used for its parameters alone; a real one would connect
    channel.connection = connection.transport
    for name, value in (connection.transport_options or {}).items():
        if name in channel.from_transport_options:
            setattr(channel, name, value)
    params = merged(channel._connparams())
    if params["connection_class"].__name__.startswith("Sentinel"):
        hosts = [_host_of(uri) for uri in connection.alt or [connection.as_uri(include_password=True)]]
        for name in ("host", "port"):
            params.pop(name, None)
        return _sentinel(hosts, connection.transport_options, params, connection.as_uri())
    return direct(params, connection.as_uri())


def _sentinel(hosts: list[tuple[str, int]], options: dict[str, Any], params: dict[str, Any], url: str) -> Store:
    import redis
    from redis.sentinel import Sentinel

    from ..stores.redis.store import RedisStore

    secure = issubclass(params.pop("connection_class", redis.Connection), redis.SSLConnection)
    make: Callable[..., Any] = Sentinel
    sentinel = make(
        hosts,
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={**RedisStore.connection_options(), **(options.get("sentinel_kwargs") or {})},
        **params,
        **({"ssl": True} if secure else {}),
    )
    return RedisStore(sentinel.master_for(options["master_name"]), url=url)


def _host_of(uri: str) -> tuple[str, int]:
    from kombu.utils.url import url_to_parts

    parts = url_to_parts(uri)
    return parts.hostname or "127.0.0.1", parts.port or 26379


def used_stores(app: Any) -> list[NamedStore]:
    """Return the stores that an app and its tasks use, the app's own first.

    The app's own is one of them if the app names it, if a task uses it, or if there is no other.

    Arguments:
        app: A Celery app whose tasks are loaded.

    Raises:
        ConfigurationError: a task is declared wrongly, or there is no store.
    """
    own = app.conf.get("idempotency_store")
    wanted: dict[object, _Use] = {own: _Use(own)} if own else {}
    for task in sorted(idempotent_tasks(app), key=lambda task: task.name):
        binding = task._binding
        use = wanted.setdefault(binding.policy.store or own, _Use(binding.policy.store or own))
        use.namespaces.add(binding.namespace)
        use.lease_ttls[task.name] = float(binding.policy.lease_ttl)
        use.keep_ttls[task.name] = float(max(binding.policy.result_ttl, binding.policy.failure_ttl))
    if not wanted:
        wanted[own] = _Use(own)
    found: dict[Store, _Use] = {}
    for name, use in wanted.items():
        known = found.setdefault(store_of(app, name), _Use(name))
        known.namespaces |= use.namespaces or {default_namespace(app, None)}
        known.lease_ttls.update(use.lease_ttls)
        known.keep_ttls.update(use.keep_ttls)
    return _named(found)


class TaskKeys:
    """The keys of an app's tasks, from what a person knows of an operation.

    Arguments:
        app: A Celery app whose tasks are loaded.
    """

    def __init__(self, app: Any) -> None:
        self._tasks = {task.name: task for task in idempotent_tasks(app)}

    def of_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        """Return the key of a call.

        Raises:
            ConfigurationError: there is no such task, its key is the task id, or the arguments do not fit.
        """
        task = self._task(name)
        self._check_keyed(task)
        try:
            key: str = task.key_for(*args, idempotency_headers=headers, **kwargs)
        except TypeError as error:
            raise ConfigurationError(f"{error}. Got {_as_call(args, kwargs)}.") from error
        except MissingKey as error:
            hint = _scope_hint(task, headers)
            raise ConfigurationError(hint or str(error)) from error
        return key

    def of_arguments(self, name: str, arguments: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> list[str]:
        """Return the keys of the calls with some arguments, or none: other arguments or headers are part of them.

        Arguments:
            name: The task's name.
            arguments: Names and values as text; the name may be empty.
            headers: Of the message, where the scope is one of them.

        Raises:
            ConfigurationError: there is no such task, or its key shows no such argument.
        """
        task = self._task(name)
        self._check_keyed(task)
        binding = task._binding
        source, scope = binding.policy.key, binding.policy.scope
        named = dict(arguments)
        if len(arguments) == 1 and isinstance(source, str):
            named = {argument or source: value for argument, value in arguments}
        _check_names(task, {argument for argument in named if argument})
        if "" in named or (isinstance(scope, str) and scope not in headers):
            return []
        found = []
        for values in product(*(list(_values(text)) for text in named.values())):
            with suppress(MissingKey):
                call = dict(zip(named, values, strict=True))
                tenant = None if scope is None else binding._scope(scope, call, headers)
                found.append(keys.compose(binding.namespace, name, key=keys.resolve(source, call), scope=tenant))
        if not found and callable(source):
            raise ConfigurationError(
                f"Expected the arguments of which the key function of {name} makes the key, got {sorted(named)}. "
                "Give the whole call: --args JSON and --kwargs JSON with show or explain."
            )
        return found

    def _check_keyed(self, task: Any) -> None:
        if task._binding.policy.key is None:
            raise ConfigurationError(
                f"Expected {task.name} to have a key that follows from its arguments, and its key is the id of each "
                f"message, which no argument shows. Name the id: show --task {task.name} TASK_ID. Workers log it, and "
                "the result of apply_async has it."
            )

    def of_text(self, typed: str, headers: Mapping[str, str], name: str | None = None) -> list[str]:
        """Return the keys that a person may mean by a text, under one task or under each.

        Raises:
            ConfigurationError: there is no such task.
        """
        tasks = [self._task(name)] if name else self._tasks.values()
        return list(dict.fromkeys(key for task in tasks for key in _keys_under(task, typed, headers)))

    def _task(self, name: str) -> Any:
        if name not in self._tasks:
            near = difflib.get_close_matches(name, self._tasks, 1)
            hint = f"Did you mean {near[0]}?" if near else f"There is {', '.join(sorted(self._tasks)) or 'none'}."
            raise ConfigurationError(f"Expected the name of an idempotent task of the app, got {name!r}. {hint}")
        return self._tasks[name]


def _check_names(task: Any, names: set[str]) -> None:
    """Raise if an argument has another name than the task's, or is not part of its key."""
    binding = task._binding
    source, known = binding.policy.key, list(binding.signature.parameters)
    for name in sorted(names - set(known)):
        if not any(each.kind is each.VAR_KEYWORD for each in binding.signature.parameters.values()):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"There is {', '.join(known)}."
            raise ConfigurationError(f"Expected the name of an argument of {task.name}, got {name!r}. {hint}")
    if callable(source):
        return
    parts = [source] if isinstance(source, str) else list(source)
    if callable(binding.policy.scope) or not (absent := sorted(names - set(parts))):
        return
    raise ConfigurationError(
        f"Expected arguments of which {task.name} makes its key ({', '.join(parts)}), got {', '.join(absent)}. Records "
        "hold no other arguments: look for that one in the log of your application."
    )


def _as_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def _scope_hint(task: Any, headers: Mapping[str, str]) -> str:
    """Return what is wrong if the scope of a task is a header that is not there, else ""."""
    scope = task._binding.policy.scope
    if not isinstance(scope, str) or headers.get(scope):
        return ""
    return (
        f"Expected the header {scope!r}, which is a part of the keys of {task.name}, got none. "
        f"Give it: --header {scope}=VALUE."
    )


def _keys_under(task: Any, typed: str, headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys of a task that a text may stand for: as text, as the JSON that it is, as a UUID, as a task id."""
    binding = task._binding
    scope = binding.policy.scope
    for value in _values(typed):
        with suppress(MissingKey):
            tenant = headers.get(scope) if isinstance(scope, str) else None
            yield keys.compose(binding.namespace, task.name, key=value, scope=tenant)
    with suppress(MissingKey):
        yield keys.compose_default(binding.namespace, task.name, typed)


def _values(typed: str) -> Iterator[object]:
    yield typed
    with suppress(ValueError):
        yield json.loads(typed)
    with suppress(ValueError):
        yield UUID(typed)


@dataclass(slots=True)
class _Use:
    """What the tasks of an app want of one store, and how they name it."""

    wanted: object
    namespaces: set[str] = field(default_factory=set)
    lease_ttls: dict[str, float] = field(default_factory=dict)
    keep_ttls: dict[str, float] = field(default_factory=dict)


def _name_of(store: Store, wanted: object) -> str:
    """Return what to call a store: its URL without a password, or its class where the app gives the object."""
    url = wanted if isinstance(wanted, str) else getattr(store, "url", "") if wanted is None else ""
    parts = re.split(";(?=[a-z+]+://)", url)  # a password may have a semicolon
    return ";".join(hide_password(part).rstrip("/") for part in parts) if url else type(store).__name__


def _named(found: dict[Store, _Use]) -> list[NamedStore]:
    """Give each store a name of its own."""
    stores: list[NamedStore] = []
    for store, use in found.items():
        name = _name_of(store, use.wanted)
        same = sum(used.name.partition(" (")[0] == name for used in stores)
        name = f"{name} ({same + 1})" if same else name
        stores.append(NamedStore(name, store, tuple(sorted(use.namespaces)), use.lease_ttls, use.keep_ttls))
    return stores


#: Seconds in which a run that has settled surely hands its result to the backend, if it lives.
HANDOVER = 60.0


class TaskResultStorage(ResultStorage):
    """Keeps the large results of one task in the storage of its policy, and reads them wherever they were left.

    Arguments:
        task: The task.
        wanted: Its option ``large_results``.
    """

    def __init__(self, task: Any, wanted: str | None) -> None:
        self._task = task
        self._wanted = wanted
        self._files = None if wanted in (None, BACKEND) else FileResultStorage(str(wanted))

    def keep(self, content: bytes, origin: Origin) -> str:
        """Keep a payload in the storage of the policy; Celery itself will give the backend what the backend keeps."""
        if self._files is not None:
            return self._files.keep(content, origin)
        if self._wanted is None:
            raise NotStored
        if not origin.published:
            raise NotStored(
                "the result backend does not keep it (no backend, rpc://, ignore_result, or a call of apply())"
            )
        return f"{TASK}{origin.task_id}"

    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        """Read a result from the backend or from its file."""
        if reference.startswith(TASK):
            return self._left_in_backend(reference[len(TASK) :], age)
        if self._files is not None:
            return self._files.read(reference, decode, age)
        return Payload(Kind.UNAVAILABLE, reason=f"it is at {reference}, and large_results names no place of files")

    def _left_in_backend(self, task_id: str, age: float) -> Payload:
        if not is_shared(self._task.backend):
            return Payload(Kind.UNAVAILABLE, reason=f"it was left to a result backend as task {task_id}; here is none")
        try:
            meta = self._task.backend.get_task_meta(task_id, cache=False)  # it is large, and read once
        except (ContentDisallowed, DecodeError) as error:
            return Payload(Kind.UNAVAILABLE, reason=f"the result backend has it and cannot read it: {error}")
        except Exception as error:
            raise StoreUnreachable(
                f"Expected the result of task {task_id} from the result backend, got {type(error).__name__}: the "
                "operation is done, and its result will be read once the backend answers"
            ) from error
        if meta["status"] == states.SUCCESS:
            return Payload(Kind.VALUE, meta["result"])
        if meta["status"] in states.UNREADY_STATES and age < HANDOVER:
            raise StoreUnreachable(
                f"Expected the result of task {task_id} in the result backend, got {meta['status']}: it was settled "
                f"{age:.0f} s ago and is on its way there"
            )
        return Payload(
            Kind.UNAVAILABLE,
            reason=f"the result backend was to have it as task {task_id}, where its status is {meta['status']}: "
            "it has expired or was removed there, or its worker died before it got there",
        )


def is_shared(backend: Any) -> bool:
    """Return whether any process can read a result in this backend; that of rpc:// is a message to one caller."""
    return not isinstance(backend, DisabledBackend) and not is_backend(backend, "rpc", "RPCBackend")


def keep_ended(backend: Any) -> None:
    """Have a result backend keep what has ended where a guarded message comes again; twice is the same as once.

    With ``task_track_started`` Celery notes first that the task starts. A delivery that then finds its work done by
    what has replaced the task, or its large result left in the backend, has nothing to put in that place.
    """
    kind = type(backend)
    if is_shared(backend) and not hasattr(kind.store_result, "keeps_ended"):
        kind.store_result = _keeping_ended(kind.store_result)


def _keeping_ended(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def keeping_ended(self: Any, task_id: str, result: Any, state: str, *args: Any, **options: Any) -> Any:
        request = options.get("request")
        if state == states.STARTED and request is not None and is_guarded(self.app.tasks.get(request.task)):
            again = (request.delivery_info or {}).get("redelivered") or own_header(vars(request)).get("copy")
            # A later message with the id of a failure shows that it runs.
            meta = meta_of(self, task_id)
            if meta is not None and meta["status"] in (states.READY_STATES if again else {states.SUCCESS}):
                return result
        return method(self, task_id, result, state, *args, **options)

    keeping_ended.keeps_ended = True  # type: ignore[attr-defined]
    return keeping_ended


def meta_of(backend: Any, task_id: str) -> dict[str, Any] | None:
    """Return what the result backend has of a task; None where it does not answer: who needs it asks again."""
    try:
        meta: dict[str, Any] = backend.get_task_meta(task_id, cache=False)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - the backend's own
        logger.warning("What became of %s is not known yet: %s", task_id, in_words(error))
        return None
    return meta


def is_done_since(backend: Any, meta: Mapping[str, Any], moment: float) -> bool:
    """Return whether a result was stored at or after a moment; not if the backend does not keep when it was.

    Arguments:
        backend: The result backend.
        meta: What it has of the task.
        moment: Seconds since the epoch.
    """
    done = meta.get("date_done")
    try:
        done = datetime.fromisoformat(done) if isinstance(done, str) else done
    except ValueError:
        return False
    if not isinstance(done, datetime):
        return False
    try:
        return _with_zone(backend, done).timestamp() >= moment
    except Exception as error:  # noqa: BLE001 - the database's own
        logger.warning("When %s ended is not known: %r", meta.get("task_id"), error)
        return False


def _with_zone(backend: Any, done: datetime) -> datetime:
    """Return a time with its zone, which databases keep none of."""
    if done.tzinfo is not None:
        return done
    if is_in_django(backend):  # without USE_TZ, which has it in the zone of the process
        return done.astimezone()
    if not is_backend(backend, "database", "DatabaseBackend"):
        return done.replace(tzinfo=timezone.utc)
    with backend.ResultSession() as session:
        # Celery hands it a time with a zone: this server keeps that in the session's zone.
        if session.get_bind().dialect.name == "postgresql":
            from sqlalchemy import DateTime, cast, select

            found = select(cast(cast(done, DateTime()), DateTime(timezone=True)))
            return session.execute(found).scalar_one()  # type: ignore[no-any-return]
    # Others leave the zone out: the app's (UTC before Celery 5.5).
    written = backend._get_result_meta(None, states.SUCCESS, None, None, format_date=False)["date_done"]
    return done.replace(tzinfo=written.tzinfo)


def is_backend(backend: Any, module: str, name: str, package: str = "celery.backends") -> bool:
    """Return whether a result backend is of a class, without importing that and its driver for it.

    Arguments:
        backend: The backend.
        module: The module of the package.
        name: The class in it.
        package: Whose backends they are (default: Celery's own).
    """
    kind: Any = backend.__class__  # also of one that is wrapped
    return _is_kind(kind, f"{package}.{module}", name)


@functools.lru_cache(maxsize=256)
def _is_kind(kind: type, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)  # as it is, where there is a backend of that class
    return loaded is not None and issubclass(kind, getattr(loaded, name))


def is_in_django(backend: Any) -> bool:
    """Return whether a result backend is that of django-celery-results in Django's database."""
    return is_backend(backend, "database", "DatabaseBackend", "django_celery_results.backends")


#: The name of the task.
PURGE = "celery_idempotent.purge"
#: Records that one run removes from each store at most; the next run goes on.
LIMIT = 100_000


def schedule_purge(
    app: Any,
    every: float | timedelta | BaseSchedule = 3600.0,
    *,
    limit: int = LIMIT,
    **options: Any,
) -> None:
    """Have beat remove what has expired from every store that the app's tasks use.

    Arguments:
        app: A Celery app.
        every: Seconds between two runs, a ``timedelta``, or a schedule of Celery's such as ``crontab(minute=17)``.
        limit: Remove about so many records from each store in one run.
        options: How the task is published, as ``apply_async`` takes them, such as ``queue="maintenance"``.
    """
    register(app)
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if isinstance(seconds, (int, float)):
        # While no worker takes them, runs must not pile up.
        options.setdefault("expires", float(seconds))
    # What beat runs it by; under the name, a second call replaces the first.
    app.add_periodic_task(every, app.signature(PURGE, kwargs={"limit": limit}), name=PURGE, **options)


def register(app: Any) -> None:
    """Let the app know the task; twice is the same as once. Workers with idempotent tasks do it by themselves."""
    # Of the app's task class, as Celery's own are: receivers of signals may expect it. But a plain one, also where that
    # is `IdempotentTask`: to purge twice does no harm.
    app.task(purge, name=PURGE, base=Task if is_idempotent(app.Task) else None, bind=True, shared=False)


def purge(self: Any, limit: int = LIMIT) -> dict[str, int | None]:
    """Remove expired records from every store that the app's tasks use; return how many by store, None where it failed.

    A store that cannot serve is logged, and tried again by the next run.
    """
    removed: dict[str, int | None] = {}
    for used in used_stores(self.app):
        try:
            removed[used.name] = maintenance.purge(used.store, limit)
        except StoreError as error:
            removed[used.name] = None
            logger.warning("What has expired in %s is not removed: %s The next run tries again.", used.name, error)
    logger.info("Expired records removed: %s", removed)
    return removed


def idempotent_tasks(app: Any) -> list[Any]:
    """Return the app's tasks that are guarded."""
    return [task for task in app.tasks.values() if is_guarded(task)]


def is_guarded(task: Any) -> bool:
    """Return whether the deliveries of a task are guarded: Celery's own never are, whatever the app's task class is."""
    return is_idempotent(task) and not (task.name or "").startswith(UNGUARDED)


def is_idempotent(task: Any) -> bool:
    """Return whether a task, or a class of tasks, is an `IdempotentTask`: nothing else has a binding."""
    return hasattr(task if isinstance(task, type) else task.__class__, "_binding")  # what @app.task returns is a proxy
