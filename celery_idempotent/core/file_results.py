"""Results in files: a large result in any place that fsspec reaches, and the reference that its record has.

A payload is written before its record is settled, so that a record never refers to what is not there, under a name that
no other run uses, so that no writer ever changes what another one's record refers to. What was written and not settled
(the lease was lost, the worker died in between), and what has outlived its record, is left to `sweep`, or to the
lifecycle rules of the place itself.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timezone
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigurationError, RecordUnreadable, StoreRefused, StoreUnreachable
from ..units import masked
from .results import Kind, Origin, Payload, ResultStorage

#: Seconds for one request to a place across the network; large results are slow, and the heartbeat goes on meanwhile.
PATIENCE = 30.0
#: Seconds that a file may be older than its record: between writing and settling, and for clocks that differ.
MARGIN = 3600.0


class FileResultStorage(ResultStorage):
    """Keeps payloads in files below a URL.

    Arguments:
        prefix: What fsspec opens, as "file:///var/results" or "s3://bucket/results".
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.rstrip("/")

    def keep(self, content: bytes, origin: Origin) -> str:
        """Write a payload to a file of its own, and return the reference to it."""
        name = name_of(origin)
        place, root = _opened(self._prefix)
        place.pipe_file(f"{root}/{name}", content, **_limits(place))
        return str(FileReference.to(self._prefix, name, content))

    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        """Read the payload of a file; it is unavailable where the file is gone, or is not what was written."""
        found = FileReference.parse(reference)
        if found is None:
            raise RecordUnreadable(
                f"Expected a reference to a file, got {reference[:40]!r}: upgrade this worker if others run a newer "
                "version, or forget the key"
            )
        content = self._content(found)
        if content is None:
            here = "" if found.prefix == masked(self._prefix) else f"; looked for it in {masked(self._prefix)}"
            return Payload(Kind.UNAVAILABLE, reason=f"its file {found.url} is gone{here}")
        if not found.fits(content):
            return Payload(Kind.UNAVAILABLE, reason=f"its file {found.url} is not what was written")
        return decode(content)

    def _content(self, found: FileReference) -> bytes | None:
        try:
            place, root = _opened(self._prefix)
            # One byte more than there should be: a file that has grown must not fill the memory.
            content: bytes = place.cat_file(f"{root}/{found.name}", start=0, end=found.size + 1, **_limits(place))
        except FileNotFoundError as error:
            if _is_local(place) and not place.isdir(root):  # perhaps not mounted
                raise self._unreachable(error) from error
            return None
        except PermissionError as error:
            raise StoreRefused(
                f"Expected to be allowed to read results in {masked(self._prefix)}, got {type(error).__name__}: give "
                "this worker the rights of those that write there"
            ) from error
        except Exception as error:
            raise self._unreachable(error) from error
        return content

    def _unreachable(self, error: Exception) -> StoreUnreachable:
        return StoreUnreachable(
            f"Expected to read a result in {masked(self._prefix)}, got {type(error).__name__}: the operation is done, "
            "and its result will be read once that place answers"
        )


def check_prefix(prefix: str) -> None:
    """Return if files can be kept below this URL, as far as is known without a request.

    Raises:
        ConfigurationError: fsspec, or what it needs for the URL, is not installed or not known.
    """
    try:
        from fsspec import available_protocols
        from fsspec.registry import known_implementations, registry
    except ImportError as error:
        raise ConfigurationError(
            f"large_results: expected fsspec to be installed for {masked(prefix)!r}: "
            'pip install "celery-idempotent[files]"'
        ) from error
    known = {*available_protocols(), *registry}
    for protocol in prefix.partition("://")[0].split("::"):
        if protocol not in known:
            close = get_close_matches(protocol, sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}://?" if close else "write file:// or s3://"
            raise ConfigurationError(f"large_results: expected a URL that fsspec knows, got {masked(prefix)!r}: {hint}")
        if protocol not in registry:
            needed = known_implementations[protocol]["class"].partition(".")[0]
            if find_spec(needed) is None:
                raise ConfigurationError(
                    f"large_results: expected what fsspec needs for {protocol}:// to be installed: pip install {needed}"
                )


