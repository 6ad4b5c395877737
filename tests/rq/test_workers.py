"""The decorator on every kind of RQ's workers, for functions of every kind; and a plain function everywhere else."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import pickle
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from rq import Queue, Retry, connections
from rq.decorators import job as rq_job
from rq.serializers import JSONSerializer

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.rq import delivery, idempotent
from celery_idempotent.rq.job import id_of
from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.rq.conftest import StartRq
from tests.support.rq import shop
from tests.support.rq.desk import Desk, hearing
from tests.support.rq.nodes import burst
from tests.support.sentinel import Watch
from tests.support.servers import open_client
from tests.support.waiting import wait_until

#: That of RQ 2.6 writes the connection's options into a script, and those of newer redis-py cannot be written.
SPAWNS = hasattr(connections, "get_connection_kwargs") or int(redis.__version__.split(".")[0]) < 6

needs_spawning = pytest.mark.skipif(not SPAWNS, reason="the SpawnWorker of this RQ does not work with this redis-py")

# -- kinds of workers --------------------------------------------------------------------------------------------------


def twice(desk: Desk, start: Any) -> None:
    """Enqueue operations twice, and see that each took effect once and both jobs have its result."""
    charges = [desk.queue.enqueue(shop.charge, "ORD-1") for _ in range(2)]
    awaited = [desk.queue.enqueue(shop.charge_slowly, "ORD-2") for _ in range(2)]
    start()
    for jobs, result in ((charges, "ORD-1 charged 1"), (awaited, "ORD-2 charged 1")):
        assert [desk.wait_for(job, "finished").return_value() for job in jobs] == [result] * 2
    assert sorted(entry.key for entry in desk.journal.entries("charged")) == ["ORD-1", "ORD-2"]
    assert {record.state for record in desk.records()} == {State.COMPLETED}


@pytest.mark.smoke
def test_a_simple_worker_runs_each_operation_once(desk: Desk) -> None:
    twice(desk, desk.burst)


@pytest.mark.smoke
def test_a_worker_that_forks_runs_each_operation_once(desk: Desk, start_rq: StartRq) -> None:
    twice(desk, start_rq)


@pytest.mark.nightly
@needs_spawning
def test_a_worker_that_spawns_runs_each_operation_once(desk: Desk, start_rq: StartRq) -> None:
    twice(desk, lambda: start_rq(worker="rq.SpawnWorker"))


@pytest.mark.parametrize("worker", ["rq.Worker", pytest.param("rq.SpawnWorker", marks=needs_spawning)])
def test_a_worker_with_a_process_for_each_job_refuses_a_store_that_dies_with_it(
    desk: Desk, start_rq: StartRq, worker: str
) -> None:
    for _ in range(2):
        assert desk.run(shop.charge_forgetfully, worker).return_value() == f"{worker} charged 1"
    job = desk.queue.enqueue(shop.charge_forgetfully, "ORD-1")
    start_rq(worker=worker)
    failed = desk.wait_for(job, "failed")
    assert "Expected a store that all processes share, got memory://" in failed.latest_result().exc_string
    assert desk.effects("ORD-1") == 0


def test_workers_of_a_pool_run_each_operation_once(desk: Desk, start_rq: StartRq) -> None:
    twice(desk, lambda: start_rq(command="worker-pool", options=["--num-workers", "2"], ready=False))


def test_several_workers_of_several_queues_run_an_operation_once(desk: Desk, start_rq: StartRq) -> None:
    queues = [Queue(name, connection=desk.connection) for name in ("first", "second")]
    jobs = [queue.enqueue(shop.charge, "ORD-1") for queue in queues for _ in range(2)]
    for _ in range(2):
        start_rq(queues=["first", "second"], ready=False)
    for job in jobs:
        assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"
    assert desk.effects("ORD-1") == 1


@pytest.mark.smoke
def test_a_job_that_runs_where_it_is_enqueued_runs_each_operation_once(desk: Desk) -> None:
    queue = Queue(is_async=False, connection=desk.connection)
    jobs = [queue.enqueue(shop.charge, "ORD-1") for _ in range(2)]
    assert [job.return_value() for job in jobs] == ["ORD-1 charged 1"] * 2
    assert desk.effects("ORD-1") == 1


def test_an_async_function_is_awaited_where_it_is_enqueued(desk: Desk) -> None:
    queue = Queue(is_async=False, connection=desk.connection)
    jobs = [queue.enqueue(shop.charge_slowly, "ORD-1") for _ in range(2)]
    assert [job.return_value() for job in jobs] == ["ORD-1 charged 1"] * 2


@pytest.mark.smoke
def test_jobs_written_as_json_are_answered_alike(desk: Desk) -> None:
    queue = Queue(connection=desk.connection, serializer=JSONSerializer)
    value = {"a": [1, 2.5, None, True], "b": ""}
    jobs = [queue.enqueue(shop.answer, "ORD-1", value) for _ in range(2)]
    burst(queue)
    assert [job.return_value(refresh=True) for job in jobs] == [value, value]
    assert desk.effects("ORD-1") == 1
    assert b"\x80" not in desk.record().payload


def test_jobs_whose_results_are_written_as_json_are_answered_alike(desk: Desk) -> None:
    """Also where RQ pickles what the job returns."""
    jobs = [desk.queue.enqueue(shop.answer_json, "ORD-1", {1: (2, 3)}) for _ in range(2)]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == [{"1": [2, 3]}] * 2


def test_no_time_limit_ends_the_lease_of_a_job_that_runs_where_it_is_enqueued(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the job: RQ has none there."""
    monkeypatch.setattr(delivery, "GRACE", 0.0)
    sync, queued = Queue(is_async=False, connection=desk.connection), desk.queue
    left = [queue.enqueue(shop.lease_left, f"ORD-{n}", job_timeout=1) for n, queue in enumerate((sync, queued))]
    desk.burst()
    assert [desk.again(job).return_value() for job in left] == [float("inf"), pytest.approx(1.0, abs=1.0)]


