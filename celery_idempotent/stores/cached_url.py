"""The URL of a cached store, taken apart: the durable store's, the cache's, and what is said of the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import unquote

from ..errors import ConfigurationError
from ..policy import parse_duration
from . import SCHEMES, hide_password, unknown_parameter

__all__ = ["MAX_AGE", "CachedUrl"]

#: Longest time in seconds that an outcome is answered from the cache, where nobody says otherwise.
MAX_AGE = 3600.0

MARK = "cached+"
#: The parameter of this store's own, and how alike another one is that is a slip for it.
AGE, ALIKE = "max_age", 0.75
LIKE = "cached+postgresql://app@db/shop?cache=redis://cache:6379/0"


@dataclass(frozen=True, slots=True)
class CachedUrl:
    """What a URL says: the store behind the cache, the cache, and for how many seconds it answers."""

    durable: str
    cache: str
    max_age: float

    @classmethod
    def of(cls, url: str) -> CachedUrl:
        """Take a URL apart.

        Raises:
            ConfigurationError: it does not begin with ``cached+``, or does not end with ``cache=`` and a Redis URL.
        """
        if not url.lower().startswith(MARK):
            raise _unlike(url, "it does not begin with cached+ and the scheme of the durable store")
        base, _, query = url[len(MARK) :].partition("?")
        # Whatever follows is the cache's, so that its own & and ? need no escaping.
        options, *caches = re.split(r"(?:^|&)cache=", query, maxsplit=1)
        cache = caches[0] if caches else ""
        if "://" not in cache:
            cache = unquote(cache)
        if not caches or not _is_redis(cache):
            raise _unlike(url, "it does not end with cache= and the URL of a Redis")
        if re.search(r"[?&]max_age=", cache):
            raise _unlike(url, "max_age= comes after cache=, whose URL ends the whole: write it before")
        said = [part for part in options.split("&") if part]
        for name in (part.partition("=")[0] for part in said):
            if name != AGE and get_close_matches(name, [AGE], cutoff=ALIKE):
                raise unknown_parameter(url, name, [AGE], "")
        ages = [part.partition("=")[2] for part in said if part.startswith("max_age=")]
        rest = "&".join(part for part in said if not part.startswith("max_age="))
        durable = f"{base}?{rest}" if rest else base
        return cls(durable, cache, _seconds(unquote(ages[-1])) if ages else MAX_AGE)


def _seconds(said: str) -> float:
    return parse_duration(float(said) if said.isdecimal() else said, "max_age")


def _is_redis(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return bool(separator) and SCHEMES.get(scheme.lower(), ("",))[0] == "redis"


def _unlike(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected the URL of a cached store to be like {LIKE} "
        f"(max_age=15m may stand before cache=), got {hide_password(url)!r}: {why}."
    )
