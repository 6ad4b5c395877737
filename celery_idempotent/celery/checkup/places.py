"""Whether the store is a place of its own."""

from __future__ import annotations

from typing import Any

from ...doctor.finding import Finding, info, ok, warning
from ..inherited import store_of_backend, store_of_broker
from ..used import used_stores
from .facts import Facts

__all__ = ["CHECKS", "address"]

Address = tuple[str, str, int]
LOCAL = {"localhost", "::1", "0.0.0.0"}  # noqa: S104 - nothing is bound to it


def address(store: Any) -> Address | None:
    """Return host, port (or the path of a socket) and database of a store that is one Redis; None for any other."""
    pool = getattr(getattr(store, "_client", None), "connection_pool", None)
    if pool is None:
        return None
    said = pool.connection_kwargs
    named = getattr(pool, "service_name", "")
    host = str(named or said.get("path") or said.get("host") or "localhost")
    port = "" if named or said.get("path") else str(said.get("port") or 6379)
    return "127.0.0.1" if host in LOCAL else host, port, int(said.get("db") or 0)


def store_shared(facts: Facts) -> Finding | None:
    """See whether a flush of something else forgets operations.

    Raises:
        ConfigurationError: there is no store, or its URL is wrong.
    """
    places = {address(used.store) for used in used_stores(facts.app)} - {None}
    if not places:
        return None
    brokers = store_of_broker(facts.app) if facts.broker == "redis" else None
    others = {"the broker": brokers, "the result backend": store_of_backend(facts.app)}
    shared = {name: where for name, other in others.items() if (where := address(other)) in places and where}
    if shared:
        host, port, number = next(iter(shared.values()))
        return warning(
            f"A store is in the same Redis database as {' and '.join(shared)}: who flushes that, or lets it evict, "
            "forgets operations.",
            f'app.conf.idempotency_store = "redis://{host}:{port or 6379}/{number + 1}", or a server of its own',
        )
    return ok("no store shares a database with the broker or the result backend")


def store_unsaid(facts: Facts) -> Finding:
    """See whether the app says where its store is."""
    if not facts.conf.get("idempotency_store") and any(each.policy.store is None for each in facts.tasks):
        return info(
            "idempotency_store is not set: the store is the Redis of the result backend, or else of the broker, and "
            "moves with it.",
            'app.conf.idempotency_store = "redis://host:6379/1"',
        )
    return ok("the app says where its store is")


CHECKS = (store_unsaid, store_shared)
