"""Results in files: written before their record, found again, told apart from what is gone and from what is away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from celery_idempotent.core import file_results
from celery_idempotent.core.file_results import NAME, FileReference, FileResultStorage, check_prefix, sweep
from celery_idempotent.core.results import Kind, Origin, Payload
from celery_idempotent.errors import ConfigurationError, RecordUnreadable, StoreRefused, StoreUnreachable

ORIGIN = Origin("idem:shop.report:A/../B", 7)


def decode(content: bytes) -> Payload:
    return Payload(Kind.VALUE, content)


def read(storage: FileResultStorage, reference: str) -> Any:
    found = storage.read(reference, decode, 0.0)
    return found.data if found.kind is Kind.VALUE else found.reason


@pytest.fixture(params=["file", "memory"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A URL below which there is nothing yet."""
    yield f"file://{tmp_path}/results" if request.param == "file" else "memory://results"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def storage(prefix: str) -> FileResultStorage:
    return FileResultStorage(prefix)


def test_what_was_kept_is_read_by_whoever_has_the_reference(storage: FileResultStorage, prefix: str) -> None:
    reference = storage.keep(b"json:42", ORIGIN)
    assert reference.startswith(prefix.rstrip("/"))
    assert read(FileResultStorage(prefix + "/"), reference) == b"json:42"


def test_no_two_runs_write_to_one_file(storage: FileResultStorage) -> None:
    kept = [storage.keep(content, ORIGIN) for content in (b"a", b"b", b"b")]
    assert len({reference.partition("#")[0] for reference in kept}) == 3
    assert [read(storage, reference) for reference in kept] == [b"a", b"b", b"b"]


def test_a_file_is_called_after_its_operation_in_letters_that_every_place_takes(storage: FileResultStorage) -> None:
    name = storage.keep(b"x", ORIGIN).partition("#")[0].rpartition("/")[2]
    assert NAME.fullmatch(name)
    assert "-7-" in name
    assert name[:32] == storage.keep(b"x", Origin(ORIGIN.key, 8)).partition("#")[0].rpartition("/")[2][:32]
    assert name[:32] not in storage.keep(b"x", Origin("idem:shop.report:A", 7))


def test_a_file_that_is_gone_is_a_result_that_is_unavailable(storage: FileResultStorage, prefix: str) -> None:
    reference = storage.keep(b"x", ORIGIN)
    storage.keep(b"y", ORIGIN)
    path = reference.partition("#")[0]
    fsspec.open(path).fs.rm(path)
    assert read(storage, reference) == f"its file {path} is gone"


@pytest.mark.parametrize("content", [b"json:123", b"json:12345 ", b"json:54321", b""])
def test_a_file_that_was_changed_is_not_read(storage: FileResultStorage, content: bytes) -> None:
    reference = storage.keep(b"json:12345", ORIGIN)
    path = reference.partition("#")[0]
    with fsspec.open(path, "wb") as file:
        file.write(content)
    assert read(storage, reference) == f"its file {path} is not what was written"


def test_no_more_of_a_file_is_read_than_was_written(
    storage: FileResultStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(FileReference, "fits", lambda self, content: lengths.append(len(content)))
    reference = storage.keep(b"x" * 10, ORIGIN)
    with fsspec.open(reference.partition("#")[0], "wb") as file:
        file.write(b"x" * 1000)
    read(storage, reference)
    assert lengths == [11]


def test_files_may_move_together_with_the_setting(tmp_path: Path) -> None:
    reference = FileResultStorage(f"file://{tmp_path}/before").keep(b"x", ORIGIN)
    (tmp_path / "before").rename(tmp_path / "after")
    (tmp_path / "before").mkdir()
    assert read(FileResultStorage(f"file://{tmp_path}/after"), reference) == b"x"
    gone = read(FileResultStorage(f"file://{tmp_path}/before"), reference)
    assert gone == f"its file file://{tmp_path}/before/{reference.partition('#')[0].rpartition('/')[2]} is gone"


def test_nothing_is_opened_because_a_record_names_it(tmp_path: Path) -> None:
    secret = FileResultStorage(f"file://{tmp_path}/secret").keep(b"secret", ORIGIN)
    storage = FileResultStorage(f"file://{tmp_path}/results")
    storage.keep(b"x", ORIGIN)
    assert read(storage, secret).endswith(f"is gone; looked for it in file://{tmp_path}/results")


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "task:",
        "file:///etc/passwd",
        "file:///etc/passwd#bytes=1&sha256=00",
        "memory://x/../" + "0" * 32 + "-1-" + "0" * 16 + ".result/../x#bytes=1&sha256=00",
        "memory://x/" + "0" * 32 + "-1-" + "0" * 16 + ".result#bytes=1&blake3=00",
    ],
)
def test_a_reference_of_another_version_is_unreadable(reference: str) -> None:
    with pytest.raises(RecordUnreadable, match=r"Expected a reference to a file, got .*: upgrade this worker"):
        FileResultStorage("memory://x").read(reference, decode, 0.0)


def test_a_directory_that_is_not_mounted_is_away_and_not_empty(tmp_path: Path) -> None:
    storage = FileResultStorage(f"file://{tmp_path}/results")
    reference = storage.keep(b"x", ORIGIN)
    (tmp_path / "results").rename(tmp_path / "unmounted")
    with pytest.raises(StoreUnreachable, match=f"Expected to read a result in file://{tmp_path}/results, got FileNot"):
        storage.read(reference, decode, 0.0)
    (tmp_path / "unmounted").rename(tmp_path / "results")
    assert read(storage, reference) == b"x"


