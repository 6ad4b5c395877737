"""Serializers and compressions by name: kombu's, or the standard library's in a program without kombu.

Celery brings kombu, in which its users register their own types and serializers. A plain function or an RQ job may run
where neither is installed. Both write the same: JSON with kombu's marks for what JSON lacks, and pickle; so a process
with kombu reads what one without it has written.
"""

from __future__ import annotations

import bz2
import json
import lzma
import pickle
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

Compressor = tuple[Callable[[bytes], bytes], str]
Decompressor = Callable[[bytes], bytes]

JSON, PICKLE = "application/json", "application/x-python-serialize"


class NotAccepted(Exception):
    """Raised for content of a type that the reader does not accept."""


class StandardSerialization:
    """The standard library's serializers and compressions, by kombu's names and in kombu's form."""

    #: The errors for a serializer that is not here, or for what is no name.
    missing: tuple[type[Exception], ...] = (KeyError, TypeError)
    #: The errors that replace those of a serializer, which are their first argument.
    wrappers: tuple[type[Exception], ...] = ()
    not_accepted: type[Exception] = NotAccepted

    @property
    def content_types(self) -> dict[str, str]:
        """The content types of the serializers, by name."""
        return _CONTENT_TYPES

    def accepted(self, serializers: Collection[str]) -> set[str]:
        """Return the content types of serializers, by name or content type; raise KeyError for an unknown name."""
        return {name if "/" in name else self.content_types[name] for name in serializers}

    def dumps(self, value: object, serializer: str) -> str | bytes:
        """Write a value; raises what the serializer raises, and one of ``missing`` for one that is not here."""
        return self.to_json(value) if _CONTENT_TYPES[serializer] == JSON else pickle.dumps(value, protocol=4)

    def loads(self, body: bytes, content_type: str, accept: Collection[str]) -> Any:
        """Read what `dumps` wrote; raises ``not_accepted`` for a content type that is not in ``accept``."""
        if content_type not in accept:
            raise self.not_accepted(f"Expected content of the types {sorted(accept)}, got {content_type}")
        if content_type == JSON:
            return self.from_json(body.decode())
        return pickle.loads(body)  # noqa: S301 - the declaration of the function accepts it

    def reduce(self, value: Any) -> Any:
        """Return what JSON writes in place of a value that it lacks; raise TypeError where it has nothing."""
        if (method := getattr(value, "__json__", None)) is not None:
            return method()
        if _is_lazy_text(value):
            return str(value)
        for type_, mark, write in _WRITERS:
            if isinstance(value, type_):
                return _marked(mark, write(value))
        if isinstance(value, bytes):
            try:
                return _marked("bytes", value.decode())
            except UnicodeDecodeError:
                return _marked("base64", b64encode(value).decode())
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    def to_json(self, value: object) -> str:
        """Write a value as JSON, with marks for what JSON lacks."""
        return json.dumps(value, default=self.reduce)

    def from_json(self, text: str) -> Any:
        """Read JSON; raises ValueError for a mark that is not known."""
        return json.loads(text, object_hook=_read_mark)

    def compressor(self, name: str) -> Compressor:
        """Return what compresses, and its content type; raise KeyError for a compression that is not here."""
        content_type = _COMPRESSION_NAMES.get(name, name)
        return _COMPRESSIONS[content_type][0], content_type

    def decompressor(self, name: str) -> Decompressor:
        """Return what undoes a compression; raise KeyError for one that is not here."""
        return _COMPRESSIONS[_COMPRESSION_NAMES.get(name, name)][1]


