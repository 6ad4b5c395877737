"""A worker whose clock is ten minutes wrong takes nothing early: the store's clock decides."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from celery import Celery

from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
WRONG = "tests.support.faults.shifted_shop"
DONE = {"order": "ORD-1", "cents": 999}
KEY = f"idem:{SHOP}.charge::ORD-1"

StartWrong = Callable[..., WorkerNode]
#: Ten minutes ahead, and behind.
shifted = pytest.mark.parametrize("shift", [600.0, -600.0], ids=["ahead", "behind"])


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.fixture
def start_wrong(start_worker: StartWorker, journal: Journal) -> StartWrong:
    """A function that starts a worker whose clock is wrong, and makes sure that it is."""

    def start(shift: float, *, env: dict[str, str] | None = None, **options: object) -> WorkerNode:
        node = start_worker(WRONG, env={"CLOCK_SHIFT": str(shift), "TZ": "UTC", **(env or {})}, **options)
        [entry, *_] = journal.wait_for_count(1, "clock")
        for name in ("wall", "date"):
            assert entry.fields[name] - time.time() == pytest.approx(shift, abs=60), "the clock is not wrong"
        assert entry.fields["monotonic"] == pytest.approx(time.monotonic(), abs=60), "only the wall clock may be"
        return node

    return start


# An ETA is a date, and Celery's: a message from a worker that is ten minutes ahead waits ten minutes in any other. So
# each worker here has a queue of its own, to which its deferred copies come back.


@shifted
@pytest.mark.parametrize("wrong", ["the holder", "the duplicate's worker"])
def test_a_duplicate_meets_a_live_lease_whatever_the_clocks_say(
    app: Celery,
    start_worker: StartWorker,
    start_wrong: StartWrong,
    journal: Journal,
    gates: Gates,
    shift: float,
    wrong: str,
) -> None:
    gate = gates.close("before ORD-1")
    queues = ("wrong", "right") if wrong == "the holder" else ("right", "wrong")
    env = {"LEASE_TTL": "3"}
    nodes = {
        "right": start_worker(SHOP, ready=False, queues=["right"], concurrency=1, env=env),
        "wrong": start_wrong(shift, queues=["wrong"], concurrency=1, env=env),
    }
    nodes["right"].ready()
    first = app.module.charge.apply_async(("ORD-1",), queue=queues[0])
    gate.reached()
    second = app.module.charge.apply_async(("ORD-1",), queue=queues[1])
    nodes[queues[1]].wait_for_log("copy=2", timeout=30)
    assert journal.count("started") == 1
    gate.open()
    assert first.get(timeout=30) == second.get(timeout=30) == DONE
    assert journal.count("started") == 1


@shifted
def test_a_worker_with_a_wrong_clock_takes_over_when_the_lease_ends_by_the_stores_clock(
    app: Celery,
    start_worker: StartWorker,
    start_wrong: StartWrong,
    journal: Journal,
    gates: Gates,
    store_url: str,
    shift: float,
) -> None:
    gate = gates.close("before ORD-1")
    store = RedisStore.from_url(store_url)
    env = {"LEASE_TTL": "3"}
    holder = start_worker(SHOP, ready=False, queues=["right"], concurrency=1, env=env)
    heir = start_wrong(shift, queues=["wrong"], concurrency=1, env=env)
    holder.ready()
    app.module.charge.apply_async(("ORD-1",), queue="right")
    gate.reached()
    second = app.module.charge.apply_async(("ORD-1",), queue="wrong")
    heir.wait_for_log("copy=1", timeout=30)
    held = store.get(KEY)
    holder.kill("SIGKILL")
    gate.reached(2, timeout=60)
    taken = store.get(KEY)
    assert held is not None
    assert taken is not None
    assert taken.fence > held.fence + 3_000_000  # microseconds of the store's clock
    gate.open()
    assert second.get(timeout=30) == DONE
    assert journal.count("charged") == 1


@pytest.mark.nightly
@shifted
def test_a_retry_of_a_worker_with_a_wrong_clock_is_not_overtaken(
    app: Celery, start_worker: StartWorker, start_wrong: StartWrong, journal: Journal, gates: Gates, shift: float
) -> None:
    gate = gates.close("before ORD-1")
    other = start_worker(SHOP, ready=False, queues=["right"], concurrency=1)
    start_wrong(shift, queues=["wrong"], concurrency=1)
    other.ready()
    first = app.module.flaky.apply_async(("ORD-1",), {"failures": 1, "countdown": 3}, queue="wrong")
    gate.reached()
    gate.open()
    wait_until(lambda: first.state == "RETRY", message="the retry to be published")
    second = app.module.flaky.apply_async(("ORD-1",), {"failures": 1, "countdown": 3}, queue="right")
    assert first.get(timeout=30) == second.get(timeout=30) == "ORD-1 after 1"
    tries = journal.entries("tried")
    # Once the retry is due, the duplicate may come first: then an attempt of its own runs, and the retry waits for it.
    assert [entry.fields["retries"] for entry in tries] in ([0, 1], [0, 0, 1])
    assert journal.count("charged") == 1
    assert tries[1].at - tries[0].at > 2.5


@pytest.mark.nightly
def test_what_a_worker_ahead_of_its_time_takes_from_others_does_not_run_twice(
    app: Celery, start_worker: StartWorker, start_wrong: StartWrong, journal: Journal, gates: Gates
) -> None:
    """To its clock, every message that anybody has held is older than the visibility timeout: it hands out copies."""
    gate = gates.close("after ORD-1")
    # Its one place is taken, so that what is handed out goes to the other.
    start_worker(SHOP, concurrency=1, prefetch=1, visibility_timeout=300)
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    thief = start_wrong(600.0, concurrency=1, visibility_timeout=300)
    thief.wait_for_log("Deferred", timeout=30)
    gate.open()
    assert first.get(timeout=30) == DONE
    assert app.module.charge.delay("ORD-1").get(timeout=30) == DONE
    assert journal.count("started") == 1
