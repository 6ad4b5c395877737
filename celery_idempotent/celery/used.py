"""Every store that an app's tasks use."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from .. import keys
from ..errors import ConfigurationError, MissingKey
from ..stores import Store, hide_password
from ..stores.used import UsedStore
from .binding import default_namespace, store_of
from .worker import idempotent_tasks

__all__ = ["TaskKeys", "used_stores"]


def used_stores(app: Any) -> list[UsedStore]:
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
        try:
            key: str = self._task(name).key_for(*args, idempotency_headers=headers, **kwargs)
        except (MissingKey, TypeError) as error:
            raise ConfigurationError(str(error)) from error
        return key

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
    return ";".join(hide_password(part).rstrip("/") for part in url.split(";")) if url else type(store).__name__


def _named(found: dict[Store, _Use]) -> list[UsedStore]:
    """Give each store a name of its own."""
    stores: list[UsedStore] = []
    for store, use in found.items():
        name = _name_of(store, use.wanted)
        same = sum(used.name.partition(" (")[0] == name for used in stores)
        name = f"{name} ({same + 1})" if same else name
        stores.append(UsedStore(name, store, tuple(sorted(use.namespaces)), use.lease_ttls, use.keep_ttls))
    return stores
