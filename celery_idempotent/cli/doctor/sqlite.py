# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of a SQLite file's place, where its locks must hold and its records stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...stores.sqlite.records import clock
from ...stores.sqlite.store import SqliteStore
from .any_store import MOST, claims_refused, expired, slow_store
from .findings import Checks, CheckSkipped, Findings, Target, error, ok, warning

CHECKS = Checks()
#: Where Linux lists what is mounted; other systems have no such file.
MOUNTS = Path("/proc/self/mounts")
#: File systems of other machines, whose locks SQLite cannot trust (sqlite.org/howtocorrupt.html, 2.1); fuse.* are most.
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "virtiofs", "vboxsf"}
MEMORY = {"tmpfs", "ramfs"}
#: Free bytes below which a disk is a warning, and an error.
ROOM, LITTLE = 2**30, 100 * 2**20


def _store(target: Target) -> SqliteStore:
    store = target.store
    assert isinstance(store, SqliteStore)
    return store


def _folder(target: Target) -> Path:
    return Path(os.path.realpath(_store(target)._place.path)).parent


def file_system(folder: Path, mounts: Path) -> str:
    """Return the kind of the file system that a folder is on, by a list of what is mounted.

    Raises:
        CheckSkipped: there is no such list.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        raise CheckSkipped("This system does not list its mounts in /proc.") from None
    kinds = {fields[1].replace("\\040", " "): fields[2] for line in lines if len(fields := line.split()) > 2}
    found = [each for each in (folder, *folder.parents) if str(each) in kinds]
    if not found:
        raise CheckSkipped(f"{folder} is on none of the file systems that are listed in /proc.")
    return kinds[str(found[0])]


@CHECKS.add()
def file_on_network(target: Target) -> Findings:
    kind = file_system(_folder(target), MOUNTS)
    if kind in REMOTE or kind.startswith("fuse."):
        yield error(
            f"The file is on {kind}, a file system of another machine: SQLite's locks do not hold there, so that an "
            "operation may run twice or the file be damaged.",
            "Move the file to a disk of this machine, or use redis:// or postgresql:// for several machines.",
        )
    yield ok(f"the file is on {kind}, of this machine")


@CHECKS.add("the file is on a disk")
def file_in_memory(target: Target) -> Findings:
    kind = file_system(_folder(target), MOUNTS)
    if kind in MEMORY:
        yield warning(
            f"The file is on {kind}, in memory: a restart of the machine forgets every operation.",
            "Move the file to a disk, as in sqlite:////var/lib/app/idempotency.db",
        )


CHECKS.append(slow_store)  # which finds out whether there is such a folder


@CHECKS.add()
def disk_full(target: Target) -> Findings:
    free = shutil.disk_usage(_folder(target)).free
    room = f"{free // 2**20:,} MB are free on the disk of the file"
    if free < ROOM:
        make = error if free < LITTLE else warning
        yield make(f"{room}: on a full disk no task can claim its key.", "Make room, or shorten result_ttl.")
    yield ok(room)


@CHECKS.add()
def commits_not_durable(target: Target) -> Findings:
    synchronous = _store(target)._place.synchronous
    if synchronous == "off":
        yield warning(
            "synchronous is off: a power failure may damage the file, and every operation in it be forgotten.",
            "Leave synchronous out of the store's URL, or set synchronous=normal.",
        )
    yield ok(f"synchronous is {synchronous}")


@CHECKS.add()
def expired_rows(target: Target) -> Findings:
    store = _store(target)
    name = store._place.table  # which `Place` has seen to be letters, digits, underscores
    query = f'SELECT count(*) FROM (SELECT 1 FROM "{name}" WHERE expires <= ? LIMIT {MOST})'  # noqa: S608
    (rows,) = store._connections.read(lambda cursor: cursor.execute(query, (clock(),)).fetchone())
    yield expired(target, int(rows))


CHECKS.append(claims_refused)