VALUES = [None, 0, False, "", [], {}, (1, 2), {1, 2}, b"\x00", shop.Till("back")]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_replay_has_the_value_and_type_of_the_first(desk: Desk, value: Any) -> None:
    jobs = [desk.queue.enqueue(shop.answer, "ORD-1", value) for _ in range(2)]
    desk.burst()
    first, second = [desk.again(job) for job in jobs]
    assert (first.get_status(), second.get_status()) == ("finished", "finished"), desk.error(second)
    assert pickle.dumps(second.return_value()) == pickle.dumps(first.return_value())
    assert desk.effects("ORD-1") == 1


def test_stores_on_connections_of_the_past_are_not_kept(desk: Desk) -> None:
    def stores() -> int:
        gc.collect()
        return sum(type(found) is RedisStore for found in gc.get_objects())  # proxies lie about their class

    def charge(order: str) -> Any:
        with open_client(desk.url) as client:
            return Queue(is_async=False, connection=client).enqueue(shop.charge, order).return_value()

    charge("ORD-0")
    before = stores()
    assert [charge("ORD-1") for _ in range(5)] == ["ORD-1 charged 1"] * 5
    assert stores() <= before + 1


def test_records_are_where_connections_of_the_user_s_own_kind_find_the_queue(desk: Desk) -> None:
    class Tunnel(redis.Connection):
        def __init__(self, *, entrance: int, **options: Any) -> None:
            super().__init__(**{**options, "port": entrance})

    where = urlsplit(desk.url)
    assert where.port is not None
    pool = redis.ConnectionPool(
        connection_class=Tunnel, host=where.hostname, port=1, entrance=where.port, db=int(where.path[1:])
    )
    with redis.Redis(connection_pool=pool) as client:
        queue = Queue(is_async=False, connection=client)
        assert queue.enqueue(shop.charge, "ORD-1").return_value() == "ORD-1 charged 1"
    assert desk.settled()
    pool.disconnect()


def test_records_are_behind_the_sentinels_where_the_worker_of_a_pool_finds_the_queue(desk: Desk) -> None:
    """RQ has it connect by a pool of another kind than that of sentinels."""
    where = urlsplit(desk.url)
    assert where.port is not None
    with Watch({"orders": where.port}) as watch:
        sentinel = redis.sentinel.Sentinel([("127.0.0.1", watch.port)])
        with sentinel.master_for("orders", db=int(where.path[1:])) as client:
            kind, connects, options = connections.parse_connection(client)
            with kind(connection_pool=redis.ConnectionPool(connection_class=connects, **options)) as inherited:
                queue = Queue(is_async=False, connection=inherited)
                assert queue.enqueue(shop.charge, "ORD-1").return_value() == "ORD-1 charged 1"
                inherited.connection_pool.disconnect()
        for each in sentinel.sentinels:
            each.close()
    assert desk.settled()


