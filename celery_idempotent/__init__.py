"""Tasks, jobs and functions that take effect once per operation.

The public names; each is imported when it is first used, so that a program without Celery imports none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .celery.task import IdempotentTask
    from .core.lease import current_lease
    from .core.policy import IdempotencyOptions, Policy, Unique, UniqueOptions
    from .errors import (
        AlreadyPublished,
        ConfigurationError,
        Conflict,
        CrashLoop,
        IdempotencyError,
        KeyReused,
        LeaseLost,
        MissingKey,
        NoLease,
        PreviouslyFailed,
        ResultUnavailable,
        SettleNotCommitted,
        StoreError,
        StoreUnreachable,
    )
    from .events import Event, add_hook, remove_hook
    from .functions import idempotent
    from .stores import open_store
    from .stores.base import Store

    __version__: str

__all__ = [
    "AlreadyPublished",
    "ConfigurationError",
    "Conflict",
    "CrashLoop",
    "Event",
    "IdempotencyError",
    "IdempotencyOptions",
    "IdempotentTask",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "NoLease",
    "Policy",
    "PreviouslyFailed",
    "ResultUnavailable",
    "SettleNotCommitted",
    "Store",
    "StoreError",
    "StoreUnreachable",
    "Unique",
    "UniqueOptions",
    "add_hook",
    "current_lease",
    "idempotent",
    "open_store",
    "remove_hook",
]


_HOMES = {
    "IdempotentTask": "celery",
    "IdempotencyOptions": "core.policy",
    "Policy": "core.policy",
    "Store": "stores",
    "Unique": "core.policy",
    "UniqueOptions": "core.policy",
    "open_store": "stores",
    "Event": "events",
    "add_hook": "events",
    "current_lease": "core.lease",
    "idempotent": "functions",
    "remove_hook": "events",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("celery-idempotent")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
