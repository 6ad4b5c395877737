"""What doctor says of a SQLite file: once where it should not be, and once where it should."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idempotent.cli.doctor import any_store, sqlite
from celery_idempotent.cli.doctor.findings import CheckSkipped
from celery_idempotent.cli.doctor.sqlite import REMOTE, file_system
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.doctor.wards import found_of, severities
from tests.support.stores.benches import KEY, age, take

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def on_disk(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file on a disk of this machine, whatever the tests' own directory is on."""
    return mounted("ext4", sqlite_path, monkeypatch)


def mounted(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the mounts say that a file is on such a file system."""
    mounts = path.with_name("mounts")
    spaced = str(path.parent).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nproc /proc proc rw 0 0\nsomewhere {spaced} {kind} rw 0 0\n")
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    return path


def test_a_file_on_a_disk_is_well_and_every_check_has_its_say(on_disk: Path) -> None:
    found = found_of(f"sqlite:///{on_disk}")
    assert severities(found) == {}
    assert found.keys() == {check.code for check in sqlite.CHECKS}


@pytest.mark.parametrize("kind", [*sorted(REMOTE), "fuse.sshfs"])
def test_a_file_of_another_machine_is_an_error(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounted(kind, sqlite_path, monkeypatch)
    found = found_of(f"sqlite:///{sqlite_path}")
    assert severities(found) == {"file-on-network": "error"}
    assert f" {kind}," in found["file-on-network"].found


def test_a_link_leads_to_the_file_system_of_the_file(
    sqlite_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = tmp_path / "a folder"
    there.mkdir()
    mounted("nfs4", there / "idempotency.db", monkeypatch)
    sqlite_path.symlink_to(there / "idempotency.db")
    assert severities(found_of(f"sqlite:///{sqlite_path}")) == {"file-on-network": "error"}


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder that really is in memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs /dev/shm, which every Linux has")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_file_in_memory_is_a_warning(memory_folder: Path) -> None:
    found = severities(found_of(f"sqlite:///{memory_folder}/idempotency.db"))
    found.pop("disk-full", None)  # such a folder may be small
    assert found == {"file-in-memory": "warning"}


def test_a_system_that_lists_no_mounts_is_not_asked(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MOUNTS", on_disk.with_name("nothing"))
    found = found_of(f"sqlite:///{on_disk}")
    assert severities(found) == {"not-checked": "info"}
    assert "file-on-network, file-in-memory" in found["not-checked"].found


def test_a_folder_on_no_listed_file_system_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    with pytest.raises(CheckSkipped):
        file_system(tmp_path, tmp_path / "mounts")


@pytest.mark.parametrize(("free", "severity"), [(50 * 2**20, "error"), (500 * 2**20, "warning")])
def test_a_disk_that_is_nearly_full_is_said(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, free: int, severity: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40 - free, free))
    assert severities(found_of(f"sqlite:///{on_disk}")) == {"disk-full": severity}


def test_commits_that_wait_for_nothing_are_a_warning(on_disk: Path) -> None:
    assert severities(found_of(f"sqlite:///{on_disk}?synchronous=off")) == {"commits-not-durable": "warning"}
    assert severities(found_of(f"sqlite:///{on_disk}?synchronous=normal")) == {}


def test_expired_rows_are_counted(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(str(on_disk))
    take(store)
    assert found_of(store)["expired-rows"].found.startswith("0 ")
    age(store, KEY, 10_000)
    monkeypatch.setattr(any_store, "MANY", 1)
    found = found_of(store)["expired-rows"]
    assert (str(found.severity), found.found) == ("warning", "1 expired rows wait to be removed.")
    assert "schedule_purge" in found.remedy
    store.close()


def test_a_slow_file_is_a_warning(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_store, "SLOW", 0.0)
    assert severities(found_of(f"sqlite:///{on_disk}")) == {"slow-store": "warning"}


def test_a_folder_that_is_not_there_is_one_finding_of_the_store(on_disk: Path) -> None:
    found = severities(found_of(f"sqlite:///{on_disk.parent}/nowhere/idempotency.db"))
    assert found in ({"store-unreachable": "error"}, {"store-refused": "error"})


def test_a_file_that_is_no_database_is_a_refusal(on_disk: Path) -> None:
    on_disk.write_text("not a database " * 100)
    assert severities(found_of(f"sqlite:///{on_disk}")) == {"store-refused": "error"}
