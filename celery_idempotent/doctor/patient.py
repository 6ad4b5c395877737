"""A store, and what is known of those who use it."""

from __future__ import annotations

from dataclasses import dataclass

from ..stores.base import Store
from ..stores.used import NAMESPACE

__all__ = ["Patient"]


@dataclass(frozen=True, slots=True)
class Patient:
    """A store that is examined.

    Arguments:
        store: The store.
        name: What to call it; no password in it.
        namespace: How keys begin there, without the colon.
        purged: Whether beat purges it; None where there is no app that would know.
    """

    store: Store
    name: str
    namespace: str = NAMESPACE
    purged: bool | None = None
