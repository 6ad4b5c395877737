"""Jobs of RQ that take effect once per operation.

Each name is imported when it is first used; nothing of Celery is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.lease import current_lease
    from .decorator import idempotent
    from .worker import IdempotentSpawnWorker, IdempotentWorker

__all__ = ["IdempotentSpawnWorker", "IdempotentWorker", "current_lease", "idempotent"]


_HOMES = {"idempotent": ".decorator", "current_lease": "..core.lease"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES.get(name, ".worker"), __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "rq":
            raise
        hint = "Expected RQ to be installed, and it is not: pip install 'celery-idempotent[rq]'"
        raise ModuleNotFoundError(hint, name="rq") from None


def __dir__() -> list[str]:
    return __all__