class KombuSerialization(StandardSerialization):
    """Kombu's serializers and compressions, with the types that are registered there."""

    def __init__(self) -> None:
        from kombu import compression, exceptions, serialization
        from kombu.utils import json as kombu_json

        # kombu's functions carry no types.
        self._registry: Any = serialization.registry
        self._compression: Any = compression
        self._json: Any = kombu_json
        self._reduce: Callable[[Any], Any] = kombu_json.JSONEncoder().default
        self.missing = (KeyError, TypeError, exceptions.SerializerNotInstalled)
        self.wrappers = (exceptions.EncodeError, exceptions.DecodeError)
        self.not_accepted = exceptions.ContentDisallowed

    @property
    def content_types(self) -> dict[str, str]:
        """The content types of the serializers, by name."""
        return self._registry.name_to_type  # type: ignore[no-any-return]

    def dumps(self, value: object, serializer: str) -> str | bytes:
        """Write a value as kombu does; raises EncodeError with what the serializer raises."""
        return self._registry.dumps(value, serializer=serializer)[2]  # type: ignore[no-any-return]

    def loads(self, body: bytes, content_type: str, accept: Collection[str]) -> Any:
        """Read what `dumps` wrote; raises ContentDisallowed, and DecodeError with what the serializer raises."""
        return self._registry.loads(body, content_type, "utf-8", accept=accept)

    def reduce(self, value: Any) -> Any:
        """Return what kombu's JSON writes in place of a value; raise TypeError where it has nothing."""
        return self._reduce(value)

    def to_json(self, value: object) -> str:
        """Write a value as kombu's JSON."""
        return self._json.dumps(value)  # type: ignore[no-any-return]

    def from_json(self, text: str) -> Any:
        """Read kombu's JSON."""
        return self._json.loads(text)

    def compressor(self, name: str) -> Compressor:
        """Return what compresses, and its content type; raise KeyError for a compression that kombu lacks."""
        return self._compression.get_encoder(name)  # type: ignore[no-any-return]

    def decompressor(self, name: str) -> Decompressor:
        """Return what undoes a compression; raise KeyError for one that kombu lacks."""
        return self._compression.get_decoder(name)  # type: ignore[no-any-return]


_CONTENT_TYPES = {"json": JSON, "pickle": PICKLE}
_COMPRESSIONS: dict[str, tuple[Callable[[bytes], bytes], Decompressor]] = {
    "application/x-gzip": (zlib.compress, zlib.decompress),
    "application/x-bz2": (bz2.compress, bz2.decompress),
    "application/x-lzma": (lzma.compress, lzma.decompress),
}
_COMPRESSION_NAMES = {
    "zlib": "application/x-gzip",
    "gzip": "application/x-gzip",
    "bzip2": "application/x-bz2",
    "bzip": "application/x-bz2",
    "lzma": "application/x-lzma",
    "xz": "application/x-lzma",
}
# A datetime is a date, so it stands first.
_WRITERS: tuple[tuple[type, str, Callable[[Any], object]], ...] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", lambda value: value.isoformat()),
    (time, "time", lambda value: value.isoformat()),
    (Decimal, "decimal", str),
    (UUID, "uuid", lambda value: {"hex": value.hex}),
)
_READERS: dict[str, Callable[[Any], object]] = {
    "datetime": datetime.fromisoformat,
    "date": lambda text: datetime.fromisoformat(text).date(),
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda fields: UUID(**fields),
    "bytes": str.encode,
    "base64": b64decode,
}


def _marked(mark: str, content: object) -> dict[str, object]:
    return {"__type__": mark, "__value__": content}


def _read_mark(mapping: dict[str, Any]) -> Any:
    if mapping.keys() != {"__type__", "__value__"}:
        return mapping
    if mapping["__type__"] not in _READERS:
        raise ValueError(f"Expected a mark among {sorted(_READERS)}, got {mapping['__type__']!r}: kombu may know it")
    return _READERS[mapping["__type__"]](mapping["__value__"])


def _is_lazy_text(value: object) -> bool:
    """Return whether a value is one of Django's lazy translations; where Django is not loaded, there are none."""
    functional = sys.modules.get("django.utils.functional")
    return functional is not None and isinstance(value, functional.Promise)


def _installed() -> StandardSerialization:
    try:
        import kombu  # noqa: F401
    except ModuleNotFoundError:
        return StandardSerialization()
    return KombuSerialization()


#: Kombu's where it is installed.
serialization = _installed()
