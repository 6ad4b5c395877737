"""Every store that an app's tasks use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..stores import Store, hide_password
from ..stores.used import UsedStore
from .binding import default_namespace, store_of
from .worker import idempotent_tasks

__all__ = ["used_stores"]


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
