"""What the place of a SQLite file must be, so that its locks hold and its records stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...stores.sqlite.records import clock
from ...stores.sqlite.store import SqliteStore
from .any_store import MOST, claims_refused, expired, slow_store
from .findings import Check, CheckSkipped, Finding, Section, Target, error, ok, run_checks, warning

#: Where Linux lists what is mounted; other systems have no such file.
MOUNTS = Path("/proc/self/mounts")
#: File systems of other machines, whose locks SQLite cannot trust (sqlite.org/howtocorrupt.html, 2.1); fuse.* are most.
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "virtiofs", "vboxsf"}
MEMORY = {"tmpfs", "ramfs"}
#: Bytes that should be free, and below which nothing may go on.
ROOM, LITTLE = 2**30, 100 * 2**20


def _store(patient: Target) -> SqliteStore:
    store = patient.store
    assert isinstance(store, SqliteStore)
    return store


def _folder(patient: Target) -> Path:
    return Path(os.path.realpath(_store(patient)._place.path)).parent


def file_system(folder: Path, mounts: Path) -> str:
    """Return the kind of the file system that a folder is on, by a list of what is mounted.

    Raises:
        Unasked: there is no such list.
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


def file_on_network(patient: Target) -> Finding:
    """See whether the file is on a file system whose locks SQLite can trust."""
    kind = file_system(_folder(patient), MOUNTS)
    if kind in REMOTE or kind.startswith("fuse."):
        return error(
            f"The file is on {kind}, a file system of another machine: SQLite's locks do not hold there, so that an "
            "operation may run twice or the file be damaged.",
            "Move the file to a disk of this machine, or use redis:// or postgresql:// for several machines.",
        )
    return ok(f"the file is on {kind}, of this machine")


def file_in_memory(patient: Target) -> Finding:
    """See whether the file outlives the machine's power."""
    kind = file_system(_folder(patient), MOUNTS)
    if kind in MEMORY:
        return warning(
            f"The file is on {kind}, in memory: a restart of the machine forgets every operation.",
            "Move the file to a disk, as in sqlite:////var/lib/app/idempotency.db",
        )
    return ok("the file is on a disk")


def disk_full(patient: Target) -> Finding:
    """See whether there is room for more records."""
    free = shutil.disk_usage(_folder(patient)).free
    room = f"{free // 2**20:,} MB are free on the disk of the file"
    if free < ROOM:
        make = error if free < LITTLE else warning
        return make(f"{room}: on a full disk no task can claim its key.", "Make room, or shorten result_ttl.")
    return ok(room)


def commits_not_durable(patient: Target) -> Finding:
    """See whether a power failure takes what was settled."""
    synchronous = _store(patient)._place.synchronous
    if synchronous == "off":
        return warning(
            "synchronous is off: a power failure may damage the file, and every operation in it be forgotten.",
            "Leave synchronous out of the store's URL, or set synchronous=normal.",
        )
    return ok(f"synchronous is {synchronous}")


def expired_rows(patient: Target) -> Finding:
    """Count what has expired and is still there, by its index and no further than need be."""
    store = _store(patient)
    name = store._place.table  # which `Place` has seen to be letters, digits, underscores
    query = f'SELECT count(*) FROM (SELECT 1 FROM "{name}" WHERE expires <= ? LIMIT {MOST})'  # noqa: S608
    (rows,) = store._connections.read(lambda cursor: cursor.execute(query, (clock(),)).fetchone())
    return expired(patient, int(rows))


CHECKS: tuple[Check, ...] = (
    file_on_network,
    file_in_memory,
    slow_store,  # which finds out whether there is such a folder
    disk_full,
    commits_not_durable,
    expired_rows,
    claims_refused,
)


def sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a SQLite store."""
    yield Section(patient.name, list(run_checks(CHECKS, patient)))