# -- kinds of functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enqueued", "result"),
    [
        pytest.param(shop.Till("front").charge, "front: ORD-1 charged 1", id="a method"),
        pytest.param(shop.Till("front").charge_slowly, "front: ORD-1 charged 1", id="an async method"),
        pytest.param(shop.Till("front").charge_timed, "front: ORD-1 charged 1", id="a decorated method"),
        pytest.param(shop.Till.charge_any, "Till: ORD-1 charged 1", id="a classmethod"),
        pytest.param("tests.support.rq.shop.Till.charge_none", "ORD-1 charged 1", id="a staticmethod"),
        pytest.param("tests.support.rq.shop.charge", "ORD-1 charged 1", id="what is named"),
        pytest.param(shop.charge_slowly, "ORD-1 charged 1", id="an async function"),
        pytest.param(shop.charge_timed, "ORD-1 charged 1", id="a decorated function"),
        pytest.param(shop.charge_timed_within, "ORD-1 charged 1", id="what was decorated before"),
        pytest.param(functools.partial(shop.charge, cents=999), "ORD-1 charged 1", id="a partial"),
        pytest.param(functools.partial(shop.Till("front").charge), "front: ORD-1 charged 1", id="a method's partial"),
        pytest.param(functools.partial(shop.Till.charge_any), "Till: ORD-1 charged 1", id="a classmethod's partial"),
    ],
)
def test_it_guards(desk: Desk, enqueued: Any, result: str) -> None:
    jobs = [desk.queue.enqueue(enqueued, "ORD-1") for _ in range(2)]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == [result] * 2
    assert desk.effects("ORD-1") == 1


def test_methods_of_two_objects_are_one_operation_where_their_key_is(desk: Desk) -> None:
    jobs = [desk.queue.enqueue(shop.Till(name).charge, "ORD-1") for name in ("front", "back")]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == ["front: ORD-1 charged 1"] * 2


def test_what_another_decorator_does_around_ours_is_done_for_replays_too(desk: Desk) -> None:
    for function in (shop.charge_timed, shop.charge_timed_within):
        for _ in range(2):
            desk.run(function, function.__name__)
    assert desk.journal.count("entered", "charge_timed") == 2
    assert desk.journal.count("entered", "charge_timed_within") == 1


def test_rq_s_own_decorator_around_ours_enqueues_what_is_guarded(desk: Desk) -> None:
    enqueue = rq_job("default", connection=desk.connection, timeout=60)(shop.charge).delay  # type: ignore[attr-defined]
    jobs = [enqueue("ORD-1") for _ in range(2)]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == ["ORD-1 charged 1"] * 2
    assert desk.effects("ORD-1") == 1


@pytest.mark.smoke
def test_it_is_a_plain_function_outside_a_job(desk: Desk) -> None:
    charged = shop.charge_plainly("ORD-1"), shop.charge_plainly("ORD-1")
    assert charged == (1, 2)
    assert asyncio.run(shop_answer_async("ORD-2")) == "ORD-2"
    assert desk.records() == []


async def shop_answer_async(order: str) -> str:
    @idempotent(key="order")
    async def answer(order: str) -> str:
        return order

    return await answer(order)


@pytest.mark.smoke
def test_it_is_a_plain_function_within_another_job_and_within_itself(desk: Desk) -> None:
    job = desk.run(shop.within, "ORD-1")
    assert job.return_value() == [1, [1, None]]
    assert [id_of(record.task_id) for record in desk.records()] == [job.id]


def test_a_job_that_another_runs_within_itself_is_guarded_on_its_own(desk: Desk) -> None:
    assert desk.run(shop.nested, "ORD-1").return_value() == ["ORD-1 inner"] * 2
    assert desk.effects("ORD-1 inner") == 1
    assert len(desk.records()) == 2


