"""Payloads: a return value or an exception as the bytes that a record keeps, and back.

A payload is bytes, an envelope and what it holds::

    json:42                        a value, by the name of its serializer
    json+zlib:<bytes>              the same, compressed
    !reference:<where>             a value that is elsewhere, see `file_results`
    !unavailable:<why>             done, without a value
    !ignored:<id>                  ended by Ignore; a result may be found under the id
    !replaced:<n>:<id>             replaced by others, after n replacements; their result may be found under the id
    !exception:json:{"type": ..}   failed for good; the exception's type, text and arguments

Every value has a tag, so that None, False, 0 and "" are values. Serializers, compression and content types are kombu's.
What `Codec.decode` returns is what the serializer reads back, just as a consumer of Celery's result backend got it
from the first run: a tuple comes back as the list that JSON makes of it. What the serializer writes and cannot read
back is not kept. Exceptions are described, never pickled; one is made again only from a class that the caller names,
and nothing is imported by a name found in the store.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote

from ..errors import ConfigurationError, PreviouslyFailed, RecordUnreadable, StoreError
from ..units import masked
from . import compression as compressions
from . import keys
from .serialization import serialization

logger = logging.getLogger("celery_idempotent")

_UNAVAILABLE = b"!unavailable:"
_REFERENCE = b"!reference:"
_IGNORED = b"!ignored:"
_REPLACED = b"!replaced:"
_EXCEPTION = b"!exception:"
#: JSON of so many lists and mappings may be nested more deeply than it can be read.
_DEEP = 200
#: Characters of an exception's text where all of it does not fit.
_SHORT_TEXT = 200


class Codec:
    """Write and read payloads with one serializer and one compression of kombu's.

    ``accept`` are names or content types of the serializers that may be read (default: only ``serializer``).
    ``compress_above`` and ``result_max_bytes`` are bytes; ``compression`` "none" compresses nothing. ``storage`` keeps
    what is larger than ``result_max_bytes`` (default: None, such values are not kept). ``largest`` are the bytes that a
    result may have before it is compressed. ``prepare`` makes of a value what is written in its place (default: None,
    the value itself). A codec may be used from several threads.
    Raises ConfigurationError for a serializer or a compression that kombu does not have.
    """

    def __init__(
        self,
        *,
        serializer: str = "json",
        accept: Collection[str] | None = None,
        compress_above: int,
        result_max_bytes: int,
        compression: str = "zlib",
        storage: ResultStorage | None = None,
        largest: int = compressions.LARGEST,
        prepare: Callable[[object], object] | None = None,
    ) -> None:
        try:
            self._accept = serialization.accepted([serializer] if accept is None else accept)
            self._content_type = serialization.content_types[serializer]
            serialization.dumps(None, serializer)
            if compressions.missing(compression):
                raise KeyError(compression)
        except serialization.missing as exc:
            raise ConfigurationError(
                f"Expected serializers and a compression that kombu has, got serializer={serializer!r}, "
                f"accept={accept!r}, compression={compression!r} ({exc}): correct the name or install what it needs"
            ) from exc
        self._serializer = serializer
        self._compression = compression
        self._compress_above = compress_above if compression != compressions.NONE else float("inf")
        self._max = result_max_bytes
        self._largest = largest
        self._storage = storage
        self._prepare = prepare
        self._head = f"{quote(serializer, safe='')}:".encode()
        #: what most tasks return, as JSON writes it
        self._nothing = self._head + b"null" if serializer == "json" and result_max_bytes >= len(b"null") else b""
        self._compressed_head = f"{quote(serializer, safe='')}+{quote(compression, safe='')}:".encode()

    def encode_value(self, value: object, *, store_result: bool = True, origin: Origin | None = None) -> bytes:
        """Write the value that an operation returned, or where it is, or why it is not kept; raises nothing.

        Without ``store_result`` (default: True), above ``result_max_bytes`` where no storage keeps it, and where the
        serializer refuses the value or cannot read back what it wrote, the payload holds the reason. ``origin`` is the
        run that returned the value (default: None, no storage is used).
        """
        if not store_result:
            return _UNAVAILABLE + b"store_result is off"
        if value is None and self._nothing:
            return self._nothing
        why = ""
        for _ in range(2):  # what rings here once, as a time limit may anywhere, is no fault of the value
            try:
                head, body, fits = self._written(value, bool(self._storage and origin))
                break
            except Exception as exc:  # noqa: BLE001 - whatever the serializer raises, the operation is done
                why = shown(exc)
        else:
            return _unavailable(f"the result cannot be serialized as {self._serializer}: {why}")
        return head + body if fits else self._elsewhere(head + body, len(body), origin)

    def encode_ignored(self, reference: str = "", nesting: int | None = None) -> bytes:
        """Write that an operation ended without a result of its own.

        ``reference`` is an id under which another result can be found (default: none); ``nesting`` how often it had
        been replaced before others replaced it (default: None, they did not).
        """
        head = _IGNORED if nesting is None else b"%b%d:" % (_REPLACED, nesting)
        return head + reference.encode("utf-8", "surrogatepass")

    def encode_unavailable(self, reason: str) -> bytes:
        """Write that an operation is done, and why its value is not kept."""
        return _unavailable(reason)

    def encode_exception(self, exc: BaseException) -> bytes:
        """Write the type, text and arguments of an exception; what cannot be kept of them is left out.

        Raises nothing. Arguments are left out first, then the text is cut, and where ``result_max_bytes`` does not even
        leave room for the type, or the serializer for a mapping, the payload is that of a value that is not kept.
        """
        description = described(exc)
        tries = [description, {**description, "text": description["text"][:_SHORT_TEXT]}]
        if not any(isinstance(argument, BaseException) for argument in exc.args):
            tries.insert(0, {**description, "args": list(exc.args)})
        for description in tries:
            try:
                head, body = self._pack(description)
                if len(body) <= self._max:
                    self._read_back(head, body, thoroughly=True)  # what cannot be read would hide type and text
                    return _EXCEPTION + head + body
                why = f"it has {len(body)} bytes, result_max_bytes is {self._max}"
            except Exception as error:  # noqa: BLE001 - the arguments are the user's objects; type and text remain
                why = shown(error)
        return _unavailable(f"{description['type']}, whose description is not kept: {why}")

    def decode(self, payload: bytes, *, age: float = float("inf")) -> Payload:
        """Read a payload, and what it refers to.

        Content of a type that is not accepted is not read: the payload is `Kind.UNAVAILABLE`, with the reason. ``age``
        are the seconds since it was settled (default: long ago).
        Raises RecordUnreadable for what is damaged, or was written by a newer version or an unknown serializer, and
        StoreUnreachable or StoreRefused where what it refers to cannot be had now.
        """
        raw = bytes(payload)
        try:
            read: Payload = _twice(self._read, raw, age)
        except serialization.not_accepted as exc:
            return Payload(Kind.UNAVAILABLE, reason=str(exc))
        except StoreError:
            raise
        except Exception as exc:
            if MemoryError in (type(exc), type(exc.__cause__)):  # the latter of kombu's DecodeError
                raise RecordUnreadable(
                    f"Expected the memory to read a payload of {len(raw)} bytes, got {shown(exc)}: give this process "
                    "more memory. The record is whole: do not forget its key"
                ) from exc
            raise RecordUnreadable(
                f"Expected a payload of this version, got {raw.partition(b':')[0][:40]!r}: ({shown(exc)}). "
                "Upgrade this worker if others run a newer version, install what reads it, bring back the class it "
                "names, or forget the key: its operation then runs again"
            ) from exc
        return read

    def _read(self, raw: bytes, age: float) -> Payload:
        if not raw.startswith(b"!"):
            return Payload(Kind.VALUE, self._unpack(raw))
        if raw.startswith(_UNAVAILABLE):
            return Payload(Kind.UNAVAILABLE, reason=raw[len(_UNAVAILABLE) :].decode())
        if raw.startswith(_IGNORED):
            return Payload(Kind.IGNORED, reason=raw[len(_IGNORED) :].decode("utf-8", "surrogatepass"))
        if raw.startswith(_REPLACED):
            nesting, _, reference = raw[len(_REPLACED) :].decode("utf-8", "surrogatepass").partition(":")
            return Payload(Kind.IGNORED, int(nesting), reference)
        if raw.startswith(_EXCEPTION):
            return Payload(Kind.EXCEPTION, checked(self._unpack(raw[len(_EXCEPTION) :])))
        if raw.startswith(_REFERENCE):
            return self._follow(raw[len(_REFERENCE) :].decode(), age)
        raise ValueError("its kind is not known")

    def rebuild_exception(self, payload: Payload, allowed: tuple[type[BaseException], ...]) -> BaseException:
        """Make the exception that a payload describes, of the class among ``allowed`` that has its module and name.

        Returns `PreviouslyFailed` with type and text where no class has, or where it does not take the arguments.
        """
        if payload.kind is Kind.EXCEPTION and isinstance(payload.data, dict):
            return rebuilt(payload.data, allowed)
        got = payload.reason or f"a payload of kind {payload.kind}"
        return PreviouslyFailed(f"Expected the exception of what failed for good, got {got}: look into the first log")

    def _written(self, value: object, elsewhere: bool) -> tuple[bytes, bytes, bool]:
        """Return a value as it is kept, and whether its record has room for it; raise what a reader would meet."""
        head, body = self._pack(value if self._prepare is None else self._prepare(value))
        fits = len(body) <= self._max
        if fits or elsewhere:
            self._read_back(head, body)
        return head, body, fits

    def _elsewhere(self, content: bytes, size: int, origin: Origin | None) -> bytes:
        why = f"the result has {size} bytes, result_max_bytes is {self._max}"
        if self._storage is None or origin is None:
            return _unavailable(why)
        try:
            return _REFERENCE + bytes(_twice(self._storage.keep, content, origin).encode())
        except NotStored as exc:
            return _unavailable(f"{why}{', and ' * bool(str(exc))}{exc}")
        except Exception as exc:  # noqa: BLE001 - a storage may raise anything, the operation is done
            why = f"{why}, and it could not be kept elsewhere: {masked(shown(exc))}"
            logger.error("The result of %s is not kept: %s", origin.key, why)
            return _unavailable(why)

    def _follow(self, reference: str, age: float) -> Payload:
        if self._storage is None:
            return Payload(Kind.UNAVAILABLE, reason=f"it is at {reference}, and nothing here can read that")

        def decode(content: bytes) -> Payload:
            if content.startswith(b"!"):
                raise ValueError("what it refers to is no value")
            return self.decode(content)

        return self._storage.read(reference, decode, age)

    def _pack(self, value: object) -> tuple[bytes, bytes]:
        content = serialization.dumps(value, self._serializer)
        body = content.encode() if isinstance(content, str) else content
        if not body:
            raise ValueError("it writes nothing, which looks like a damaged record")
        if len(body) > self._largest:
            raise ValueError(f"it has {len(body)} bytes, of which no more than {self._largest} are ever kept")
        if len(body) > self._compress_above:
            compressed = compressions.compress(body, self._compression)
            if len(self._compressed_head) + len(compressed) < len(self._head) + len(body):
                return self._compressed_head, compressed
        return self._head, body

    def _read_back(self, head: bytes, body: bytes, *, thoroughly: bool = False) -> None:
        """Raise what a duplicate would meet that reads this: to settle it would have every one of them fail."""
        plain = self._serializer == "json" and head is self._head and not thoroughly
        # Of JSON only the marks of kombu, and what is deeply nested, may not be read back.
        if plain and b'"__type__"' not in body and body.count(b"[") + body.count(b"{") < _DEEP:
            return
        if self._content_type in self._accept:
            self._unpack(head + body)

    def _unpack(self, payload: bytes) -> object:
        head, colon, body = payload.partition(b":")
        if not colon or not body:  # kombu would hand an empty body out as it is
            raise ValueError("it has no envelope or no content")
        serializer, plus, compression = head.decode("ascii").partition("+")
        content_type = serialization.content_types[unquote(serializer)]
        if plus and content_type in self._accept:
            body = compressions.decompress(body, unquote(compression), self._largest)
        return serialization.loads(body, content_type, self._accept)


def _twice(call: Callable[..., Any], *args: object) -> Any:
    """Call, and once more if that failed: a soft time limit ends it wherever it is, and comes once."""
    try:
        return call(*args)
    except (OSError, NotStored, StoreError):  # no signal's; and a place that is down would keep us waiting twice
        raise
    except Exception:  # noqa: BLE001 - what the value itself is at fault for is raised again
        return call(*args)


def _unavailable(reason: str) -> bytes:
    return _UNAVAILABLE + reason.encode("utf-8", "backslashreplace")


def why_unavailable(payload: bytes) -> str:
    """Return why a settled payload has no value, as its writer gave it; "" if it has one, or is of another kind."""
    reason = payload.removeprefix(_UNAVAILABLE)
    return reason.decode("utf-8", "replace") if reason != payload else ""


class Kind(str, Enum):
    """The kinds of payloads."""

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
    ``reason`` is why a value is unavailable; of an ignored operation it is the id of another result, or "".
    """

    kind: Kind
    data: object = None
    reason: str = ""


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
                # A constructor that changes its arguments, or makes another class, would make another error.
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
    cause = exc.args[0] if isinstance(exc, serialization.wrappers) and exc.args else exc
    return f"{type(cause).__name__}: {_text(cause)[:_LONGEST_REASON]}"


