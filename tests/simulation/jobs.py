"""Jobs of RQ: its own workers, with a horse for each job, over a Redis that is within this process."""

from __future__ import annotations

import copy
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import fakeredis
import pytest
import redis
import rq
from greenlet import GreenletExit, getcurrent
from redis import ConnectionPool, RedisError
from redis.client import Pipeline
from rq import Queue, Retry, get_current_job
from rq.job import Job, JobStatus
from rq.registry import ScheduledJobRegistry
from rq.scheduler import RQScheduler
from rq.serializers import resolve_serializer
from rq.timeouts import BaseDeathPenalty, JobTimeoutException
from rq.worker import Worker

from celery_idempotent.core import binding
from celery_idempotent.rq import IdempotentWorker, delivery, idempotent
from celery_idempotent.rq import horse as of_horses
from celery_idempotent.rq import job as jobs
from celery_idempotent.rq import worker as of_workers
from celery_idempotent.stores import Claim, Lease, Reason, Release, State

from . import celery as simulated
from .celery import (
    BEGAN,
    ENDINGS,
    EPOCH,
    INFINITE,
    KEPT,
    LEASE_TTL,
    MAX_CRASHES,
    MOMENT,
    PATCHES,
    Host,
    HostStore,
    OfHost,
    Thread,
)
from .requests import Requests
from .world import Process, Step

QUEUE = "charges"
#: Seconds between two looks of a worker at its horse, after which a job is interrupted, and between maintenances.
INTERVAL, JOB_TIMEOUT, MAINTENANCE = 2, 60, 30
#: Seconds between two looks of an idle worker at its queue.
IDLE = 2.0
#: When jobs are enqueued that are not at once.
LATER = (10.0, 30.0, 100.0)
#: Retries that a job may have: RQ starts them at once, or as its scheduler finds them due.
RETRIES: list[Retry | None] = [None, None, Retry(max=2), Retry(max=2, interval=3)]
#: How often a body may return a retry.
RETRIES_RETURNED = 3
#: Commands that change nothing, in which a process that is killed has done as much before as after.
READS = ("HGET", "HGETALL", "EXISTS", "TTL", "ZSCORE", "LLEN", "ZRANGEBYSCORE", "LRANGE", "SMEMBERS", "ZRANGE", "INFO")
#: The keys of what waits for a worker, and of what waits for its time.
LOOKED_AT = (f"{Queue.redis_queue_namespace_prefix}{QUEUE}", ScheduledJobRegistry.key_template.format(QUEUE))
#: How a process ends that is killed.
KILLED = 9
FINAL = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED)


@idempotent(key="key", store="memory://", lease_ttl=LEASE_TTL, max_crashes=MAX_CRASHES, failure_ttl=KEPT, history=False)
def charge(key: str) -> Any:
    """Charge a customer."""
    return simulated.current.law.charge_customer(key)


def step(command: str, call: Callable[[], Any], commands: Iterable[Sequence[Any]]) -> Any:
    """Send something to Redis: a step before it is there, and one before its reply is here."""
    process = getcurrent()
    if getattr(process, "killed", False):
        raise GreenletExit
    if not isinstance(process, Process) or command in READS:
        return call()
    world = simulated.current.world
    world.step()
    found = call()
    if any(LOOKED_AT[0] in command or LOOKED_AT[1] in command for command in commands):
        simulated.current.law.changed = simulated.current.law.length_changed = True
    world.step()
    return found