def sweep(prefix: str, older_than: float) -> int:
    """Remove the files of results that no record refers to any more, and return how many.

    Arguments:
        prefix: The URL that ``large_results`` names.
        older_than: Seconds: the longest ``result_ttl`` of the tasks that write there. An hour is added, since a file
            is written before its record. Files of any other name than results have are left alone.

    Example::

        sweep("file:///var/results", older_than=7 * 86400)
    """
    place, root = _opened(prefix.rstrip("/"))
    try:
        listed = place.ls(root, detail=True, refresh=True)
    except FileNotFoundError:  # nothing was written yet
        return 0
    swept = 0
    for entry in listed:
        path = str(entry["name"])
        if NAME.fullmatch(path.rpartition("/")[2]) and _age(place, path) > older_than + MARGIN:
            try:
                place.rm_file(path)
            except FileNotFoundError:  # another sweep was here
                continue
            swept += 1
    return swept


def _age(place: Any, path: str) -> float:
    try:
        written = place.modified(path)
    except FileNotFoundError:
        return 0.0
    # Some file systems return UTC without a time zone.
    aware = written if written.tzinfo else written.replace(tzinfo=timezone.utc)
    return time.time() - float(aware.timestamp())


def _opened(prefix: str) -> tuple[Any, str]:
    """Return the file system and the path of a prefix; fsspec keeps one per process, also after a fork."""
    from fsspec.core import url_to_fs

    options = {"auto_mkdir": True} if prefix.startswith(("file://", "local://")) else {}
    place, root = url_to_fs(prefix, **options)
    return place, str(root).rstrip("/")


def _is_local(place: Any) -> bool:
    return "file" in ([place.protocol] if isinstance(place.protocol, str) else place.protocol)


def _limits(place: Any) -> dict[str, float]:
    return {"timeout": PATIENCE} if getattr(place, "async_impl", False) else {}


# Where a result is that is too large for its record: the reference in the record, and the storage that keeps it.
#
# A record refers to a result by one of ::
#
#     task:<task id>                               the framework has it, under the id of the run that made it
#     <prefix>/<name>#bytes=<size>&sha256=<hex>    a file has its payload
#
# The prefix is for people, without its password. A reader looks for the name below the prefix that it is configured
# with: nothing is opened because a record names it, and files may move together with the setting.


#: How a reference begins that names a task.
TASK = "task:"
#: What files are called: half a digest of the key, the fence, something random.
NAME = re.compile(r"[0-9a-f]{32}-[0-9]+-[0-9a-f]{16}\.result")

_REFERENCE = re.compile(rf"(?P<prefix>.*)/(?P<name>{NAME.pattern})#bytes=(?P<size>[0-9]+)&sha256=(?P<digest>[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class FileReference:
    """A payload in a file, and what is needed to know it again."""

    prefix: str
    name: str
    size: int
    digest: str

    @classmethod
    def to(cls, prefix: str, name: str, content: bytes) -> FileReference:
        """Return the reference to a payload that is, or will be, in the file ``name`` below ``prefix``."""
        return cls(masked(prefix), name, len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def parse(cls, text: str) -> FileReference | None:
        """Return the reference in a record; None if it is none of this version."""
        match = _REFERENCE.fullmatch(text)
        return None if match is None else cls(match["prefix"], match["name"], int(match["size"]), match["digest"])

    @property
    def url(self) -> str:
        """The file as people would call it."""
        return f"{self.prefix}/{self.name}"

    def fits(self, content: bytes) -> bool:
        """Return whether this is what was written."""
        return hashlib.sha256(content).hexdigest() == self.digest

    def __str__(self) -> str:
        return f"{self.url}#bytes={self.size}&sha256={self.digest}"


def name_of(origin: Origin) -> str:
    """Return a file's name for the payload of a run, another one each time: no two writers ever share a file."""
    digest = hashlib.sha256(origin.key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{digest}-{origin.fence}-{secrets.token_hex(8)}.result"
