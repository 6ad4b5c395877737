"""Return value <-> payload: what a store keeps of how an operation ended.

A payload is bytes, an envelope and what it holds::

    json:42                        a value, by the name of its serializer
    json+zlib:<bytes>              the same, compressed
    !reference:<where>             a value that is elsewhere, see `references`
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

from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote, unquote

from kombu import serialization
from kombu.exceptions import ContentDisallowed, SerializerNotInstalled

from . import compression as compressions
from . import failures
from .errors import ConfigurationError, PreviouslyFailed, RecordUnreadable, StoreError
from .payloads import Kind, Payload
from .references import Annex, Origin, Unkept, masked

__all__ = ["Codec", "Kind", "Payload"]

_UNAVAILABLE = b"!unavailable:"
_REFERENCE = b"!reference:"
_IGNORED = b"!ignored:"
_REPLACED = b"!replaced:"
_EXCEPTION = b"!exception:"
#: JSON of so many lists and mappings may be nested more deeply than it can be read.
_DEEP = 200
#: Characters of an exception's text where all of it does not fit.
_SHORT_TEXT = 200

# kombu's functions carry no types.
_dumps: Callable[..., tuple[str, str, str | bytes]] = serialization.dumps
_loads: Callable[..., Any] = serialization.loads
_accepted: Callable[[Collection[str]], set[str]] = serialization.prepare_accept_content


class Codec:
    """Write and read payloads with one serializer and one compression of kombu's.

    ``accept`` are names or content types of the serializers that may be read (default: only ``serializer``).
    ``compress_above`` and ``result_max_bytes`` are bytes; ``compression`` "none" compresses nothing. ``annex`` keeps
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
        annex: Annex | None = None,
        largest: int = compressions.LARGEST,
        prepare: Callable[[object], object] | None = None,
    ) -> None:
        try:
            self._accept = _accepted([serializer] if accept is None else accept)
            self._content_type: str = serialization.registry.name_to_type[serializer]
            _dumps(None, serializer=serializer)
            if compressions.missing(compression):
                raise KeyError(compression)
        except (SerializerNotInstalled, KeyError, TypeError) as exc:
            raise ConfigurationError(
                f"Expected serializers and a compression that kombu has, got serializer={serializer!r}, "
                f"accept={accept!r}, compression={compression!r} ({exc}): correct the name or install what it needs"
            ) from exc
        self._serializer = serializer
        self._compression = compression
        self._compress_above = compress_above if compression != compressions.NONE else float("inf")
        self._max = result_max_bytes
        self._largest = largest
        self._annex = annex
        self._prepare = prepare
        self._head = f"{quote(serializer, safe='')}:".encode()
        self._compressed_head = f"{quote(serializer, safe='')}+{quote(compression, safe='')}:".encode()

    def encode_value(self, value: object, *, store_result: bool = True, origin: Origin | None = None) -> bytes:
        """Write the value that an operation returned, or where it is, or why it is not kept; raises nothing.

        Without ``store_result`` (default: True), above ``result_max_bytes`` where no annex keeps it, and where the
        serializer refuses the value or cannot read back what it wrote, the payload says so instead. ``origin`` is the
        run that returned the value (default: None, no annex is asked).
        """
        if not store_result:
            return _UNAVAILABLE + b"store_result is off"
        try:
            head, body, fits = _twice(self._written, value, bool(self._annex and origin))
        except Exception as exc:  # noqa: BLE001 - whatever the serializer raises, the operation is done
            return _unavailable(f"the result cannot be serialized as {self._serializer}: {failures.shown(exc)}")
        return head + body if fits else self._elsewhere(head + body, len(body), origin)

    def encode_ignored(self, reference: str = "", nesting: int | None = None) -> bytes:
        """Write that an operation ended without a result of its own.

        ``reference`` is an id under which another result can be found (default: none); ``nesting`` how often it had
        been replaced before others replaced it (default: None, they did not).
        """
        head = _IGNORED if nesting is None else b"%b%d:" % (_REPLACED, nesting)
        return head + reference.encode("utf-8", "surrogatepass")

    def encode_exception(self, exc: BaseException) -> bytes:
        """Write the type, text and arguments of an exception; what cannot be kept of them is left out.

        Raises nothing. Arguments are left out first, then the text is cut, and where ``result_max_bytes`` does not even
        leave room for the type, or the serializer for a mapping, the payload is that of a value that is not kept.
        """
        described = failures.described(exc)
        tries = [described, {**described, "text": described["text"][:_SHORT_TEXT]}]
        if not any(isinstance(argument, BaseException) for argument in exc.args):
            tries.insert(0, {**described, "args": list(exc.args)})
        for description in tries:
            try:
                head, body = self._pack(description)
                if len(body) <= self._max:
                    self._read_back(head, body, thoroughly=True)  # what cannot be read would hide type and text
                    return _EXCEPTION + head + body
                why = f"it has {len(body)} bytes, result_max_bytes is {self._max}"
            except Exception as error:  # noqa: BLE001 - the arguments are the user's objects; type and text remain
                why = failures.shown(error)
        return _unavailable(f"{described['type']}, whose description is not kept: {why}")

    def decode(self, payload: bytes, *, age: float = float("inf")) -> Payload:
        """Read a payload, and what it refers to.

        Content of a type that is not accepted is not read: the payload is `Kind.UNAVAILABLE`, and says so. ``age`` are
        the seconds since it was settled (default: long ago).
        Raises RecordUnreadable for what is damaged, or was written by a newer version or an unknown serializer, and
        StoreUnreachable or StoreRefused where what it refers to cannot be had now.
        """
        raw = bytes(payload)
        try:
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
                return Payload(Kind.EXCEPTION, failures.checked(self._unpack(raw[len(_EXCEPTION) :])))
            if raw.startswith(_REFERENCE):
                return self._follow(raw[len(_REFERENCE) :].decode(), age)
            raise ValueError("its kind is not known")
        except ContentDisallowed as exc:
            return Payload(Kind.UNAVAILABLE, reason=str(exc))
        except StoreError:
            raise
        except Exception as exc:
            raise RecordUnreadable(
                f"Expected a payload of this version, got {raw.partition(b':')[0][:40]!r}: ({failures.shown(exc)}). "
                "Upgrade this worker if others run a newer version, install the serializer, or forget the key"
            ) from exc

    def rebuild_exception(self, payload: Payload, allowed: tuple[type[BaseException], ...]) -> BaseException:
        """Make the exception that a payload describes, of the class among ``allowed`` that has its module and name.

        Returns `PreviouslyFailed` with type and text where no class has, or where it does not take the arguments.
        """
        if payload.kind is Kind.EXCEPTION and isinstance(payload.data, dict):
            return failures.rebuilt(payload.data, allowed)
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
        if self._annex is None or origin is None:
            return _unavailable(why)
        try:
            return _REFERENCE + bytes(_twice(self._annex.keep, content, origin).encode())
        except Unkept as exc:
            return _unavailable(f"{why}{', and ' * bool(str(exc))}{exc}")
        except Exception as exc:  # noqa: BLE001 - an annex may raise anything, the operation is done
            return _unavailable(f"{why}, and it could not be kept elsewhere: {masked(failures.shown(exc))}")

    def _follow(self, reference: str, age: float) -> Payload:
        if self._annex is None:
            return Payload(Kind.UNAVAILABLE, reason=f"it is at {reference}, and nothing here can read that")

        def decode(content: bytes) -> Payload:
            if content.startswith(b"!"):
                raise ValueError("what it refers to is no value")
            return self.decode(content)

        return self._annex.read(reference, decode, age)

    def _pack(self, value: object) -> tuple[bytes, bytes]:
        content = _dumps(value, serializer=self._serializer)[2]
        body = content.encode() if isinstance(content, str) else content
        if not body:
            raise ValueError("it writes nothing, which cannot be told from a damaged record")
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
        content_type = serialization.registry.name_to_type[unquote(serializer)]
        if plus and content_type in self._accept:
            body = compressions.decompress(body, unquote(compression), self._largest)
        return _loads(body, content_type, "utf-8", accept=self._accept)


def _twice(call: Callable[..., Any], *args: object) -> Any:
    """Call, and once more if that failed: a soft time limit ends it wherever it is, and comes once."""
    try:
        return call(*args)
    except (OSError, Unkept):  # which no signal raises, and a place that is down would keep us waiting twice
        raise
    except Exception:  # noqa: BLE001 - what the value itself is at fault for is raised again
        return call(*args)


def _unavailable(reason: str) -> bytes:
    return _UNAVAILABLE + reason.encode("utf-8", "backslashreplace")
