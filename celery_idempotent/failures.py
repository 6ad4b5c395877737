"""Exceptions as data: described where they are remembered, made again only from classes that the caller names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.exceptions import DecodeError, EncodeError

from .errors import PreviouslyFailed

__all__ = ["checked", "described", "rebuilt", "shown"]

_LONGEST_TEXT = 2000
_LONGEST_REASON = 200
_LONGEST_TYPE = 500


def described(exc: BaseException) -> dict[str, Any]:
    """Return the type and the text of an exception, both of bounded length."""
    return {"type": _type_name(type(exc)), "text": _text(exc)}


def checked(data: object) -> dict[str, object]:
    """Return a description if it is one; raise ValueError if it is not."""
    if isinstance(data, dict) and isinstance(data.get("type"), str) and isinstance(data.get("text"), str):
        return data
    raise ValueError("its exception is not described by type and text")


def rebuilt(data: Mapping[str, Any], allowed: tuple[type[BaseException], ...]) -> BaseException:
    """Make the exception that a description is of, of the class among ``allowed`` that has its module and name.

    Returns `PreviouslyFailed` with type and text where no class has, or where it does not take the arguments.
    """
    name, args = data["type"], data.get("args")
    for cls in allowed:
        if isinstance(args, list) and _type_name(cls) == name:
            try:
                exc = cls(*args)
                # A constructor that changes its arguments, or makes another class, would tell another story.
                if type(exc) is cls and list(exc.args) == args:
                    return exc
            except Exception:  # noqa: BLE001, S110 - a constructor that takes something else
                pass
    return PreviouslyFailed(
        f"This operation failed for good with {name}: {data['text']}. To have the exception itself raised, "
        "name its very class in remember_failures, and let its constructor take its args"
    )


def shown(exc: BaseException) -> str:
    """Return an exception in a few words; of one that kombu wraps, what the serializer raised."""
    cause = exc.args[0] if isinstance(exc, (EncodeError, DecodeError)) and exc.args else exc
    return f"{type(cause).__name__}: {_text(cause)[:_LONGEST_REASON]}"


def _text(exc: BaseException) -> str:
    try:
        # Some serializers refuse surrogates.
        return str(exc)[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - the text of an exception is the user's code
        return "(its text cannot be shown)"


def _type_name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"[:_LONGEST_TYPE]
