"""What doctor says of a cached store, of one in memory, of one that somebody else wrote, and of clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.cli.doctor import any_store
from celery_idempotent.cli.doctor.findings import Severity, Target
from celery_idempotent.cli.doctor.stores import KINDS, sections
from celery_idempotent.stores import SCHEMES, open_store
from celery_idempotent.stores.memory import MemoryStore
from examples.folder_store import FolderStore
from tests.support.doctor.wards import by_code, found_of, severities
from tests.support.servers import RedisServer

Start = Callable[..., RedisServer]


class TestCached:
    def found(self, url: str) -> list[dict[str, str]]:
        store = open_store(url)
        found = list(sections(Target(store, "cached+redis://here")))
        store.close()
        assert [section.name for section in found] == ["cached+redis://here (durable)", "cached+redis://here (cache)"]
        return [severities(by_code([section])) for section in found]

    def url(self, durable: RedisServer, cache: RedisServer) -> str:
        return f"cached+{durable.url()}?cache={cache.url()}"

    def test_a_cache_may_evict_and_forget_what_its_durable_store_may_not(self, own_redis: Start) -> None:
        bold: dict[str, Any] = {"maxmemory_policy": "allkeys-lru", "maxmemory": "100mb"}
        durable, cache = own_redis(**bold), own_redis(**bold)
        wrong = {"evicts-keys": "error", "not-persistent": "warning"}
        assert self.found(self.url(durable, cache)) == [wrong, {}]

    def test_either_side_may_be_down_alone(self, own_redis: Start) -> None:
        durable, cache = own_redis(appendonly="yes"), own_redis()
        url = self.url(durable, cache)
        cache.stop()
        assert self.found(url) == [{}, {"store-unreachable": "error"}]
        durable.stop()
        cache.start()
        assert self.found(url.replace(url.rpartition(":")[2], f"{cache.port}/0")) == [
            {"store-unreachable": "error"},
            {},
        ]


def test_a_store_of_one_process_is_a_warning() -> None:
    assert severities(found_of("memory://")) == {"store-of-one-process": "warning"}


def test_a_store_that_somebody_else_wrote_is_tried(tmp_path: Path) -> None:
    found = found_of(FolderStore(tmp_path / "records"))
    assert severities(found) == {}
    assert found.keys() == {"schema-pending", "slow-store", "claims-refused"}


def test_every_store_that_has_a_url_is_known_to_doctor() -> None:
    classes = {name for _, name, _ in SCHEMES.values()}
    assert classes - KINDS.keys() == {"ClusterStore", "SentinelStore", "DjangoDatabase"}  # which open others


def test_a_store_that_derives_from_a_known_one_is_examined_as_that(tmp_path: Path) -> None:
    class Ours(MemoryStore):
        pass

    assert severities(found_of(Ours())) == {"store-of-one-process": "warning"}


@pytest.mark.parametrize(("ahead", "words"), [(60.0, "ahead of"), (-60.0, "behind")])
def test_clocks_that_differ_are_told_with_their_difference(ahead: float, words: str) -> None:
    found = any_store.compared(lambda: time.time() + ahead)
    assert found.severity is Severity.INFO
    assert f"60 s {words}" in found.found


def test_clocks_that_agree_are_well() -> None:
    assert any_store.compared(time.time).severity is Severity.OK
