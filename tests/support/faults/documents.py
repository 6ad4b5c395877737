"""Documents that are changed and indexed: the effect of unique tasks, counted outside the code under test."""

from __future__ import annotations

import time

from tests.support.servers import open_client


class Documents:
    """The versions of documents, in a database that is never disturbed: the last one, and those that were indexed."""

    def __init__(self, url: str) -> None:
        self.client = open_client(url)

    def change(self, number: int) -> int:
        """Make a new version, and return it."""
        return int(self.client.hincrby("versions", str(number)))

    def index(self, number: int, seconds: float) -> None:
        """Read the version that is there, work for a while, and note that it is indexed."""
        read = int(self.client.hget("versions", str(number)) or 0)
        self.client.hincrby("reads", str(number))
        time.sleep(seconds)
        self.client.sadd(f"indexed:{number}", read)

    def behind(self) -> dict[str, int]:
        """Return the documents whose last version was not indexed."""
        last = {name.decode(): int(version) for name, version in self.client.hgetall("versions").items()}
        return {n: v for n, v in last.items() if not self.client.sismember(f"indexed:{n}", str(v))}

    def runs(self) -> int:
        """Return how often a body has read a version."""
        return sum(map(int, self.client.hvals("reads")))
