"""Bytes <-> fewer bytes: kombu's compressions, read back with a bound on what comes out.

A few compressed bytes can stand for more than a worker's memory holds. Of the known compressions no more than the bound
is ever inflated, of brotli little more; what only kombu knows is measured afterwards. zstd is read and written by
whichever package is there: Python's own module, ``backports.zstd`` or ``zstandard``; kombu's releases differ in which
of them they look for, and those that share one object of ``zstandard`` between threads must not be used by threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from .serialization import serialization

#: The name that stands for no compression.
NONE = "none"
#: Most bytes that a result may have before it is compressed, and so the most that are ever inflated.
LARGEST = 128 * 1024**2
#: Most bytes of memory that lzma may take for its dictionary.
DICTIONARY = 160 * 1024**2

ZSTD = frozenset({"zstd", "zstandard", "application/zstd"})
ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")
#: kombu's name for brotli, and the packages that read its streams.
BROTLI, BROTLI_MODULES = "application/x-brotli", ("brotli", "brotlicffi")
#: Bytes of it that are read at once: all that comes of them is given out, which may be 17 MB for each 13 bytes.
PIECE = 32
#: What brings a compression that is not installed.
INSTALL = dict.fromkeys(ZSTD, '"celery-idempotent[zstd]"') | {"brotli": "brotli"}

# One stream that stops at the bound, by the content type under which kombu has the compression.
_STREAMS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": lambda: import_module("bz2").BZ2Decompressor(),
    "application/x-lzma": lambda: import_module("lzma").LZMADecompressor(memlimit=DICTIONARY),
}


def known() -> list[str]:
    """Return the names to choose from, of what is installed here, sorted."""
    names = [name for name in ("brotli", "bzip2", "lzma", "zlib", "zstd") if not missing(name)]
    return [*names, NONE]


def missing(name: str) -> str:
    """Return what `pip install` would have to install for a compression to work here.

    Arguments:
        name: The compression, by any name that kombu has for it.

    Returns:
        "" if it works, "?" if nothing is known by that name.
    """
    if name == NONE or (name in ZSTD and _zstd() is not None):
        return ""
    try:
        serialization.compressor(name)
    except KeyError:
        return INSTALL.get(name, "?")
    return ""


def compress(body: bytes, name: str) -> bytes:
    """Return the bytes compressed; raise KeyError for a compression that is not here."""
    zstd = _zstd() if name in ZSTD else None
    if zstd is None:
        return serialization.compressor(name)[0](body)
    # An object of its own for every call: zstandard's may not be shared by threads.
    packed: bytes = zstd.ZstdCompressor().compress(body) if _is_zstandard(zstd) else zstd.compress(body)
    return packed


def decompress(body: bytes, name: str, limit: int = LARGEST) -> bytes:
    """Return the bytes as they were before `compress`.

    Arguments:
        body: What `compress` returned.
        name: The compression.
        limit: Most bytes to return.

    Raises:
        KeyError: the compression is not here.
        ValueError: it is more than ``limit``, or cut short, or followed by something else. The compression itself
            raises errors of its own.
    """
    zstd = _zstd() if name in ZSTD else None
    if zstd is None:
        content_type = serialization.compressor(name)[1]
        brotli = _first_of(BROTLI_MODULES) if content_type == BROTLI else None
        if brotli is not None:
            return _unbrotli(brotli, body, limit)
        if content_type not in _STREAMS:
            return _measured(serialization.decompressor(name)(body), limit)
        stream = _STREAMS[content_type]()
    elif _is_zstandard(zstd):
        return _unzstandard(zstd, body, limit)
    else:
        stream = zstd.ZstdDecompressor()
    content = _measured(stream.decompress(body, limit + 1), limit)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"it is no complete {name} stream")
    return content


def _measured(content: bytes, limit: int) -> bytes:
    if len(content) > limit:
        raise ValueError(f"it inflates to more than {limit} bytes")
    return content


def _unbrotli(brotli: Any, body: bytes, limit: int) -> bytes:
    """Return what a stream inflates to: only some versions of the packages have a limit of their own."""
    stream, parts, size = brotli.Decompressor(), [], 0
    for start in range(0, len(body), PIECE):
        part = stream.process(body[start : start + PIECE])
        size += len(part)
        if size > limit:
            raise ValueError(f"it inflates to more than {limit} bytes")
        parts.append(part)
    if not stream.is_finished():
        raise ValueError("it is no complete brotli stream")
    return b"".join(parts)


def _zstd() -> ModuleType | None:
    return _first_of(ZSTD_MODULES)


@cache
def _first_of(names: tuple[str, ...]) -> ModuleType | None:
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def _is_zstandard(module: ModuleType) -> bool:
    return module.__name__ == "zstandard"


def _unzstandard(zstd: Any, body: bytes, limit: int) -> bytes:
    size = zstd.frame_content_size(body)  # written by whatever compresses in one piece; else -1
    if size < 0:
        raise ValueError("it does not state how much it inflates to")
    if size > limit:
        raise ValueError(f"it inflates to more than {limit} bytes")
    content: bytes = zstd.ZstdDecompressor().decompress(body, allow_extra_data=False)
    return content
