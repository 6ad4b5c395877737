"""Durations, sizes, URLs and texts from elsewhere, as people write and read them."""

from __future__ import annotations

import re
from datetime import timedelta

from .errors import ConfigurationError

Duration = float | str | timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WORDS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_LETTERS = (("d", 86400, 36 * 3600), ("h", 3600, 90 * 60), ("m", 60, 90))
_SIZES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_CENTURY = 36525 * 86400.0  # a longer duration is a slip of the unit, and more than some stores' clocks can hold


def parse_duration(value: object, option: str, *, least: float = 0.001) -> float:
    """Return a duration in seconds.

    ``value`` is a number of seconds, a `timedelta`, or text such as "90s", "15m", "24h", "7d", "500ms"; ``option`` its
    name in the error; ``least`` the shortest that is fit, in seconds (default: a millisecond).
    Raises ConfigurationError for anything else, and for what is below ``least`` or above 100 years.
    """
    seconds = -1.0
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str) and (match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(ms|s|m|h|d)", value.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    if least <= seconds <= _CENTURY:
        return float(seconds)
    raise unfit(option, f"a duration from {least:g} s to 100 years", value, 'write 90, timedelta(...), "90s" or "24h"')


def format_duration(seconds: float) -> str:
    """Return a duration in its largest unit: 90 -> "2 min", 0.04 -> "0.04 s"."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.001 else "0 s"
    unit, size = next((unit, size) for unit, size in _WORDS if seconds >= size * 1.5 or size == 1)
    return f"{seconds / size:.0f} {unit}"


def shorten_duration(seconds: float) -> str:
    """Return a duration for a table, in the unit that shows most in two digits, rounded down: 54s, 12m, 3h, 2d."""
    letter, size = next(((letter, size) for letter, size, least in _LETTERS if seconds >= least), ("s", 1))
    return f"{int(seconds // size):,}{letter}"


def format_size(count: float) -> str:
    """Return a number of bytes in its largest unit: 17 B, 1.2 MiB."""
    unit, size = next((each for each in reversed(_SIZES.items()) if count >= each[1]), ("B", 1))
    return f"{count / size:.1f} {unit}" if size > 1 else f"{count:.0f} B"


def parse_size(value: object, option: str) -> int:
    """Return a size in bytes, given as an int >= 0 or as text such as "64KiB"; raise ConfigurationError otherwise."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,15}) ?(B|KiB|MiB|GiB)", value.strip())):
        return int(match[1]) * _SIZES[match[2]]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise unfit(option, "a size >= 0", value, 'write a number of bytes, "64KiB" or "1MiB"')


def unfit(option: str, expected: str, got: object, hint: str) -> ConfigurationError:
    """Return the error for an option's value, which names the option, the wish, the value and the advice."""
    shown = hide_password(got) if isinstance(got, str) and "://" in got else got
    return ConfigurationError(f"{option}: expected {expected}, got {shown!r}: {hint}")


#: Matches an option of a store's URL whose value may have an "@".
_MAY_HAVE_AT = re.compile("(cache|(sentinel_)?(username|password))=").match


def hide_password(url: str) -> str:
    """Return the URL fit for a log: without credentials and without its query, which may hold them too."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    base, _, query = rest.partition("?")
    with_at = [option for option in query.split("&") if "@" in option]
    if with_at and not ("@" in base and all(map(_MAY_HAVE_AT, with_at))):  # the base may be a part of a password
        return f"{scheme}{separator}***"
    _, at, host = base.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{host}"


def masked(url: str) -> str:
    """Return a URL without the name and password in it."""
    return re.sub(r"//[^/]*@", "//***@", url)


def clean(text: str) -> str:
    """Return a text that does to a terminal what it looks like: a text from elsewhere may hold its commands."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
