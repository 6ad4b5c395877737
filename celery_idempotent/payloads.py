"""What a payload turns out to be when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Kind", "Payload"]


class Kind(str, Enum):
    """Say what a payload holds."""

    VALUE = "value"
    UNAVAILABLE = "unavailable"
    IGNORED = "ignored"
    EXCEPTION = "exception"

    __str__ = str.__str__  # Python 3.11 and 3.12 changed what an enum of str prints


@dataclass(frozen=True, slots=True)
class Payload:
    """Hold what was read from a payload.

    ``data`` is the value, or the description of an exception: a dict with ``type``, ``text`` and perhaps ``args``; or
    how often an ignored operation had been replaced before others replaced it, and None if they did not.
    ``reason`` says why a value is unavailable; of an ignored operation it is the id of another result, or "".
    """

    kind: Kind
    data: object = None
    reason: str = ""
