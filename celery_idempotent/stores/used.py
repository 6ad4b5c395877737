"""A store as somebody uses it: what people call it, and what of it is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .base import Store

__all__ = ["NAMESPACE", "UsedStore"]

#: How keys begin where `idempotency_namespace` does not say otherwise.
NAMESPACE = "idem"


@dataclass(frozen=True, slots=True)
class UsedStore:
    """A store that an app, or somebody at a command line, uses.

    Arguments:
        name: What to call it; no password in it.
        store: The store.
        namespaces: How the keys of its user begin there, without the colon.
        lease_ttls: Seconds a lease lasts, by the name of the task; of the tasks that are known.
        keep_ttls: Seconds for which a history is kept, alike.
    """

    name: str
    store: Store
    namespaces: tuple[str, ...] = (NAMESPACE,)
    lease_ttls: Mapping[str, float] = field(default_factory=dict, compare=False)
    keep_ttls: Mapping[str, float] = field(default_factory=dict, compare=False)

    def meant_key(self, typed: str) -> str | None:
        """Return the key that somebody meant who typed it without the namespace, if there is such.

        Raises:
            StoreError: the store could not be asked.
        """
        return next((key for key in self._whole(typed) if self.store.get(key) is not None), None)

    def meant_prefix(self, typed: str) -> str | None:
        """Return the beginning of keys that somebody meant who typed it without the namespace, if there are such.

        Raises:
            StoreError: the store could not be asked.
        """
        return next(
            (prefix for prefix in self._whole(typed) if any(True for _ in self.store.scan(prefix=prefix))), None
        )

    def _whole(self, typed: str) -> list[str]:
        return [f"{name}:{typed}" for name in self.namespaces if not typed.startswith(f"{name}:")]
