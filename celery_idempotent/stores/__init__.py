"""Stores by URL, opened on first use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib import import_module
from urllib.parse import parse_qsl

from ..errors import ConfigurationError
from ..units import hide_password
from .base import Store
from .records import Claim, HistoryEntry, Lease, Outcome, PastEvent, Reason, Record, Refusal, Release, State, Verdict

__all__ = [
    "SCHEMES",
    "Claim",
    "HistoryEntry",
    "Lease",
    "Outcome",
    "PastEvent",
    "Reason",
    "Record",
    "Refusal",
    "Release",
    "State",
    "Store",
    "Verdict",
    "hide_password",
    "open_store",
    "unknown_parameter",
]


#: By scheme: the module and the class, whose `from_url` makes the store; and the extra that brings its driver, if it
#: needs one.
SCHEMES: dict[str, tuple[str, str, str]] = {
    "memory": ("memory", "MemoryStore", ""),
    "redis": ("redis", "RedisStore", ""),
    "rediss": ("redis", "RedisStore", ""),
    "unix": ("redis", "RedisStore", ""),
    "valkey": ("redis", "RedisStore", ""),
    "valkeys": ("redis", "RedisStore", ""),
    "redis+cluster": ("redis.cluster", "ClusterStore", ""),
    "rediss+cluster": ("redis.cluster", "ClusterStore", ""),
    "redis+sentinel": ("redis.sentinel", "SentinelStore", ""),
    "rediss+sentinel": ("redis.sentinel", "SentinelStore", ""),
    "postgresql": ("postgres", "PostgresStore", "postgres"),
    "postgres": ("postgres", "PostgresStore", "postgres"),
    "sqlite": ("sqlite", "SqliteStore", ""),
    "dynamodb": ("dynamodb", "DynamoDBStore", "dynamodb"),
    # PostgreSQL or SQLite, where Django's settings have it.
    "django": ("django", "DjangoDatabase", "django"),
    # In front of any other scheme: cached+postgresql://...
    "cached": ("cached", "CachedStore", ""),
}


def open_store(url: str) -> Store:
    """Return the store that a URL names; nothing is connected yet.

    Arguments:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://`` or ``redis+sentinel://`` (the same with
            ``valkey``), ``postgresql://``, ``sqlite:///path``, ``django://alias``, ``dynamodb://table``,
            ``cached+postgresql://`` and the like, or ``memory://`` for one process; the guides list the options.

    Raises:
        ConfigurationError: it is no text, the scheme is unknown, the URL cannot be parsed, or a driver is not
            installed.
    """
    scheme = scheme_of(url)
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


def scheme_of(url: str) -> str:
    """Return how a URL of a store begins, as `SCHEMES` has it.

    Raises:
        ConfigurationError: it is no text, has no scheme, or an unknown one.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"Expected the URL of an idempotency store as a text, got {url!r}. Write redis://localhost/1, or "
            "sqlite:///path for a file."
        )
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if scheme.startswith("cached+"):
        scheme = "cached"
    if "://" not in url:
        raise ConfigurationError(
            "Expected the URL of an idempotency store, as redis://localhost/1, got "
            f"{hide_password(url)!r}, which has no scheme. {_with_scheme(hide_password(url.strip()))}"
        )
    if scheme not in SCHEMES:
        # Of two that are equally near, difflib takes the later in the alphabet: rediss+cluster:// for rediss+tls://.
        near = sorted(
            difflib.get_close_matches(scheme, SCHEMES), key=lambda name: (-_likeness(scheme, name), len(name))
        )
        hint = f"Did you mean {near[0]}://?" if near else "Write redis://localhost/1, or sqlite:///path for a file."
        raise ConfigurationError(
            f"Expected the URL of an idempotency store to begin with one of {_known_schemes()}, got "
            f"{hide_password(url)!r}. {hint}"
        )
    return scheme


def _known_schemes() -> str:
    return ", ".join(f"{name}://" for name in SCHEMES)


def _with_scheme(shown: str) -> str:
    """Return what to write instead of a URL that has no scheme."""
    name, _, rest = re.sub(r"^([\w+]+)//", r"\1:", shown).partition(":")  # redis//localhost
    if name.lower() in SCHEMES:
        meant = f"{name.lower()}://{rest.lstrip('/')}"
    elif shown.startswith(("/", ".")) or re.search(r"\.(db|sqlite3?)$", shown):
        meant = f"sqlite:///{shown}"
    else:
        meant = f"{'postgresql' if re.search(r':5432(/|$)', shown) else 'redis'}://{shown}"
    return f"Did you mean {meant}?" if shown else "Write redis://host:6379/1."


def unknown_parameter(url: str, name: str, known: Iterable[str], others: str) -> ConfigurationError:
    """Return the error for a parameter of a store's URL that nothing reads.

    Arguments:
        url: The URL.
        name: The parameter.
        known: The parameters that it may be a slip for.
        others: What there is, in a sentence, for a parameter that is like none of these.
    """
    expected = f"Expected parameters that a store like {hide_password(url)} has, got"
    if _may_be_secret(url.partition("?")[2], name):
        advice = "Write special characters of a password as %3F, %26 and so on."
        return ConfigurationError(f"{expected} one that may be a part of a password. {others} {advice}")
    near = difflib.get_close_matches(name, list(known), n=1)
    return ConfigurationError(f"{expected} {name!r}. {f'Did you mean {near[0]}?' if near else others}")


def _may_be_secret(query: str, name: str) -> bool:
    """Return whether the name of a parameter may be the rest of a password with an unescaped ``?`` or ``&`` in it."""
    names = [each for each, _ in parse_qsl(query, keep_blank_values=True)]
    if name not in names:  # given by code
        return False
    before = names[: names.index(name)]
    return not re.fullmatch("[a-z_]+", name) or "@" in query or any("pass" in each for each in before)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()
