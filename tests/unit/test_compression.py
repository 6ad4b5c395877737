"""Fewer bytes, and no more bytes back than a worker has room for."""

from __future__ import annotations

import bz2
import lzma
import random
import tracemalloc
import zlib
from importlib import import_module
from typing import Any

import brotli
import pytest
from kombu import compression as registry

from celery_idempotent.core import compression
from celery_idempotent.core.serialization import serialization

NAMES = ["zlib", "bzip2", "lzma", "zstd", "gzip", "xz", "zstandard", "application/x-gzip", "brotli"]
NOISE = random.Random(5).randbytes(100_000)
LIMIT = 1024**2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("body", [b"", b"x", b"ab" * 10_000, NOISE], ids=["nothing", "a byte", "text", "noise"])
def test_what_was_compressed_comes_back(name: str, body: bytes) -> None:
    assert compression.missing(name) == ""
    packed = compression.compress(body, name)
    assert compression.decompress(packed, name) == body
    assert compression.decompress(packed, name, len(body)) == body


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_the_bound_is_inflated(name: str) -> None:
    bomb = compression.compress(bytes(5 * LIMIT), name)
    assert len(bomb) < LIMIT / 20
    with pytest.raises(ValueError, match=f"it inflates to more than {LIMIT} bytes"):
        compression.decompress(bomb, name, LIMIT)
    with pytest.raises(ValueError, match="it inflates to more than 19 bytes"):
        compression.decompress(compression.compress(bytes(20), name), name, 19)


@pytest.mark.parametrize("name", ["zlib", "bzip2", "lzma", "zstd"])
def test_what_is_refused_takes_no_memory(name: str) -> None:
    bomb = compression.compress(bytes(20 * LIMIT), name)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it inflates to more than"):
            compression.decompress(bomb, name, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 15 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: body[:9], lambda body: body + b"x"])
def test_what_is_cut_short_or_followed_by_something_is_refused(name: str, damage: Any) -> None:
    with pytest.raises(Exception, match=r"."):
        compression.decompress(damage(compression.compress(NOISE, name)), name)


@pytest.mark.parametrize(("name", "theirs"), [("zlib", zlib), ("bzip2", bz2), ("lzma", lzma)])
def test_others_can_read_what_is_written(name: str, theirs: Any) -> None:
    assert theirs.decompress(compression.compress(NOISE, name)) == NOISE
    assert registry.decompress(compression.compress(NOISE, name), name) == NOISE


def test_a_compression_that_only_kombu_knows_is_measured_afterwards() -> None:
    registry.register(lambda body: body[::-1], lambda body: body[::-1], "application/x-reverse", ["reverse"])
    try:
        assert compression.missing("reverse") == ""
        assert compression.compress(b"abc", "reverse") == b"cba"
        assert compression.decompress(b"cba", "reverse") == b"abc"
        with pytest.raises(ValueError, match="it inflates to more than 2 bytes"):
            compression.decompress(b"cba", "reverse", 2)
    finally:
        del registry._encoders["application/x-reverse"], registry._decoders["application/x-reverse"]
        del registry._aliases["reverse"]


def test_what_is_not_here_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compression.missing("none") == ""
    assert compression.missing("snappy") == "?"
    assert set(compression.known()) >= {"bzip2", "lzma", "none", "zlib", "zstd"}
    monkeypatch.setattr(compression, "ZSTD_MODULES", ())
    monkeypatch.setattr(serialization, "compressor", unknown)
    assert compression.missing("zstd") == '"celery-idempotent[zstd]"'
    assert compression.missing("brotli") == "brotli"
    assert compression.known() == ["none"]
    for verb in (compression.compress, compression.decompress):
        with pytest.raises(KeyError):
            verb(b"x", "zstd")


def test_of_brotli_that_is_refused_a_piece_is_in_memory() -> None:
    bomb = brotli.compress(bytes(100 * LIMIT), quality=5)
    assert len(bomb) < 200
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"it inflates to more than {LIMIT} bytes"):
            compression.decompress(bomb, "brotli", LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 50 * LIMIT
    finally:
        tracemalloc.stop()


def test_brotli_whose_streams_are_not_here_is_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "BROTLI_MODULES", ())
    packed = compression.compress(b"abc", "brotli")
    assert compression.decompress(packed, "brotli", 3) == b"abc"
    with pytest.raises(ValueError, match="it inflates to more than 2 bytes"):
        compression.decompress(packed, "brotli", 2)


def unknown(name: str) -> None:
    raise KeyError(name)


class Stream:
    """A stream of a zstd module that has the standard library's interface."""

    def __init__(self) -> None:
        self.stream = zlib.decompressobj()

    def decompress(self, body: bytes, limit: int) -> bytes:
        return self.stream.decompress(body, limit)

    @property
    def eof(self) -> bool:
        return self.stream.eof

    @property
    def unused_data(self) -> bytes:
        return self.stream.unused_data


def test_a_zstd_of_the_standard_library_is_read_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(zlib)("compression.zstd")
    module.compress = zlib.compress  # type: ignore[attr-defined]
    module.ZstdDecompressor = Stream  # type: ignore[attr-defined]
    monkeypatch.setattr(compression, "ZSTD_MODULES", ("compression.zstd",))
    monkeypatch.setattr(compression, "import_module", {"compression.zstd": module}.__getitem__)
    packed = compression.compress(b"x" * 1000, "zstd")
    assert compression.decompress(packed, "zstd") == b"x" * 1000
    with pytest.raises(ValueError, match="it inflates to more than 999 bytes"):
        compression.decompress(packed, "zstd", 999)
    with pytest.raises(ValueError, match="it is no complete zstd stream"):
        compression.decompress(packed[:-1], "zstd")
    compression._first_of.cache_clear()


def test_zstd_that_does_not_tell_its_size_is_refused() -> None:
    zstandard = import_module("zstandard")
    writer = zstandard.ZstdCompressor().compressobj()
    body = writer.compress(NOISE) + writer.flush()
    with pytest.raises(ValueError, match="it does not state how much it inflates to"):
        compression._unzstandard(zstandard, body, LIMIT)
