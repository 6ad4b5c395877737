"""Tasks, jobs and functions that take effect once per operation.

The public names; each is imported when it is first used, so that those who need no Celery import none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calling import idempotent
    from .celery.task import IdempotentTask
    from .current import current_lease
    from .errors import (
        ConfigurationError,
        Conflict,
        CrashLoop,
        IdempotencyError,
        KeyReused,
        LeaseLost,
        MissingKey,
        PreviouslyFailed,
        ResultUnavailable,
        SettleNotCommitted,
        StoreError,
        StoreUnreachable,
    )
    from .events import Event
    from .hooks import add_hook, remove_hook
    from .policy import Policy
    from .stores import Store, open_store

__all__ = [
    "ConfigurationError",
    "Conflict",
    "CrashLoop",
    "Event",
    "IdempotencyError",
    "IdempotentTask",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "Policy",
    "PreviouslyFailed",
    "ResultUnavailable",
    "SettleNotCommitted",
    "Store",
    "StoreError",
    "StoreUnreachable",
    "add_hook",
    "current_lease",
    "idempotent",
    "open_store",
    "remove_hook",
]

_HOMES = {
    "IdempotentTask": "celery",
    "Policy": "policy",
    "Store": "stores",
    "open_store": "stores",
    "Event": "events",
    "add_hook": "hooks",
    "current_lease": "current",
    "idempotent": "calling",
    "remove_hook": "hooks",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
