"""Return value <-> payload: what a store keeps of how an operation ended.

A payload is bytes, an envelope and what it holds::

    json:42                        a value, by the name of its serializer
    json+zlib:<bytes>              the same, compressed
    !unavailable:<why>             done, without a value
    !ignored:<id>                  ended by Ignore or replace; a result may be found under the id
    !exception:json:{"type": ..}   failed for good; the exception's type, text and arguments

Every value has a tag, so that None, False, 0 and "" are values. Serializers, compression and content types are kombu's.
What `Codec.decode` returns is what the serializer reads back, just as a consumer of Celery's result backend got it
from the first run: a tuple comes back as the list that JSON makes of it. Exceptions are described, never pickled; one
is made again only from a class that the caller names, and nothing is imported by a name found in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote

from kombu import compression as kombu_compression
from kombu import serialization
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError, SerializerNotInstalled

from .errors import ConfigurationError, PreviouslyFailed, RecordUnreadable

__all__ = ["Codec", "Kind", "Payload"]

_UNAVAILABLE = b"!unavailable:"
_IGNORED = b"!ignored:"
_EXCEPTION = b"!exception:"
_LONGEST_REASON = 200
_LONGEST_TEXT = 2000

# kombu's functions carry no types.
_dumps: Callable[..., tuple[str, str, str | bytes]] = serialization.dumps
_loads: Callable[..., Any] = serialization.loads
_accepted: Callable[[Collection[str]], set[str]] = serialization.prepare_accept_content
_compress: Callable[[bytes, str], tuple[bytes, str]] = kombu_compression.compress
_decompress: Callable[[bytes, str], bytes] = kombu_compression.decompress


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

    ``data`` is the value, or the description of an exception: a dict with ``type``, ``text`` and perhaps ``args``.
    ``reason`` says why a value is unavailable; of an ignored operation it is the id of another result, or "".
    """

    kind: Kind
    data: object = None
    reason: str = ""