def test_a_job_of_an_unguarded_function_guards_nothing_that_it_calls(desk: Desk) -> None:
    with hearing() as heard:
        results = [desk.run(shop.plain, "ORD-1").return_value() for _ in range(2)]
    assert results == ["ORD-1 charged 1", "ORD-1 charged 2"]
    assert [entry.fields["fence"] for entry in desk.journal.entries("charged")] == [0, 0]
    assert heard == []
    assert desk.records() == []


def test_it_stays_what_it_was_for_who_looks_at_it() -> None:
    assert shop.charge.__name__ == "charge"
    assert list(inspect.signature(shop.charge).parameters) == ["order", "cents", "ending"]
    assert inspect.isfunction(shop.charge)
    assert pickle.loads(pickle.dumps(shop.charge)) is shop.charge


@pytest.mark.skipif(sys.version_info < (3, 12), reason="inspect.markcoroutinefunction is new in Python 3.12")
def test_an_async_function_stays_a_coroutine_function_for_who_asks() -> None:
    assert inspect.iscoroutinefunction(shop.charge_slowly)


# -- declaring ---------------------------------------------------------------------------------------------------------


def test_generators_are_refused_where_they_are_declared() -> None:
    def generator(order: str) -> Any:
        yield order

    async def async_generator(order: str) -> Any:
        yield order

    for function in (generator, async_generator):
        with pytest.raises(ConfigurationError, match="it yields"):
            idempotent(key="order")(function)


def test_a_coroutine_that_a_function_returns_is_run_before_its_result_is_recorded(desk: Desk) -> None:
    jobs = [desk.run(shop.charge_later, "ORD-1") for _ in range(2)]
    assert [job.return_value() for job in jobs] == ["ORD-1 charged 1"] * 2
    assert desk.settled()
    assert desk.effects("ORD-1") == 1


def test_a_function_that_returns_work_which_is_not_done_yet_fails_and_says_so(desk: Desk) -> None:
    job = desk.run(shop.charge_each, "ORD-1", retry=Retry(max=2, interval=60))
    assert (job.get_status(), job.retries_left) == ("failed", 2)
    assert "have done its work when it returns, got generator" in desk.error(job)
    assert (desk.record().reason, desk.record().remaining) == ("failed", 0), "no retry is due"


def test_what_is_declared_wrongly_is_told_where_it_is_declared() -> None:
    with pytest.raises(ConfigurationError, match="parentheses"):
        idempotent(lambda order: order)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="did you mean"):
        idempotent(lease_tll=3)
    with pytest.raises(ConfigurationError, match="number"):
        idempotent(key="number")(lambda order: order)
    with pytest.raises(ConfigurationError, match="serializer"):
        idempotent(serializer="jsom")(lambda order: order)
    with pytest.raises(ConfigurationError, match="within"):
        idempotent()(classmethod(lambda cls: cls))  # type: ignore[type-var]


@pytest.mark.smoke
def test_nothing_of_celery_is_imported_to_declare_enqueue_or_perform(desk: Desk) -> None:
    script = f"""
import sys
import redis
import celery_idempotent.rq
from rq import Queue, SimpleWorker
from tests.support.rq import shop
connection = redis.Redis.from_url({desk.url!r})
queue = Queue(connection=connection)
job = queue.enqueue(shop.charge, "ORD-1")
SimpleWorker([queue], connection=connection).work(burst=True, logging_level="CRITICAL")
celery_idempotent.rq.IdempotentWorker
print(job.return_value(refresh=True), [name for name in sys.modules if name.partition(".")[0] == "celery"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "ORD-1 charged 1 []", done.stderr


def test_importing_the_adapter_imports_no_framework_until_a_name_is_used() -> None:
    script = """
import sys
import celery_idempotent.rq
print([name for name in sys.modules if name.partition(".")[0] in ("celery", "rq", "redis")])
try:
    celery_idempotent.rq.nothing
except AttributeError as error:
    print(error, dir(celery_idempotent.rq))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "module 'celery_idempotent.rq' has no attribute 'nothing' "
        "['IdempotentSpawnWorker', 'IdempotentWorker', 'current_lease', 'idempotent']",
    ]


def test_another_worker_sees_what_the_first_settled(desk: Desk, start_rq: StartRq) -> None:
    desk.run(shop.charge, "ORD-1")
    start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    wait_until(lambda: desk.status(job) == "finished")
    assert desk.effects("ORD-1") == 1
