"""Every store that an app's tasks use."""

from __future__ import annotations

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
    namespaces: dict[object, set[str]] = {own: set()} if own else {}
    for task in sorted(idempotent_tasks(app), key=lambda task: task.name):
        binding = task._binding
        namespaces.setdefault(binding.policy.store or own, set()).add(binding.namespace)
    if not namespaces:
        namespaces[own] = set()
    found: dict[Store, tuple[object, set[str]]] = {}
    for wanted, names in namespaces.items():
        _, known = found.setdefault(store_of(app, wanted), (wanted, set()))
        known |= names or {default_namespace(app, None)}
    return _named(found)


def _named(found: dict[Store, tuple[object, set[str]]]) -> list[UsedStore]:
    """Give each store a name of its own."""
    stores: list[UsedStore] = []
    for store, (wanted, namespaces) in found.items():
        name = hide_password(wanted) if isinstance(wanted, str) else type(store).__name__
        same = sum(used.name.partition(" (")[0] == name for used in stores)
        stores.append(UsedStore(f"{name} ({same + 1})" if same else name, store, tuple(sorted(namespaces))))
    return stores
