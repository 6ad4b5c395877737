"""Tests of your own tasks, and of your own stores and applications.

- `override_store`, `inactive`, `set_active`: the store that tasks, functions and jobs of this process use meanwhile.
  With pytest they are the fixtures ``idempotency_store`` and ``idempotency_off``, with unittest and Django
  `IdempotencyTestMixin`.
- `assert_takes_effect_once`, `crash_at`, `redeliver`, `deliver_twice`: messages that come twice, and workers that die.
- `lease_for`: a lease for a function that a test calls itself.
- `StoreContract`, `TransactionContract`, `HttpContract`: the facts about a store, or an application; they need pytest.

Each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contracts import HttpContract, StoreContract, TransactionContract
    from .deliveries import Crash, StandInLease, crash_at, deliver_twice, lease_for, redeliver
    from .once import assert_takes_effect_once
    from .override import IdempotencyTestMixin, inactive, is_active, override_store, set_active

__all__ = [
    "Crash",
    "HttpContract",
    "IdempotencyTestMixin",
    "StandInLease",
    "StoreContract",
    "TransactionContract",
    "assert_takes_effect_once",
    "crash_at",
    "deliver_twice",
    "inactive",
    "is_active",
    "lease_for",
    "override_store",
    "redeliver",
    "set_active",
]

_HOMES = {
    "HttpContract": "contracts",
    "StoreContract": "contracts",
    "TransactionContract": "contracts",
    "assert_takes_effect_once": "once",
    **dict.fromkeys(["IdempotencyTestMixin", "inactive", "is_active", "override_store", "set_active"], "override"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'deliveries')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
