"""Where a result is that is too large for its record: what the record says of it, and who keeps it.

A record refers to a result by one of ::

    task:<task id>                               the framework has it, under the id of the run that made it
    <prefix>/<name>#bytes=<size>&sha256=<hex>    a file has its payload

The prefix is for people, without its password. Who reads looks for the name below the prefix that it is configured
with: nothing is opened because a record says so, and files may move together with the setting.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from .payloads import Payload

__all__ = ["NAME", "TASK", "Annex", "FileReference", "Origin", "Unkept", "masked", "name_of"]

#: How a reference begins that names a task.
TASK = "task:"
#: What files are called: half a digest of the key, the fence, something random.
NAME = re.compile(r"[0-9a-f]{32}-[0-9]+-[0-9a-f]{16}\.result")

_REFERENCE = re.compile(rf"(?P<prefix>.*)/(?P<name>{NAME.pattern})#bytes=(?P<size>[0-9]+)&sha256=(?P<digest>[0-9a-f]+)")


class Unkept(Exception):
    """Raised by an `Annex` that does not keep a result; its text says why, or is empty where none was asked to."""


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


class Annex(ABC):
    """Keeps the payloads that are too large for their records."""

    @abstractmethod
    def keep(self, content: bytes, origin: Origin) -> str:
        """Keep a payload and return a reference to it.

        Raises:
            Unkept: it is not kept, and why.
            Exception: it could not be kept.
        """

    @abstractmethod
    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        """Return what a reference leads to; a payload that says why where that is gone for good.

        Arguments:
            reference: What `keep` returned, in this process or another one.
            decode: Reads a payload.
            age: Seconds since the record was settled.

        Raises:
            StoreUnreachable: nobody can tell at the moment.
            StoreRefused: reading it is not allowed.
            RecordUnreadable: it was written by a newer version.
        """


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
        """Return what a record says as a reference; None if it is none of this version."""
        match = _REFERENCE.fullmatch(text)
        return None if match is None else cls(match["prefix"], match["name"], int(match["size"]), match["digest"])

    @property
    def url(self) -> str:
        """The file as people would call it."""
        return f"{self.prefix}/{self.name}"

    def fits(self, content: bytes) -> bool:
        """Tell whether this is what was written."""
        return hashlib.sha256(content).hexdigest() == self.digest

    def __str__(self) -> str:
        return f"{self.url}#bytes={self.size}&sha256={self.digest}"


def name_of(origin: Origin) -> str:
    """Return a file's name for the payload of a run, another one each time: no two writers ever share a file."""
    digest = hashlib.sha256(origin.key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{digest}-{origin.fence}-{secrets.token_hex(8)}.result"


def masked(url: str) -> str:
    """Return a URL without the name and password in it."""
    return re.sub(r"//[^/]*@", "//***@", url)