class Failing(MemoryFileSystem):
    """A place that raises what it is told to."""

    protocol = "failing"
    error: Exception = OSError()

    def cat_file(self, *args: Any, **options: Any) -> Any:
        raise self.error

    def pipe_file(self, *args: Any, **options: Any) -> Any:
        raise self.error


@pytest.fixture
def failing() -> Iterator[type[Failing]]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    yield Failing
    del _registry["failing"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError("no"), StoreRefused),
        (OSError("connection reset"), StoreUnreachable),
        (TimeoutError(), StoreUnreachable),
        (ImportError("no driver"), StoreUnreachable),
        (RuntimeError("an error of a driver, with its://user:secret@host"), StoreUnreachable),
    ],
)
def test_a_place_that_fails_is_asked_again_later(
    failing: type[Failing], error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "error", error)
    reference = str(FileReference.to("failing://x", file_results.name_of(ORIGIN), b"x"))
    with pytest.raises(raised) as caught:
        FileResultStorage("failing://user:secret@host/x").read(reference, decode, 0.0)
    assert "secret" not in str(caught.value)
    assert "failing://***@host/x" in str(caught.value)
    with pytest.raises(type(error)):
        FileResultStorage("failing://x").keep(b"x", ORIGIN)


def test_a_password_is_not_written_into_records(failing: type[Failing]) -> None:
    written = str(FileReference.to("failing://user:secret@host/x", file_results.name_of(ORIGIN), b"x"))
    assert written.startswith("failing://***@host/x/")


def test_a_place_across_the_network_has_a_time_limit() -> None:
    assert file_results._limits(AsyncFileSystem(skip_instance_cache=True)) == {"timeout": file_results.PATIENCE}
    assert file_results._limits(LocalFileSystem()) == {}


# -- declaring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["file:///x", "memory://x", "simplecache::memory://x"])
def test_a_url_that_fsspec_can_open_is_taken(url: str) -> None:
    check_prefix(url)


def test_a_place_that_somebody_registered_is_taken(failing: type[Failing]) -> None:
    check_prefix("failing://x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket", r"expected a URL that fsspec knows, got 's4://bucket': did you mean s3a?://\?"),
        ("wqqqq://x", "got 'wqqqq://x': write file:// or s3://"),
        ("simplecache::mmory://u:secret@x", r"got 'simplecache::mmory://\*\*\*@x': did you mean memory://\?"),
    ],
)
def test_a_url_that_fsspec_does_not_know_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^large_results: .*{said}"):
        check_prefix(url)


def test_what_is_not_installed_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_results, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"what fsspec needs for s3:// to be installed: pip install s3fs"):
        check_prefix("s3://bucket")
    monkeypatch.setitem(__import__("sys").modules, "fsspec.registry", None)
    with pytest.raises(ConfigurationError, match=r'fsspec to be installed .*pip install "celery-idempotent\[files\]"'):
        check_prefix("s3://bucket")


# -- sweeping ----------------------------------------------------------------------------------------------------------


def age(reference: str, seconds: float) -> None:
    """Let a file be so old."""
    place, path = fsspec.url_to_fs(reference.partition("#")[0])
    if isinstance(place, MemoryFileSystem):
        place.store[path].modified -= timedelta(seconds=seconds)
    else:
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_sweep_removes_what_no_record_refers_to_any_more(storage: FileResultStorage, prefix: str) -> None:
    week = 7 * 86400.0
    old, young = storage.keep(b"old", ORIGIN), storage.keep(b"young", ORIGIN)
    age(old, week + file_results.MARGIN + 60)
    age(young, week + file_results.MARGIN - 60)
    assert sweep(prefix, week) == 1
    assert read(storage, young) == b"young"
    assert read(storage, old).endswith("is gone")
    assert sweep(prefix + "/", week) == 0


def test_a_sweep_leaves_what_is_no_result(storage: FileResultStorage, prefix: str) -> None:
    kept = storage.keep(b"x", ORIGIN)
    other = kept.partition("#")[0].replace(".result", ".results")
    with fsspec.open(other, "wb") as file:
        file.write(b"somebody's")
    for url in (kept, other):
        age(url, 10 * 86400.0)
    assert sweep(prefix, 86400.0) == 1
    with fsspec.open(other) as file:
        assert file.read() == b"somebody's"


def test_there_may_be_nothing_to_sweep(prefix: str) -> None:
    assert sweep(prefix, 1.0) == 0


@pytest.mark.parametrize("verb", ["rm_file", "modified"])
def test_two_sweeps_may_meet(
    storage: FileResultStorage, prefix: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    age(storage.keep(b"x", ORIGIN), 10 * 86400.0)

    def gone(*args: object) -> None:
        raise FileNotFoundError

    for place in (LocalFileSystem, MemoryFileSystem):
        monkeypatch.setattr(place, verb, gone)
    assert sweep(prefix, 86400.0) == 0


def test_times_without_a_zone_are_utc(storage: FileResultStorage, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.keep(b"x", ORIGIN)
    real: dict[Any, Callable[..., Any]] = {place: place.modified for place in (LocalFileSystem, MemoryFileSystem)}
    for place, modified in real.items():
        monkeypatch.setattr(place, "modified", lambda *args, modified=modified: modified(*args).replace(tzinfo=None))
    assert sweep(prefix, 0.0) == 0
    monkeypatch.setattr(file_results, "MARGIN", -60.0)
    assert sweep(prefix, 0.0) == 1