def _text(exc: BaseException) -> str:
    try:
        # Some serializers refuse surrogates.
        return str(exc)[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - the text of an exception is the user's code
        return "(its text cannot be shown)"


def _type_name(cls: type[BaseException]) -> str:
    return f"{keys.module_of(cls)}:{cls.__qualname__}"[:_LONGEST_TYPE]


class NotStored(Exception):
    """Raised by a `ResultStorage` that does not keep a result; its text is the reason, "" where none was wanted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which run a result is of.

    Arguments:
        key: The operation.
        fence: The fence of its lease.
        task_id: The message that it answers.
        published: Whether the framework will keep the value under the task id, where others can read it.
    """

    key: str
    fence: int
    task_id: str = ""
    published: bool = False


class ResultStorage(ABC):
    """Keeps the payloads that are too large for their records."""

    @abstractmethod
    def keep(self, content: bytes, origin: Origin) -> str:
        """Keep a payload and return a reference to it.

        Raises:
            NotStored: it is not kept, and why.
            Exception: it could not be kept.
        """

    @abstractmethod
    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        """Return what a reference leads to; a payload with the reason where that is gone for good.

        Arguments:
            reference: What `keep` returned, in this process or another one.
            decode: Reads a payload.
            age: Seconds since the record was settled.

        Raises:
            StoreUnreachable: it cannot be reached at the moment.
            StoreRefused: reading it is not allowed.
            RecordUnreadable: it was written by a newer version.
        """
