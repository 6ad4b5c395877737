"""A store in a folder: one JSON file per record, for the processes of one machine.

Small enough to read, and complete: it passes every fact of `celery_idempotent.testing.StoreContract`. What each verb
decides is `celery_idempotent.stores.rules`; a store adds where rows are kept, whose turn it is, and whose clock counts.

docs/guides/writing-a-store.md walks through it.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from celery_idempotent.errors import LeaseLost, RecordUnreadable, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Record, Refusal, Release, State, Store, rules

#: Seconds to wait for one's turn. A verb must answer or fail long before a lease ends.
PATIENCE = 2.0


class FolderStore(Store):
    """Keep each record in a file of its own.

    Weaker than the contract where the clock of the machine is set back: fences follow it.

    Arguments:
        folder: Where; made when it is first used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    # Whose turn it is, and what time.

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Keep all other threads and processes out, and tell the time in microseconds."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "turn", "w") as mine:  # opened anew each time: a fork shares nothing
                self._wait(mine)
                try:
                    # The clock of the machine, which all its processes share.
                    yield time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000
                finally:
                    fcntl.flock(mine, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the file open
        except PermissionError as error:
            raise StoreRefused(f"The store {self.folder} may not be written ({error}). Check its rights.") from error
        except OSError as error:
            raise StoreUnreachable(f"The store {self.folder} cannot serve ({error}). Is the disk full?") from error

    def _wait(self, mine: Any) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.001)

    # What a row looks like in a file.

    def path(self, key: str) -> Path:
        """Return the file of a key, which may be any text."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def read(self, path: Path, now: int) -> tuple[str, rules.Row | None]:
        """Return the key and the row in a file, or no row if there is none or it has expired."""
        if not path.exists():
            return "", None
        try:
            said = json.loads(path.read_bytes())
            key = said.pop("key")
            waiting = {task: tuple(mark) for task, mark in said.pop("waiting").items()}
            payload = base64.b64decode(said.pop("payload"), validate=True)
            row = rules.Row(State(said.pop("state")), waiting=waiting, payload=payload, **said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordUnreadable(f"{path} is no record of it ({error!r}). Delete it if it is garbage.") from error
        return key, row if row.expires > now else None

    def write(self, key: str, row: rules.Row) -> None:
        """Put a row into its file: all of it, or nothing."""
        said = {**asdict(row), "key": key, "state": row.state.value}
        said["payload"] = base64.b64encode(row.payload).decode()
        path = self.path(key)
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps(said))
        whole.replace(path)

    # The verbs: take the turn, read the row, ask the rules, write the row.

    def acquire(self, claim: Claim) -> Lease | Refusal:
        with self.turn() as now:
            _, row = self.read(self.path(claim.key), now)
            answer, row = rules.acquire(claim.key, row, claim, now)
            self.write(claim.key, row)
            return answer

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        with self.turn() as now:
            return [lease for lease in leases if not self._renew(lease, now)]

    def _renew(self, lease: Lease, now: int) -> bool:
        row = rules.renew(self.read(self.path(lease.key), now)[1], lease, now)
        if row is not None:
            self.write(lease.key, row)
        return row is not None

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        with self.turn() as now:
            row = rules.settle(self.read(self.path(lease.key), now)[1], lease, outcome, ttl, now)
            if row is None:
                raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")
            self.write(lease.key, row)

    def release(self, lease: Lease, release: Release) -> bool:
        with self.turn() as now:
            _, row = self.read(self.path(lease.key), now)
            ours = rules.release(row, lease, release, now)
            if row is not None:  # also where it is another's: what it says of this task may have changed
                self.write(lease.key, row)
            return ours

    def mark_shutdown(self, lease: Lease) -> bool:
        with self.turn() as now:
            _, row = self.read(self.path(lease.key), now)
            ours = rules.mark_shutdown(row, lease)
            if ours and row is not None:
                self.write(lease.key, row)
            return ours

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        with self.turn() as now:
            _, row = self.read(self.path(key), now)
            settled = rules.mark_dispatched(row, task_id)
            if settled and row is not None:
                self.write(key, row)
            return settled

    def get(self, key: str) -> Record | None:
        with self.turn() as now:
            _, row = self.read(self.path(key), now)
            return None if row is None else rules.view(key, row, now)

    def delete(self, key: str) -> bool:
        with self.turn() as now:
            path = self.path(key)
            try:
                known = self.read(path, now)[1] is not None
            except RecordUnreadable:
                known = True  # garbage must be able to go
            path.unlink(missing_ok=True)
            return known

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for path in self.folder.glob("*.json"):
            with self.turn() as now:  # one turn per record: a long scan keeps nobody out
                try:
                    key, row = self.read(path, now)
                except RecordUnreadable:
                    continue
            if row is not None and key.startswith(prefix) and state in (None, row.state):
                yield rules.view(key, row, now)

    def purge(self, limit: int | None = None) -> int:
        gone = 0
        for path in self.folder.glob("*.json"):
            if gone == limit:
                break
            with self.turn() as now:
                try:
                    expired = path.exists() and self.read(path, now)[1] is None
                except RecordUnreadable:
                    continue
                if expired:
                    path.unlink()
                    gone += 1
        return gone

    def ping(self) -> None:
        with self.turn():
            pass
