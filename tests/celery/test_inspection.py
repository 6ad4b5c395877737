"""`celery inspect idempotency` says which leases a worker holds, whoever of its processes and threads holds them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import events
from celery_idempotent.celery import inspect as inspection
from celery_idempotent.celery import pool as leases
from celery_idempotent.celery.inspect import LiveLease, NoReply
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.stores import Lease
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.nodes import ROOT, WorkerNode
from tests.support.servers import RedisServer
from tests.support.stores.benches import claim
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
POOLS = ["prefork", "threads", "solo", "gevent"]
LEASE = 1.0


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


def held(app: Celery, node: WorkerNode) -> list[LiveLease]:
    """Return the leases that a worker tells of; one that is ready may not hear its first questions yet."""

    def ask() -> list[list[LiveLease]]:
        try:
            return [inspection.leases(app, [node.hostname()], timeout=2)[node.hostname()]]
        except NoReply:
            return []

    return wait_until(ask, 30, f"{node.hostname()} to reply")[0]


@pytest.mark.parametrize("pool", [pytest.param("prefork", marks=pytest.mark.smoke), "threads", "gevent"])
def test_a_worker_says_which_leases_it_holds(
    app: Celery, start_worker: StartWorker, gates: Gates, store_url: str, pool: str
) -> None:
    node = start_worker(SHOP, pool=pool, env={"LEASE_TTL": str(LEASE)})
    assert held(app, node) == []
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    (pid,) = gate.reached()
    (lease,) = held(app, node)
    assert (lease.key, lease.task, lease.task_id) == (f"idem:{SHOP}.charge::ORD-1", f"{SHOP}.charge", result.id)
    record = RedisStore.from_url(store_url).get(lease.key)
    assert record is not None
    assert (
        (lease.holder, lease.fence) == (record.holder, record.fence) == (f"{socket.gethostname()}:{pid}", lease.fence)
    )
    assert 0 < lease.trusted_for <= LEASE
    wait_until(lambda: held(app, node)[0].renewals >= 2, 20, "the lease to be renewed twice")
    (later,) = held(app, node)
    assert later.age > lease.age
    assert later.age >= LEASE / 2  # counted from the grant: its renewals are a third of it apart
    assert 0 < later.trusted_for <= LEASE
    gate.open()
    result.get(timeout=20)
    assert held(app, node) == []


def test_a_solo_worker_replies_between_two_tasks(app: Celery, start_worker: StartWorker) -> None:
    node = start_worker(SHOP, pool="solo", concurrency=1)
    app.module.charge.delay("ORD-1").get(timeout=20)
    assert held(app, node) == []


def test_the_oldest_lease_comes_first_and_a_duplicate_that_waits_has_none(
    app: Celery, start_worker: StartWorker, gates: Gates
) -> None:
    env = {"ON_CONFLICT": "wait"}
    node = start_worker(SHOP, concurrency=3, env=env)
    closed = [gates.close(f"before ORD-{number}") for number in (1, 2)]
    results = []
    for number, gate in enumerate(closed, 1):
        results.append(app.module.charge.delay(f"ORD-{number}"))
        gate.reached()
    results.append(app.module.charge.delay("ORD-1"))
    node.wait_for_log("Conflicted", timeout=20)
    assert [lease.task_id for lease in held(app, node)] == [result.id for result in results[:2]]
    gates.open_all()
    for result in results:
        result.get(timeout=30)


@pytest.mark.nightly
def test_what_a_killed_child_held_is_not_shown_any_more(app: Celery, start_worker: StartWorker, gates: Gates) -> None:
    node = start_worker(SHOP, concurrency=1)
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    (first,) = gate.reached()
    node.kill_child(first)
    second = gate.reached(2)[-1]
    (lease,) = held(app, node)
    assert lease.holder.endswith(f":{second}")
    gate.open()
    result.get(timeout=20)


def test_it_asks_nobody_so_a_store_that_hangs_does_not_hold_it_up(
    app: Celery, start_worker: StartWorker, gates: Gates, own_redis: Callable[..., RedisServer]
) -> None:
    store = own_redis()
    node = start_worker(SHOP, store_url=store.url(0), env={"LEASE_TTL": str(LEASE)})
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    os.kill(store.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: held(app, node)[0].trusted_for == 0, 20, "the lease to come into doubt")
    finally:
        os.kill(store.pid, signal.SIGCONT)
    wait_until(lambda: held(app, node)[0].trusted_for > 0, 20, "the lease to be renewed")
    gate.open()
    result.get(timeout=20)


@pytest.mark.smoke
def test_the_command_line_prints_them(
    app: Celery, start_worker: StartWorker, gates: Gates, worker_env: dict[str, str]
) -> None:
    node = start_worker(SHOP)
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    gate.reached()

    def inspect(*options: str) -> str:
        command = [sys.executable, "-m", "celery", "-A", SHOP, "inspect", "-t", "10", "-d", node.hostname(), *options]
        run = subprocess.run(command, env={**os.environ, **worker_env}, cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert len(held(app, node)) == 1
    (lease,) = json.loads(inspect("--json", "idempotency"))[node.hostname()]
    assert LiveLease(**lease).task_id == result.id
    assert f"'key': 'idem:{SHOP}.charge::ORD-1'" in inspect("idempotency")
    gate.open()
    result.get(timeout=20)


@pytest.mark.nightly
def test_a_worker_that_does_not_reply_is_named(app: Celery, start_worker: StartWorker) -> None:
    with pytest.raises(NoReply, match=r"within 0\.1 s from at least one worker, got none"):
        inspection.leases(app, timeout=0.1)
    node = start_worker(SHOP)
    assert held(app, node) == []
    with pytest.raises(NoReply, match=r"within 3 s from celery@gone, got none\. Check that it runs"):
        inspection.leases(app, [node.hostname(), "celery@gone"], timeout=3)
    assert inspection.leases(app, timeout=3) == {node.hostname(): []}


def test_a_worker_without_idempotent_tasks_holds_none(app: Celery, start_worker: StartWorker) -> None:
    assert held(app, start_worker("tests.support.celery.plain_app")) == []


def test_a_worker_that_does_not_know_the_command_is_named(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[dict[str, Any]] = [{"celery@old": {"error": "KeyError('idempotency')"}}]
    monkeypatch.setattr(app.control, "broadcast", lambda *args, **options: answer)
    with pytest.raises(NoReply, match=r"Expected the leases of celery@old, got .*KeyError.*does not know the command"):
        inspection.leases(app)
    answer[:] = [{"celery@other": [{"key": "K", "colour": "red"}]}]
    with pytest.raises(NoReply, match=r"Expected the leases of celery@other, got .*'colour'.* another version"):
        inspection.leases(app)


class TestTheMemoryThatChildrenShare:
    """In one process, which plays a child and its main process."""

    @pytest.fixture(autouse=True)
    def as_child(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in ("_memory", "_cells", "slot"):
            monkeypatch.setattr(leases, name, getattr(leases, name))
        leases.prepare()
        assert leases._cells is not None
        leases.slot, leases._cells[7] = 7, os.getpid()
        yield
        leases._shown.clear()
        events.remove_counter(leases.count)

    def take(self, key: str = "k", **changes: Any) -> HeldLease:
        return HeldLease(MemoryStore(), Lease(claim(key, holder="host:1", **changes), 3), monotonic())

    def from_children(self) -> list[dict[str, Any]]:
        """Return what the main process reads, without what this process knows of itself."""
        shown = dict(leases._shown)
        leases._shown.clear()
        try:
            return leases.leases()
        finally:
            leases._shown.update(shown)

    def test_a_lease_is_there_from_its_beginning_to_its_end(self) -> None:
        holding = self.take()
        leases.begin(holding, "shop.charge", "id-1")
        (lease,) = self.from_children()
        expected = {"key": "k", "task": "shop.charge", "task_id": "id-1", "holder": "host:1", "fence": 3, "renewals": 0}
        assert lease.items() >= expected.items()
        assert lease["trusted_for"] == pytest.approx(54, abs=2)
        leases.end(holding)
        assert self.from_children() == []

    def test_a_renewal_and_a_loss_are_written_down(self) -> None:
        first, second = self.take("one"), self.take("two")
        for holding in (first, second):
            leases.begin(holding, "t", "i")
        first.trust(monotonic())
        second.lost = True
        leases.refresh()
        assert [(lease["key"], lease["renewals"]) for lease in self.from_children()] == [("one", 1)]

    def test_a_child_shows_four_at_once(self) -> None:
        holdings = [self.take(f"k{number}") for number in range(5)]
        for holding in holdings:
            leases.begin(holding, "t", "i")
        assert {lease["key"] for lease in self.from_children()} == {"k0", "k1", "k2", "k3"}
        leases.end(holdings[1])
        leases.begin(holdings[1], "t", "i")
        leases.end(holdings[4])
        assert {lease["key"] for lease in self.from_children()} == {"k0", "k1", "k2", "k3"}

    def test_long_names_and_all_characters_are_shown_as_far_as_there_is_room(self) -> None:
        leases.begin(self.take("ü\udcff\0" + "k" * 2000), "shop.größe", "id")
        (lease,) = self.from_children()
        assert lease["task"] == "shop.größe"
        assert lease["key"].startswith("ü?\0kkk")
        assert 800 < len(lease["key"]) < leases.LEASE_SIZE

    def test_what_a_child_that_is_gone_left_is_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert leases._cells is not None
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        monkeypatch.setattr(leases, "pid", child.pid)
        leases._cells[7] = child.pid
        leases.begin(self.take(), "t", "i")
        assert len(self.from_children()) == 1
        child.communicate(b"\n")
        assert self.from_children() == []
        leases._cells[7] = os.getpid()  # another child has its row
        assert self.from_children() == []

    def reading(self, *meanwhile: Callable[[], object]) -> dict[str, Any] | None:
        """Return what is read of the first place while a child writes: one call for each part that is read."""
        calls = iter(meanwhile)

        class Table:
            def __init__(self, table: Any) -> None:
                self.table = table

            def __getitem__(self, part: slice | int) -> Any:
                found = self.table[part]
                next(calls, lambda: None)()
                return found

        table: Any = Table(leases._memory)
        return leases._read(table, 7, 0, os.getpid())

    def test_a_place_that_is_written_meanwhile_is_read_again(self) -> None:
        old, new = self.take("old"), self.take("new")
        leases.begin(old, "t", "i")

        def replace() -> None:
            leases.end(old)
            leases.begin(new, "t", "i")

        lease = self.reading(lambda: None, replace)
        assert lease is not None
        assert lease["key"] == "new"

    def test_a_lease_is_there_while_it_is_written_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long a child that writes has to wait for its next turn."""
        leases.begin(self.take(), "t", "i")
        seen = []
        whole = leases._write

        class Slow:
            def __init__(self, table: Any) -> None:
                self.table = table

            def __getitem__(self, part: slice | int) -> Any:
                return self.table[part]

            def __setitem__(self, part: slice | int, value: Any) -> None:
                seen.append(leases._read(self.table, 7, 0, os.getpid()))
                self.table[part] = value
                seen.append(leases._read(self.table, 7, 0, os.getpid()))

        def write(table: Any, *rest: Any) -> None:
            whole(Slow(table), *rest)

        monkeypatch.setattr(leases, "_write", write)
        for _ in range(600):
            leases.refresh()
        assert len(seen) >= 1200
        assert None not in seen

    def test_a_run_without_a_lease_is_not_shown(self) -> None:
        unprotected = HeldLease(MemoryStore(), Lease(claim(), 0), monotonic())
        leases.begin(unprotected, "t", "i")
        leases.end(unprotected)
        assert leases.leases() == []
