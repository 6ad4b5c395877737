"""Stores by URL, opened when asked for and not before."""

from __future__ import annotations

import difflib
from importlib import import_module

from ..errors import ConfigurationError
from .base import Store

__all__ = ["SCHEMES", "Store", "hide_password", "open_store"]

#: By scheme: the module and the class, whose `from_url` makes the store; and the extra that brings its driver, if it
#: needs one.
SCHEMES: dict[str, tuple[str, str, str]] = {
    "memory": ("memory", "MemoryStore", ""),
    "redis": ("redis", "RedisStore", ""),
    "rediss": ("redis", "RedisStore", ""),
    "unix": ("redis", "RedisStore", ""),
    "valkey": ("redis", "RedisStore", ""),
    "valkeys": ("redis", "RedisStore", ""),
    "redis+cluster": ("cluster", "ClusterStore", ""),
    "rediss+cluster": ("cluster", "ClusterStore", ""),
    "redis+sentinel": ("sentinel", "SentinelStore", ""),
    "rediss+sentinel": ("sentinel", "SentinelStore", ""),
    "postgresql": ("postgres", "PostgresStore", "postgres"),
    "postgres": ("postgres", "PostgresStore", "postgres"),
    "sqlite": ("sqlite", "SqliteStore", ""),
    "dynamodb": ("dynamodb", "DynamoDBStore", "dynamodb"),
    # In front of any other scheme: cached+postgresql://...
    "cached": ("cached", "CachedStore", ""),
}


def open_store(url: str) -> Store:
    """Return the store that a URL names; nothing is connected yet.

    Arguments:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://`` or ``redis+sentinel://`` (the same with
            ``valkey``), ``postgresql://``, ``sqlite:///path``, ``dynamodb://table``, ``cached+postgresql://`` and the
            like, or ``memory://`` for one process; the guides say what may follow.

    Raises:
        ConfigurationError: the scheme is unknown, the URL cannot be parsed, or a driver is not installed.
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if scheme.startswith("cached+"):
        scheme = "cached"
    if scheme not in SCHEMES:
        # Of two that are equally near, difflib takes the later in the alphabet: rediss+cluster:// for rediss+tls://.
        near = sorted(
            difflib.get_close_matches(scheme, SCHEMES), key=lambda name: (-_likeness(scheme, name), len(name))
        )
        known = ", ".join(f"{name}://" for name in SCHEMES)
        hint = f" Did you mean {near[0]}://?" if near else ""
        raise ConfigurationError(
            f"Expected the URL of an idempotency store to begin with one of {known}, got {hide_password(url)!r}.{hint}"
        )
    module, name, extra = SCHEMES[scheme]
    try:
        cls = getattr(import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").startswith("celery_idempotent"):
            raise
        raise ConfigurationError(
            f"Expected {error.name} to be installed for {scheme}:// stores, and it is not. "
            f"Install it with: pip install 'celery-idempotent[{extra}]'"
        ) from None
    store: Store = cls.from_url(url)
    return store


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def hide_password(url: str) -> str:
    """Return the URL fit for a log: without credentials and without its query, which may hold them too."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{host.partition('?')[0]}"
