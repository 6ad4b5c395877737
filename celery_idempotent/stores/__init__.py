"""Stores by URL, opened when asked for and not before."""

from __future__ import annotations

import difflib

from ..errors import ConfigurationError
from .base import Store

__all__ = ["Store", "hide_password", "open_store"]

SCHEMES = ("memory", "redis", "rediss", "unix")


def open_store(url: str) -> Store:
    """Return the store that a URL names; nothing is connected yet.

    Arguments:
        url: ``redis://``, ``rediss://`` or ``unix://`` as redis-py takes them, or ``memory://`` for one process.

    Raises:
        ConfigurationError: the scheme is unknown or the URL cannot be parsed.
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore()
    if scheme in SCHEMES:
        from .redis import RedisStore

        return RedisStore.from_url(url)
    near = difflib.get_close_matches(scheme, SCHEMES, n=1)
    known = ", ".join(f"{name}://" for name in SCHEMES)
    hint = f" Did you mean {near[0]}://?" if near else ""
    raise ConfigurationError(
        f"Expected the URL of an idempotency store to begin with one of {known}, got {hide_password(url)!r}.{hint}"
    )


def hide_password(url: str) -> str:
    """Return the URL fit for a log: without credentials and without its query, which may hold them too."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{host.partition('?')[0]}"