class Connection(fakeredis.FakeRedisConnection):
    """A connection over which commands go as they are: to write and parse them takes longer than to carry them out."""

    def _connect(self) -> Any:
        socket = super()._connect()
        # One thread asks and reads.
        socket.responses, socket.response_ready = SimpleQueue(), SimpleNamespace(set=lambda: None)
        socket._db.condition = SimpleNamespace(notify_all=lambda: None)
        return socket

    def pack_command(self, *args: Any) -> list[list[bytes]]:
        encode, (name, *others) = self.encoder.encode, args
        encoded = [each.encode() if type(each) is str else encode(each) for each in others]
        return [[*name.encode().split(), *encoded]]

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[list[bytes]]:
        return [fields for command in commands for fields in self.pack_command(*command)]

    def send_command(self, *args: Any, **_: Any) -> None:
        self.send_packed_command(self.pack_command(*args))

    def send_packed_command(self, command: list[list[bytes]], check_health: bool = True) -> None:
        carry_out = self.get_socket()._process_command
        for fields in command:
            carry_out(fields)

    def read_response(self, *_: Any, **__: Any) -> Any:
        response = self.get_socket().responses.get_nowait()
        if isinstance(response, RedisError):
            raise response
        return response


class Pool(ConnectionPool):
    """The connections to a Redis that is empty."""

    def __init__(self) -> None:
        super().__init__(Connection, server=fakeredis.FakeServer())
        #: for what waits for nothing that another one sends
        self.alone = self.get_connection()


class Transaction(Pipeline):
    """Commands that are sent at once."""

    def execute(self, raise_on_error: bool = True) -> Any:
        commands = [command for command, _ in self.command_stack]
        return step("EXEC", lambda: self._execute(raise_on_error), commands)

    def _execute(self, raise_on_error: bool) -> Any:
        if self.connection is not None or self.scripts or not self.command_stack:
            return super().execute(raise_on_error)
        # Nothing is watched, and no other command comes in between.
        at_once = self.transaction or self.explicit_transaction
        execute = self._execute_transaction if at_once else self._execute_pipeline
        try:
            return execute(self.connection_pool.alone, self.command_stack, raise_on_error)
        finally:
            self.reset()

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        return step(args[0], lambda: super(Transaction, self).immediate_execute_command(*args, **options), [args])


class DirectRedis(redis.Redis):
    """A connection to Redis for what looks at it between two steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: what carries out all for which nothing is watched
        self._alone = self.connection_pool.alone

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self._alone.send_command(*args)
        return self.parse_response(self._alone, args[0], **options)


class Redis(DirectRedis):
    """A connection to Redis."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        setattr(self, "__rq_redis_server_version", (7, 0, 0))

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return step(args[0], lambda: super(Redis, self).execute_command(*args, **options), [args])

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return Transaction(self.connection_pool, self.response_callbacks, transaction, shard_hint)


# -- processes ---------------------------------------------------------------------------------------------------------


class Alarm:
    """The alarm of a process, which raises an error in it."""

    @staticmethod
    def set(seconds: float, error: Callable[[], BaseException]) -> None:
        process, world = getcurrent(), simulated.current.world
        Alarm.clear()
        process.interruptible = True

        def ring() -> None:
            world.sleep(seconds)
            process.alarm = None
            if process.interruptible:  # it rings once
                process.interruptible = False
                world.interrupt(process, error())

        process.alarm = world.start(process.host, f"{process.name} alarm", ring)

    @staticmethod
    def clear(seconds: int = 0) -> int:
        """Have it not ring; as `signal.alarm(0)`."""
        process: Any = getcurrent()
        process.interruptible = False
        alarm, process.alarm = getattr(process, "alarm", None), None
        if alarm is not None:
            simulated.current.world.kill(alarm)
        elif isinstance(process.interruption, process.rings):
            process.interruption = None
        return 0


class DeathPenalty(BaseDeathPenalty):
    """A time limit by an alarm."""

    def setup_death_penalty(self) -> None:
        getcurrent().rings = self._exception
        Alarm.set(self._timeout, lambda: self._exception(f"more than {self._timeout} s"))

    def cancel_death_penalty(self) -> None:
        Alarm.clear()


class Event:
    """An event for which one thread waits."""

    def __init__(self) -> None:
        self._is_set, self._waiting = False, None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._waiting.wakes = simulated.current.world.now

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            self._waiting = getcurrent()
            simulated.current.world.sleep(timeout)
            self._waiting = None
        return self._is_set


