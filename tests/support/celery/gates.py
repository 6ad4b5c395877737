"""Gates: a test holds the body of a task at a named point, and lets it go.

In the task `Gates.from_env().wait("charged")`; in the test `gate = gates["charged"]`, `gate.reached()`, `gate.open()`.
Gates are files, so that they work across processes and pools, and no test depends on how fast anything is. A gate that
no test ever closed is open: a body may name more gates than one test uses.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote

from tests.support.waiting import wait_until

POLL_SECONDS = 0.01


class Gate:
    """One named point, as the test sees it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._stem = directory / quote(name, safe="")

    @property
    def closed(self) -> bool:
        """Whether a body that comes here waits."""
        return self._path("closed").exists()

    @property
    def arrivals(self) -> list[int]:
        """The pids of the bodies that came here, in the order of their coming, whether the gate was closed or open."""
        marks = self._stem.parent.glob(f"{self._stem.name}.arrived.*")
        return [int(pid) for _, pid in sorted(tuple(map(int, mark.name.rsplit(".", 2)[1:])) for mark in marks)]

    def close(self) -> Gate:
        """Hold whoever comes from now on."""
        self._path("closed").touch()
        return self

    def open(self) -> None:
        """Let everyone through, now and later."""
        self._path("closed").unlink(missing_ok=True)

    def reached(self, count: int = 1, timeout: float = 15.0) -> list[int]:
        """Wait until `count` bodies came here, and return their pids."""
        wait_until(
            lambda: len(self.arrivals) >= count,
            timeout,
            lambda: f"{count} to reach gate {self.name!r}; {len(self.arrivals)} did",
        )
        return self.arrivals

    def wait(self, timeout: float = 60.0) -> None:
        """Come to the gate, in the body of a task, and pass once it is open."""
        self._path(f"arrived.{time.monotonic_ns()}.{os.getpid()}").touch()
        deadline = time.monotonic() + timeout
        while self.closed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody opened gate {self.name!r} within {timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _path(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{suffix}")


class Gates:
    """The gates of one test."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_env(cls) -> Gates:
        """Return the gates that the environment names, for the bodies of tasks."""
        return cls(os.environ["GATES"])

    def __getitem__(self, name: str) -> Gate:
        return Gate(self.directory, name)

    def close(self, name: str) -> Gate:
        """Close the gate of this name, and return it."""
        return self[name].close()

    def wait(self, name: str, timeout: float = 60.0) -> None:
        """Come to the gate of this name, in the body of a task, and pass once it is open."""
        self[name].wait(timeout)

    def open_all(self) -> None:
        """Open every gate, so that no body is held after its test."""
        for mark in self.directory.glob("*.closed"):
            mark.unlink(missing_ok=True)