class Codec:
    """Write and read payloads with one serializer and one compression of kombu's.

    ``accept`` are names or content types of the serializers that may be read (default: only ``serializer``).
    ``compress_above`` and ``result_max_bytes`` are bytes. A codec may be used from several threads.
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
    ) -> None:
        try:
            self._accept = _accepted([serializer] if accept is None else accept)
            self._content_type: str = serialization.registry.name_to_type[serializer]
            _dumps(None, serializer=serializer)
            _compress(b"", compression)
        except (SerializerNotInstalled, KeyError, TypeError) as exc:
            raise ConfigurationError(
                f"Expected serializers and a compression that kombu has, got serializer={serializer!r}, "
                f"accept={accept!r}, compression={compression!r} ({exc}): correct the name or install what it needs"
            ) from exc
        self._serializer = serializer
        self._compression = compression
        self._compress_above = compress_above
        self._max = result_max_bytes
        self._head = f"{quote(serializer, safe='')}:".encode()
        self._compressed_head = f"{quote(serializer, safe='')}+{quote(compression, safe='')}:".encode()

    def encode_value(self, value: object, *, store_result: bool = True) -> bytes:
        """Write the value that an operation returned, or why it is not kept; raises nothing.

        Without ``store_result`` (default: True), above ``result_max_bytes``, and where the serializer refuses the
        value, the payload says so instead.
        """
        if not store_result:
            return _UNAVAILABLE + b"store_result is off"
        try:
            head, body = self._pack(value)
        except Exception as exc:  # noqa: BLE001 - whatever the serializer raises, the operation is done
            return _unavailable(f"the result cannot be serialized as {self._serializer}: {_described(exc)}")
        if len(body) > self._max:
            return _unavailable(f"the result has {len(body)} bytes, result_max_bytes is {self._max}")
        return head + body

    def encode_ignored(self, reference: str = "") -> bytes:
        """Write that an operation ended without a result of its own.

        ``reference`` is an id under which another result can be found (default: none).
        """
        return _IGNORED + reference.encode("utf-8", "surrogatepass")

    def encode_exception(self, exc: BaseException) -> bytes:
        """Write the type, text and arguments of an exception; arguments that cannot be kept are left out."""
        described = {"type": _type_name(type(exc)), "text": _text(exc)}
        try:
            head, body = self._pack({**described, "args": list(exc.args)})
            if len(body) <= self._max and not any(isinstance(argument, BaseException) for argument in exc.args):
                self._unpack(head + body)  # what cannot be read back would hide type and text
                return _EXCEPTION + head + body
        except Exception:  # noqa: BLE001, S110 - the arguments are the user's objects; type and text remain
            pass
        return _EXCEPTION + b"".join(self._pack(described))

    def decode(self, payload: bytes) -> Payload:
        """Read a payload.

        Content of a type that is not accepted is not read: the payload is `Kind.UNAVAILABLE`, and says so.
        Raises RecordUnreadable for what is damaged, or was written by a newer version or an unknown serializer.
        """
        raw = bytes(payload)
        try:
            if not raw.startswith(b"!"):
                return Payload(Kind.VALUE, self._unpack(raw))
            if raw.startswith(_UNAVAILABLE):
                return Payload(Kind.UNAVAILABLE, reason=raw[len(_UNAVAILABLE) :].decode())
            if raw.startswith(_IGNORED):
                return Payload(Kind.IGNORED, reason=raw[len(_IGNORED) :].decode("utf-8", "surrogatepass"))
            if raw.startswith(_EXCEPTION):
                return Payload(Kind.EXCEPTION, _checked(self._unpack(raw[len(_EXCEPTION) :])))
            raise ValueError("its kind is not known")
        except ContentDisallowed as exc:
            return Payload(Kind.UNAVAILABLE, reason=str(exc))
        except Exception as exc:
            raise RecordUnreadable(
                f"Expected a payload of this version, got {raw.partition(b':')[0][:40]!r}: ({_described(exc)}). "
                "Upgrade this worker if others run a newer version, install the serializer, or forget the key"
            ) from exc

    def rebuild_exception(self, payload: Payload, allowed: tuple[type[BaseException], ...]) -> BaseException:
        """Make the exception that a payload describes, of the class among ``allowed`` that has its module and name.

        Returns `PreviouslyFailed` with type and text where no class has, or where it does not take the arguments.
        """
        if payload.kind is not Kind.EXCEPTION or not isinstance(payload.data, dict):
            got = payload.reason or f"a payload of kind {payload.kind}"
            return PreviouslyFailed(
                f"Expected the exception of what failed for good, got {got}: look into the first log"
            )
        name, args = payload.data["type"], payload.data.get("args")
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
            f"This operation failed for good with {name}: {payload.data['text']}. To have the exception itself raised, "
            "name its very class in remember_failures, and let its constructor take its args"
        )

    def _pack(self, value: object) -> tuple[bytes, bytes]:
        content = _dumps(value, serializer=self._serializer)[2]
        body = content.encode() if isinstance(content, str) else content
        if not body:
            raise ValueError("it writes nothing, which cannot be told from a damaged record")
        if b'"__type__"' in body and self._serializer == "json":
            _loads(body, self._content_type, "utf-8", force=True)  # JSON writes marks that kombu cannot read
        if len(body) > self._compress_above:
            compressed = _compress(body, self._compression)[0]
            if len(self._compressed_head) + len(compressed) < len(self._head) + len(body):
                return self._compressed_head, compressed
        return self._head, body

    def _unpack(self, payload: bytes) -> object:
        head, colon, body = payload.partition(b":")
        if not colon or not body:  # kombu would hand an empty body out as it is
            raise ValueError("it has no envelope or no content")
        serializer, plus, compression = head.decode("ascii").partition("+")
        content_type = serialization.registry.name_to_type[unquote(serializer)]
        if plus and content_type in self._accept:
            body = _decompress(body, unquote(compression))
        return _loads(body, content_type, "utf-8", accept=self._accept)


def _unavailable(reason: str) -> bytes:
    return _UNAVAILABLE + reason.encode()


def _described(exc: BaseException) -> str:
    # kombu wraps what the serializer raised.
    cause = exc.args[0] if isinstance(exc, (EncodeError, DecodeError)) else exc
    return f"{type(cause).__name__}: {_text(cause)[:_LONGEST_REASON]}"


def _text(exc: BaseException) -> str:
    try:
        return (
            str(exc)[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
        )  # some serializers refuse surrogates
    except Exception:  # noqa: BLE001 - the text of an exception is the user's code
        return "(its text cannot be shown)"


def _type_name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _checked(data: object) -> dict[str, object]:
    if isinstance(data, dict) and isinstance(data.get("type"), str) and isinstance(data.get("text"), str):
        return data
    raise ValueError("its exception is not described by type and text")