class JoinedThread(Thread):
    """A thread for which others wait."""

    def __init__(self, target: Callable[..., object], args: Sequence[Any] = (), **options: Any) -> None:
        super().__init__(lambda: target(*args), **options)

    def join(self) -> None:
        while self.is_alive():
            simulated.current.world.sleep(0.1)


class Pipes:
    """What `os` is to the pipe between a worker and its horse."""

    set_blocking = set_inheritable = staticmethod(lambda *_: None)

    def __init__(self) -> None:
        self._pipes: list[bytes] = []

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the process that asks."""
        return getcurrent().host.environ  # type: ignore[no-any-return]

    def pipe(self) -> tuple[int, int]:
        self._pipes.append(b"")
        return len(self._pipes) - 1, len(self._pipes) - 1

    def write(self, number: int, text: bytes) -> None:
        self._pipes[number] += text

    def read(self, number: int, most: int) -> bytes:
        text, self._pipes[number] = self._pipes[number][:most], self._pipes[number][most:]
        if not text:
            raise BlockingIOError
        return text

    def close(self, number: int) -> None:
        pass

    def getpid(self) -> int:
        return getcurrent().host.pid  # type: ignore[no-any-return]

    def getppid(self) -> int:
        return getcurrent().host.parent.pid  # type: ignore[no-any-return]


class OfProcess(Host):
    """A process of an operating system, with its threads.

    Arguments:
        law: The law.
        name: What a story calls it.
    """

    def __init__(self, law: Jobs, name: str) -> None:
        super().__init__(name)
        self.law = law
        law.pids += 1
        self.pid, self.environ = law.pids, {}
        self.status: int | None = None

    def kill(self, _: float) -> None:
        if self.status is None:
            self.law.world.tell(f"{self.name}: killed")
            self.end(KILLED)

    def end(self, status: int) -> None:
        """End this process with all its threads."""
        law, this = self.law, getcurrent()
        self.status = status
        for process in [process for process in law.world.processes if process.host is self and process is not this]:
            law.killed(process)
            law.world.kill(process)


class Horse(OfProcess):
    """The process of a job."""

    time_limit = JobTimeoutException
    child: Any = None

    def __init__(self, law: Jobs, parent: Main, worker: Any, job: Any) -> None:
        super().__init__(law, f"{parent.name}'s horse {job.id}")
        self.parent, self.job_id = parent, job.id
        self.environ = dict(parent.environ)
        # A child has copies of what its parent had.
        self.worker, self.job, self.execution = copy.copy(worker), copy.copy(job), copy.copy(worker.execution)
        self.worker.executions = dict(worker.executions)
        if vars(self.job).pop("set_status", None):  # of the copy, which a fork would have made of that too
            jobs.schedule_at_once(self.job)
        self.worker._is_horse = True
        #: who its delivery is for the store, and how often the store had failed its worker when it began
        self.owner, self.failures_before = "", parent.failures
        self.began = law.world.now

    @property
    def is_renewed(self) -> bool:
        """Whether its worker has been able to renew its lease all the time, and looks after it."""
        main = self.parent
        trouble = max(main.cut_off_until, main.slow_until, main.stopped_until)
        return main.status is None and main.failures == self.failures_before and trouble < self.began

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        yield from (("killed", 0.3), ("child stopped", 0.4), ("cut off from the store", 0.2), ("slow store", 0.2))
        if self.child is not None and self.child.interruptible:
            yield "soft time limit", 0.2

    def run(self) -> None:
        """Perform the job."""
        try:
            self.worker.perform_job(self.job, self.worker.queues[0], self.execution)
        except Exception as error:  # noqa: BLE001 - as RQ does
            self.law.world.tell(f"{self.name}: {error!r:.90}")
            self.end(256)
        else:
            self.law.world.tell(f"{self.name}: {self.law.status_of(self.job_id)}")
            if not self.failures:
                self.law.check_released(self)
            self.end(0)

    def end(self, status: int) -> None:
        super().end(status)
        if status == KILLED:
            self.law.killed_jobs.add(self.job_id)
        if self.parent.status is not None:
            self.law.orphans.add(self.job_id)
        self.law.horses.remove(self)
        if self.parent.waiting is not None:
            self.parent.waiting.wakes = self.law.world.now


class Main(OfProcess):
    """The process of a worker."""

    def __init__(self, law: Jobs, name: str, down_for: float = 0.0) -> None:
        super().__init__(law, name)
        self.horse: Horse | None = None
        self.waiting: Any = None
        #: its process, once all jobs are at their ends
        self.idle: Any = None
        self.worker: Any = None
        self.law.world.start(self, name, lambda: self.run(down_for))

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        if self.horse is not None:
            yield from (("killed", 0.2), ("killed with its horse", 0.2), ("child stopped", 0.1), ("slow store", 0.1))
            yield from (("cut off from the store", 0.1), ("shut down", 0.1), ("job stopped", 0.05))

    def suffer(self, kind: str) -> None:
        """Have something happen to it."""
        self.law.world.tell(f"{self.name}: {kind}")
        if kind == "shut down":
            self.worker._stop_requested = True
        elif kind == "job stopped":
            self.worker._stopped_job_id = self.horse.job_id
            self.horse.kill(0.0)
        else:
            self.horse.kill(0.0)
            self.kill(0.0)

    def kill(self, _: float) -> None:
        super().kill(0.0)
        self.law.start_again(self)

    def run(self, down_for: float) -> None:
        """Work, as `Worker.work` does."""
        world, law = self.law.world, self.law
        world.sleep(down_for)
        self.worker = worker = law.worker_class([QUEUE], name=f"{self.name}-{self.pid}", **law.options)
        worker.main, worker.hostname, worker.pid = self, self.name, self.pid
        worker.register_birth()
        while not worker._stop_requested:
            if worker.should_run_maintenance_tasks:
                worker.run_maintenance_tasks()
            if law.waiting:
                found = worker.dequeue_job_and_maintain_ttl(None)
                if found is not None:
                    worker.execute_job(*found)
                    worker.heartbeat()
                continue
            self.idle = getcurrent() if law.is_over() else None
            world.sleep(INFINITE if self.idle else IDLE)
        worker.register_death()
        law.start_again(self)


class Forking(Worker):
    """RQ's worker, whose horses are processes of the simulation."""

    death_penalty_class = DeathPenalty
    main: Main

    def _set_ip_address(self, connection: Any) -> None:
        self.ip_address = "unknown"

    def get_redis_server_version(self) -> Any:
        return (7, 0, 0)

    def procline(self, message: str) -> None:
        pass

    def fork_work_horse(self, job: Any, queue: Any) -> None:
        law, main = self.main.law, self.main
        main.horse = horse = Horse(law, main, self, job)
        law.horses.append(horse)
        self._horse_pid = horse.pid
        horse.child = law.world.start(horse, horse.name, horse.run)

    def kill_horse(self, sig: Any = None) -> None:
        assert self.main.horse is not None
        self.main.horse.kill(0.0)

    def wait_for_horse(self) -> tuple[Any, ...]:
        horse = self.main.horse
        wait_until_gone(self._horse_pid)
        assert horse is not None
        return horse.pid, horse.status, None

    def monitor_work_horse(self, job: Any, queue: Any, execution: Any) -> None:
        super().monitor_work_horse(job, queue, execution)
        self.main.horse = None


class Looking(IdempotentWorker, Forking):
    """The library's worker, likewise."""

    def wait_for_horse(self) -> tuple[Any, ...]:
        horse, law = self.main.horse, self.main.law
        reaped = super().wait_for_horse()
        assert horse is not None
        if horse.status and self.main.failures == law.failures_at_death.get(horse.pid):
            law.check_released(horse)
        return reaped


def wait_until_gone(pid: int) -> None:
    """Wait until a horse has ended."""
    process = getcurrent()
    main, law = process.host, simulated.current.law
    while main.horse.status is None:
        main.waiting = process
        try:
            law.world.sleep(INFINITE)
        finally:
            main.waiting = None
    law.failures_at_death.setdefault(pid, main.failures)


# -- the law -----------------------------------------------------------------------------------------------------------


class Jobs(Requests):
    """One effect for each key, however often a job is enqueued and performed; and each job comes to its end."""

    kind = "rq"
    #: after `MAX_CRASHES`, those of the job that was the last to have it; others may try
    most_deaths = 2 * MAX_CRASHES

    def begins(self, simulation: Any) -> None:
        pool = Pool()
        #: the law's own look at Redis, which is no step, and the processes' connection
        self.redis, connection = DirectRedis(connection_pool=pool), Redis(connection_pool=pool)
        self.queue, self.outside = Queue(QUEUE, connection=connection), Queue(QUEUE, connection=self.redis)
        self.pids = 0
        self.horses: list[Horse] = []
        #: by horse: how often the store had failed its worker when that saw its end
        self.failures_at_death: dict[int, int] = {}
        #: the jobs whose horses were killed when nobody looked after them any more
        self.orphans: set[str] = set()
        self.retries: dict[str, int] = {}
        self.calls: list[tuple[float, str, str]] = []
        of_horses.os = Pipes()  # type: ignore[assignment]
        choices, self.world = simulation.choices, simulation.world
        stock = choices.one_of("a stock worker", [False, False, False, True])
        self.worker_class: Any = Forking if stock else Looking
        self.options = {
            "connection": connection,
            "job_monitoring_interval": INTERVAL,
            "maintenance_interval": MAINTENANCE,
            "prepare_for_work": False,
            "log_job_description": False,
        }
        self.has_scheduler = choices.one_of("a scheduler", [True, True, True, False])
        if self.has_scheduler:
            self.redis.set(RQScheduler.get_locking_key(QUEUE), "scheduler", ex=10**7)
        self.looking: Any = None
        #: the keys that were claimed, in order
        self.claimed: dict[str, bool] = {}
        #: whether a body that fails returns a retry
        self.returns = choices.one_of("returns a retry", [False, True])
        #: by owner: after how many seconds its job is to be tried again
        self.again_after: dict[str, float] = {}
        #: by key: the owner that has released it last for a retry, the job, and when that is due
        self.retry_due: dict[str, tuple[str, str, float]] = {}
        #: the jobs of which a horse was killed, or was out of time before its body
        self.killed_jobs: set[str] = set()
        #: the owners of leases that were to end, and of those whose renewal came after that
        self.ending: set[str] = set()
        self.renewed_late: set[str] = set()
        #: when the scheduler has something to do, and whether that may have changed
        self.due, self.changed = INFINITE, True
        #: how many jobs wait for a worker, and whether that may have changed
        self.length, self.length_changed = 0, True
        super().begins(simulation)
        self.world.tell("stock workers" if stock else "workers of the library")

    def server(self, name: str) -> Any:
        return Main(self, name)

    def made(self, options: dict[str, Any]) -> Any:
        return charge

    def start_again(self, main: Main) -> None:
        """Start another worker in the place of one that has ended."""
        self.servers.remove(main)
        self.servers.append(Main(self, main.name, self.choices.one_of("down for", [0.0, 5.0, 20.0])))

    def hosts(self) -> list[Any]:
        return [*self.servers, *self.horses]

    def clients(self, keys: Sequence[str]) -> None:
        one_of = self.choices.one_of
        for key in keys:
            for number in range(one_of(f"jobs of {key}", [1, 2, 2, 3])):
                due = one_of("enqueued after", [0.0, 0.0, 0.0, *LATER])
                self.calls.append((self.world.now + due, key, f"{key}-{number}"))
        self.calls.sort()

    # -- what can happen -----------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        steps: list[Step] = []
        if self.calls and self.calls[0][0] <= self.world.now:
            steps.append(("a job is enqueued", 2.0, self._enqueue, None))
        if self._scheduled() <= self.world.now and (self.looking is None or self.looking.dead):
            steps.append(("the scheduler looks", 4.0, self._look, None))
        return steps

    def next_step(self) -> float:
        enqueued = self.calls[0][0] if self.calls else INFINITE
        return min(enqueued, max(self._scheduled(), self.world.now))

    def _scheduled(self) -> float:
        if self.changed:
            self.changed = False
            found = self.redis.zrange(LOOKED_AT[1], 0, 0, withscores=True)
            self.due = found[0][1] - BEGAN if found and self.has_scheduler else INFINITE
            if self.waiting:
                self._wake()
        return self.due

    @property
    def waiting(self) -> int:
        """How many jobs wait for a worker."""
        if self.length_changed:
            self.length_changed, self.length = False, self.redis.llen(LOOKED_AT[0])
        return self.length

    def _wake(self) -> None:
        for main in self.servers:
            if main.idle is not None:
                main.idle.wakes = self.world.now

    def _enqueue(self, _: None) -> None:
        _, key, job_id = self.calls.pop(0)
        retry = self.choices.one_of("retries", RETRIES if self.has_scheduler else RETRIES[:3])
        self.retries[job_id] = retry.max if retry else 0
        self.outside.enqueue_call(
            charge, (key,), job_id=job_id, timeout=JOB_TIMEOUT, result_ttl=-1, failure_ttl=-1, retry=retry
        )
        self.length_changed = True
        self.world.tell(f"{job_id} is enqueued")

    def _look(self, _: None) -> None:
        scheduler = RQScheduler([QUEUE], connection=self.redis, name="scheduler")
        scheduler._connection, scheduler._acquired_locks = self.queue.connection, {QUEUE}
        self.looking = self.world.start(Host("scheduler"), "scheduler", scheduler.enqueue_scheduled_jobs)

    # -- the body ------------------------------------------------------------------------------------------------------

    def charge_customer(self, key: str) -> Any:
        """Charge a customer."""
        world, choices = self.world, self.choices
        run, job = self.begin(key), get_current_job()
        assert job is not None
        run.job_id = job.id
        try:
            world.sleep(choices.one_of(f"{key}: before", self.long), f"run {run.number} of {key} begins, by {job.id}")
            self.charge(run)
            world.sleep(choices.one_of(f"{key}: after", self.long), f"run {run.number} has charged {key}")
            if choices.chance(f"{key}: fails", self.fails):
                if self.returns:
                    run.ending, pauses = "retried", [0, 3] if self.has_scheduler else [0]
                    pause = choices.one_of(f"{key}: again after", pauses)
                    if (job.number_of_retries or 0) < RETRIES_RETURNED:
                        self.again_after[run.held.lease.owner] = pause
                    return Retry(max=RETRIES_RETURNED, interval=pause)
                if job.should_retry:
                    self.again_after[run.held.lease.owner] = job.get_retry_interval()
                raise ValueError("no")
        except BaseException:
            run.ending = "failed"
            raise
        run.ending = "returned"
        return f"receipt {run.number}"

    # -- what must hold ------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return whether all jobs are at their ends."""
        return not self.calls and all(
            self.status_of(job_id) in FINAL or self.is_lost_by_rq(job_id) for job_id in self.retries
        )

    def is_lost_by_rq(self, job_id: str) -> bool:
        """Return whether a job is nowhere that its horse has begun late and not ended.

        RQ takes a job off its lists that has not begun, as its worker was killed and its horse was stopped.
        """
        begun = job_id in self.orphans and self.status_of(job_id) is JobStatus.STARTED
        return begun and not self.redis.exists(self.outside.started_job_registry.key)

    def status_of(self, job_id: str) -> Any:
        """Return what RQ says of a job."""
        status = self.redis.hget(Job.key_for(job_id), "status")
        return JobStatus(status.decode()) if status else None

    def watch(self, verb: str, args: Any, host: Any, call: Callable[[], Any]) -> Any:
        if verb in ENDINGS:
            self.ending.add(args[0].owner)
        elif verb == "renew":  # between two statements a thread may have its list of leases already
            self.renewed_late |= {lease.owner for lease in args[0]} & self.ending
        if verb == "release":
            return self.note_retry(*args, super().watch(verb, args, host, call))
        if verb != "acquire":
            return super().watch(verb, args, host, call)
        before = self.simulation.store.get(args[0].key)
        answer = super().watch(verb, args, host, call)
        if isinstance(answer, Lease):
            self.check_turn(args[0])
        self.claimed[args[0].key] = True
        if isinstance(host, Horse):
            host.owner = args[0].owner
            host.ripe_for = {"soft time limit": MOMENT}  # with a grant that it has not heard of
        if isinstance(answer, Lease) and answer.taken_over and self.worker_class is Looking:
            for horse in self.horses:
                if horse.owner == before.owner and horse.is_renewed and self.world.now - horse.began < JOB_TIMEOUT:
                    self.fail(f"the lease of {horse.name} ran out, which its worker was to renew")
        return answer

    def note_retry(self, lease: Lease, release: Release, answer: Any) -> Any:
        """Note when what has released its lease is to be tried again; return the store's answer."""
        owner = lease.owner
        last, *_ = self.retry_due.get(lease.key, ("",))
        if answer and release.reason is Reason.RETRY and owner != last and owner in self.again_after:
            due = self.world.now + self.again_after[owner]
            self.retry_due[lease.key] = (owner, lease.claim.task_id, due)
        return answer

    def check_turn(self, claim: Claim) -> None:
        """Check that a job which gets a lease leaves none out that is to be tried again."""
        _, job, due = self.retry_due.pop(claim.key, ("", "", 0.0))
        if claim.task_id != job and self.world.now < due - 0.01:
            self.fail(f"{claim.task_id} begins before the retry of {job} is due")

    def interrupted(self, process: Process) -> None:
        super().interrupted(process)
        horse = process.host
        if isinstance(horse, Horse) and not any(run.server is horse for run in self.runs):
            self.killed_jobs.add(horse.job_id)

    def check_released(self, horse: Horse) -> None:
        """Check that a horse that has ended has no lease, as could be seen to."""
        for key in self.claimed:
            record = self.simulation.store.get(key)
            held = record is not None and record.state is State.IN_PROGRESS and record.owner == horse.owner
            if held and horse.owner not in self.renewed_late:
                self.fail(f"the lease of {horse.name} was not released")

    def check_failed(self, job_id: str, status: JobStatus) -> None:
        """Check that a job that has failed has had all its retries, where nothing has happened to it."""
        endings = [run.ending for run in self.runs if run.job_id == job_id]
        again = self.returns and status is JobStatus.FAILED and job_id not in self.killed_jobs
        if again and 0 < len(endings) <= RETRIES_RETURNED and endings[-1] == "retried":
            self.fail(f"{job_id} failed after {len(endings)} runs, of {RETRIES_RETURNED + 1}")
        undisturbed = self.simulation.untroubled and self.simulation.calm and not self.deadly
        if undisturbed and (len(endings) <= self.retries[job_id] or set(endings) - {"failed", "retried"}):
            self.fail(f"{job_id} is {status.value} after {len(endings)} runs, and nothing has happened")

    def check(self) -> None:
        super(Requests, self).check()
        for horse in list(self.horses):
            if horse.doomed:
                horse.doomed = False
                horse.kill(0.0)

    def ended(self) -> None:
        for job_id in self.retries:
            key = job_id.rpartition("-")[0]
            status = self.status_of(job_id)
            if self.is_lost_by_rq(job_id):
                self.counts["jobs lost by RQ"] += 1
                continue
            if status not in FINAL:
                self.fail(f"{job_id} is {status} for ever")
            self.counts[f"jobs {status.value}"] += 1
            if status is JobStatus.FINISHED:
                value = Job.fetch(job_id, connection=self.redis).return_value()
                if value not in {f"receipt {run.number}" for run in self.runs}:
                    self.fail(f"{job_id} has ended with {value!r}, which no run has returned")
                self.answers[key].add(("201 Created", value.encode()))
            else:
                self.check_failed(job_id, status)
        super().ended()


# -- clocks ------------------------------------------------------------------------------------------------------------


def _patch(patch: pytest.MonkeyPatch) -> None:
    def seconds() -> float:
        return BEGAN + simulated.current.world.now

    def now() -> datetime:
        return EPOCH + timedelta(seconds=simulated.current.world.now)

    time = SimpleNamespace(time=seconds, monotonic=seconds, sleep=lambda pause: simulated.current.world.sleep(pause))
    replaced = {
        "now": now,
        "current_timestamp": lambda: int(seconds()),
        "uuid4": new_id,
        "resolve_serializer": lru_cache(resolve_serializer),  # which looks through all that a serializer has
    }
    for found in pkgutil.walk_packages(rq.__path__, "rq."):
        if found.name.startswith(("rq.cli", "rq.contrib")):
            continue
        module = importlib.import_module(found.name)
        for name, value in replaced.items():
            if hasattr(module, name):
                patch.setattr(module, name, value)
    for name in ("_helpers", "_socket._base", "model._stream"):
        patch.setattr(importlib.import_module(f"fakeredis.{name}"), "time", time)
    patch.setattr(Job, "set_status", _at_once(Job.set_status))
    patch.setattr(jobs, "now", now)
    patch.setattr(jobs, "opened", lambda wanted: HostStore(simulated.current))
    for name in ("heartbeat", "breaker"):
        patch.setattr(binding, name, OfHost(name))
    patch.setattr(jobs, "random", SimpleNamespace(uniform=simulated.uniform))
    for module in (delivery, of_workers):
        patch.setattr(module, "monotonic", lambda: simulated.current.world.now)
    patch.setattr(of_horses, "os", os)
    patch.setattr(of_workers, "_wait_for", wait_until_gone)
    patch.setattr(of_workers, "signal", SimpleNamespace(alarm=Alarm.clear))
    patch.setattr(of_workers, "threading", SimpleNamespace(Thread=JoinedThread, Event=Event))


def _at_once(write: Callable[..., None]) -> Callable[..., None]:
    """Return RQ's own method without a fault of it, where the library does not stand in for it.

    What writes that a job is scheduled before it schedules it, and is killed in between, loses the job.
    """

    def set_status(job: Any, status: JobStatus, pipeline: Any = None) -> None:
        host = getattr(getcurrent(), "host", None)
        main = host if isinstance(host, Main) and host.law.worker_class is Looking else None
        cared_for = isinstance(host, Horse) or (main and main.horse and main.horse.job_id == job.id)
        if pipeline is None and status is JobStatus.SCHEDULED and not cared_for:
            job._status = status
        else:
            if pipeline is None and status is JobStatus.SCHEDULED:  # which would do most harm if it ended here
                simulated.current.ripen(host.parent if isinstance(host, Horse) else host, "killed with its horse")
            write(job, status, pipeline=pipeline)

    return set_status


def new_id() -> Any:
    """Return what stands for a random number."""
    simulated.current.law.pids += 1
    return SimpleNamespace(hex=f"{simulated.current.law.pids:08}")


PATCHES.append(_patch)
