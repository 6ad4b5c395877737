"""A broker that delivers at least once, and workers of one child each, around the library's own code."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
from billiard import einfo
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.backends import cache
from celery.exceptions import Ignore, WorkerLostError
from celery.worker import state
from kombu import transport as transports
from kombu.transport import memory, virtual

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import delivery, message
from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.core import backoff, breaker, guard, heartbeat, lease
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import memory as memory_store
from celery_idempotent.stores.memory import MemoryStore
from tests.support.unit.scripted import ScriptedStore

from .world import World

LEASE_TTL = 6.0
EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
WORKERS = 3
PREFETCH = 2

#: The one that runs now; the library's modules have one clock.
current: Simulation


class Channel(memory.Channel):
    """Where publishing ends."""

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        current.broker.publish(message)

    def _size(self, queue: str) -> int:
        return 0


class Transport(memory.Transport):
    """Kombu's in memory, that publishes to the simulated broker."""

    Channel = Channel
    driver_type = "redis"


class App(Celery):
    """An app on the simulation's clock."""

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=current.world.now)


def make_app(name: str) -> Celery:
    """Make an app of one process, with the task of the simulation."""
    transports.TRANSPORT_ALIASES["simulated"] = f"{__name__}:Transport"
    app = App("shop", broker="simulated://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        idempotency={"lease_ttl": LEASE_TTL, "history": False, "wait_timeout": 3},
        idempotency_store="memory://",
        broker_transport_options={"visibility_timeout": 30},
        task_publish_retry=False,
        result_expires=None,
        worker_hijack_root_logger=False,
    )

    @app.task(name="charge", base=IdempotentTask, bind=True, idempotency={"key": "order"}, max_retries=3, shared=False)
    def charge(self: Any, order: str) -> str:
        return current.law.body(self, order)

    app.finalize()
    app.simulated = name
    return app


class Broker:
    """Messages that wait, and those that workers have and did not ack.

    Arguments:
        world: The world.
        visibility: Seconds after which what was not acked is delivered again; None: when its worker is gone.
    """

    def __init__(self, world: World, visibility: float | None) -> None:
        self.world, self.visibility = world, visibility
        self.queue: list[str] = []
        self.unacked: dict[int, tuple[str, float, Worker]] = {}
        self._tag = 0

    def publish(self, message: Any) -> None:
        self.world.step()
        self.queue.append(json.dumps(message))
        headers = message["headers"]
        self.world.tell(f"    published {headers['id']} {'eta ' + headers['eta'][14:22] if headers.get('eta') else ''}")
        self.world.step()

    def deliver(self, worker: Worker) -> None:
        text = self.queue.pop(self.world.random.randrange(len(self.queue)))
        self._tag += 1
        self.unacked[self._tag] = (text, self.world.now, worker)
        worker.receive(text, self._tag)

    def ack(self, tag: int) -> None:
        if self.unacked.pop(tag, None):
            self.world.tell(f"    ack {tag}")

    def requeue(self, tag: int) -> None:
        found = self.unacked.pop(tag, None)
        if found:
            message = json.loads(found[0])
            message["properties"]["delivery_info"]["redelivered"] = message["headers"]["redelivered"] = True
            self.queue.append(json.dumps(message))
            self.world.tell(f"    {tag} is delivered again")

    def lose(self, worker: Worker) -> None:
        """The connection of a worker breaks."""
        if self.visibility is None:
            for tag in [tag for tag, (_, _, holder) in self.unacked.items() if holder is worker]:
                self.requeue(tag)

    def next_timeout(self) -> float | None:
        if self.visibility is None:
            return None
        return min((since + self.visibility for _, since, _ in self.unacked.values()), default=None)

    def expire(self) -> None:
        """Deliver again what has been with its worker for too long."""
        if self.visibility is not None:
            for tag in [t for t, (_, since, _) in self.unacked.items() if since + self.visibility <= self.world.now]:
                self.requeue(tag)


class WorkerStore(ScriptedStore):
    """The store, as one worker's child reaches it: each request and each reply is a step, and may be lost."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.simulation.store)
        self.worker = worker

    def _do(self, verb: str, *args: Any, **options: Any) -> Any:
        simulation, world = self.worker.simulation, self.worker.simulation.world
        world.step()
        fate = simulation.fate_of_call()
        if fate == "request lost":
            world.tell(f"    {verb} of {self.worker.name}: lost")
            raise StoreUnreachable("the store does not answer")
        try:
            answer = simulation.law.watch(verb, args, lambda: getattr(self.inner, verb)(*args, **options))
        except Exception as error:
            world.tell(f"    {verb} of {self.worker.name}: {error!r:.60}")
            world.step()
            raise
        world.tell(f"    {verb} of {self.worker.name}: {type(answer).__name__} {getattr(answer, 'verdict', '')}")
        world.step()
        if fate == "reply lost":
            raise StoreUnreachable("the store's reply was lost")
        return answer


class Request(IdempotentRequest):
    """A request whose main process has no threads of its own."""

    def _in_background(self, work: Callable[[], object]) -> Any:
        work()
        return SimpleNamespace(join=lambda timeout: None)


class Pool:
    """One child, which runs what the worker's main process gives it."""

    is_green = False
    signal_safe = True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def apply_async(
        self, target: Any, args: Any, callback: Any, error_callback: Any, accept_callback: Any, **_: Any
    ) -> Any:
        worker = self.worker

        def run() -> None:
            try:
                found = target(*args, app=worker.app)
            except Exception:  # noqa: BLE001 - as a child of billiard's returns it
                info = ExceptionInfo()
                worker.ends(lambda: error_callback(info))
            else:
                worker.ends(lambda: callback(found))

        accept_callback(1, current.world.now)
        worker.starts(run, error_callback)
        return None


class Worker:
    """A worker: its main process, which outlives its child, and the child."""

    def __init__(self, simulation: Simulation, name: str, app: Any) -> None:
        self.simulation, self.name, self.app = simulation, name, app
        self.stopped_until = 0.0
        self.main = SimpleNamespace(stopped_until=0.0)
        self.reserved: list[tuple[Any, int]] = []
        self.pool = Pool(self)
        self.task = app.tasks["charge"]
        self.down_until = 0.0
        self._forget()
        self.new_child()

    def _forget(self) -> None:
        self.child: Any = None
        self.beats: Any = None
        self.lost: Any = None
        self.ending: Any = None

    def new_child(self) -> None:
        """Fork a child: a process of its own, with a heartbeat and a breaker of its own."""
        binding = self.task._binding
        self.heartbeat = heartbeat.Heartbeat()
        binding.__dict__["_guard"] = guard.Guard(
            WorkerStore(self), binding.policy, self.codec, self.heartbeat, breaker.Breaker()
        )

    @cached_property
    def codec(self) -> Any:
        return self.task._binding._codec()

    @property
    def idle(self) -> bool:
        return self.child is None and self.ending is None and self.down_until <= self.simulation.world.now

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive(self, text: str, tag: int) -> None:
        broker, payload = self.simulation.broker, json.loads(text)
        received = virtual.Message(payload, channel=self.simulation.channel)
        request = Request(
            received,
            on_ack=lambda *_, **__: broker.ack(tag),
            on_reject=lambda *_: broker.requeue(tag) if _[-1] else broker.ack(tag),
            hostname=self.name,
            app=self.app,
            task=self.task,
            body=received.body,
            headers=received.headers,
            decoded=False,
        )
        self.reserved.append((request, tag))
        self.simulation.world.tell(f"{self.name} receives {request.id} as {tag}")

    def due(self) -> list[int]:
        now = self.app.now()
        return [at for at, (request, _) in enumerate(self.reserved) if request.eta is None or request.eta <= now]

    def next_eta(self) -> float | None:
        etas = [(r.eta - EPOCH).total_seconds() for r, _ in self.reserved if r.eta is not None]
        return min(etas, default=None)

    def execute(self, at: int) -> None:
        request, tag = self.reserved.pop(at)
        self.simulation.world.tell(f"{self.name} starts {request.id} of {tag}")
        self.request = request
        request.execute_using_pool(self.pool)

    # -- processes -----------------------------------------------------------------------------------------------------

    def starts(self, run: Callable[[], None], lost: Any) -> None:
        world = self.simulation.world
        self.lost = lost
        self.child = world.start(self, f"{self.name} child", run)
        if self.beats is None:
            self.beats = world.start(self, f"{self.name} heartbeat", self._beat)

    def _beat(self) -> None:
        world = self.simulation.world
        while self.heartbeat.holdings() or self.child is not None:
            pause = self.heartbeat.beat(world.now)
            world.sleep(min(pause, LEASE_TTL / 3))
        self.beats = None

    def ends(self, call: Callable[[], object]) -> None:
        """The child returned; the main process learns of it by a pipe."""
        self.simulation.world.step()
        self.child = None
        self.ending = self.simulation.world.start(self.main, f"{self.name} main", lambda: self._ended(call))

    def _ended(self, call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            self.ending = None

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill_child(self) -> None:
        world = self.simulation.world
        world.tell(f"{self.name}: child killed")
        lost, child = self.lost, self.child
        self.simulation.law.killed(child)
        self._kill("child", "beats")
        self.stopped_until = 0.0
        self.new_child()

        def notice() -> None:
            try:
                raise WorkerLostError("killed")
            except WorkerLostError:
                lost(ExceptionInfo())

        self.ending = world.start(self.main, f"{self.name} main", lambda: self._ended(notice))

    def kill(self, down_for: float) -> None:
        """Kill the whole worker; another is started in its place."""
        world = self.simulation.world
        world.tell(f"{self.name}: killed")
        if self.child is not None:
            self.simulation.law.killed(self.child)
        self._kill("child", "beats", "ending")
        self.reserved.clear()
        self.stopped_until = 0.0
        self.down_until = world.now + down_for
        self.new_child()
        self.simulation.broker.lose(self)

    def _kill(self, *names: str) -> None:
        for name in names:
            process = getattr(self, name)
            setattr(self, name, None)
            if process is not None and not process.dead:
                self.simulation.world.kill(process)

    def disconnect(self) -> None:
        """The connection to the broker breaks, and is there again; bodies go on."""
        self.simulation.world.tell(f"{self.name}: connection lost")
        self.reserved.clear()
        self.simulation.broker.lose(self)


class Simulation:
    """One schedule.

    Arguments:
        seed: Fixes it.
        law: What must hold.
        apps: One of a producer, and one for each worker.
        story: Gets its lines.
    """

    def __init__(self, seed: int, law: Any, apps: Sequence[Any], story: Callable[[str], object] | None = None) -> None:
        global current
        current = self
        self.world = World(seed, story)
        self.law = law
        chance = self.world.random
        self.store = MemoryStore()
        self.broker = Broker(self.world, chance.choice([None, 12.0, 30.0]))
        self.faults = chance.choice([0, 1, 1, 2, 2, 3, 4])
        self.lossy = chance.choice([0.0, 0.0, 0.03, 0.1])
        #: whether no holder has been stopped, killed or cut off from the store
        self.calm = not (self.faults and self.lossy)
        self.channel = SimpleNamespace(
            decode_body=lambda body, encoding=None: memory.Channel.decode_body(_CODED, body, encoding)
        )
        self.producer = apps[0]
        self.workers = [Worker(self, f"worker-{n}", app) for n, app in enumerate(apps[1:], 1)]
        self.published: list[tuple[str, str]] = []
        cache._DUMMY_CLIENT_CACHE.clear()
        for names in (state.active_requests, state.reserved_requests, state.revoked):
            names.clear()
        law.begins(self)

    def fate_of_call(self) -> str:
        if self.faults and self.world.chance(self.lossy):
            return self.world.random.choice(["request lost", "reply lost"])
        return ""

    def publish(self, order: str, task_id: str) -> None:
        self.producer.tasks["charge"].apply_async((order,), task_id=task_id)
        self.published.append((order, task_id))

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def run(self, most_steps: int = 5000) -> None:
        """Take steps until nothing is left to do."""
        chance = self.world.random
        calls = self.law.calls(chance)
        while True:
            self.world.steps += 1
            self.broker.expire()
            self.law.check()
            if self.world.steps > most_steps:
                self.law.fail(f"not at its end after {most_steps} steps")
            if self.world.steps > most_steps // 2:
                self.faults = 0
            choices, weights = self._choices(calls)
            if choices and not (self.world.chance(0.04) and self._advance(short=True)):
                chance.choices(choices, weights)[0]()
            elif not choices and not self._advance():
                if not calls:
                    break
                self.publish(*calls.pop(0))
        self.law.ended()

    def _choices(self, calls: list[tuple[str, str]]) -> tuple[list[Callable[[], object]], list[float]]:
        choices: list[tuple[Callable[[], object], float]] = []
        choices += [(partial(self.world.run, process), 10) for process in self.world.ready()]
        for worker in self.workers:
            up = worker.down_until <= self.world.now
            if up and self.broker.queue and len(worker.reserved) < PREFETCH:
                choices.append((lambda worker=worker: self.broker.deliver(worker), 4))
            if worker.idle and (due := worker.due()):
                choices.append((lambda worker=worker, at=due[0]: worker.execute(at), 6))
        if calls:
            choices.append((lambda: self.publish(*calls.pop(0)), 2))
        if self.faults and choices:
            choices += self._faults()
        return [choice for choice, _ in choices], [weight for _, weight in choices]

    def _faults(self) -> Iterator[tuple[Callable[[], object], float]]:
        def once(fault: Callable[[], object]) -> Callable[[], None]:
            def happen() -> None:
                self.faults -= 1
                self.calm = False
                fault()

            return happen

        for worker in self.workers:
            if worker.child is not None:
                yield once(worker.kill_child), 0.3
                long = self.world.random.uniform(0.5, 3) * LEASE_TTL
                yield once(lambda worker=worker, long=long: self._stop(worker, long)), 0.4
            if worker.child is not None or worker.reserved:
                yield once(lambda worker=worker: worker.kill(self.world.random.uniform(0, 20))), 0.1
                yield once(worker.disconnect), 0.1

    def _stop(self, worker: Worker, seconds: float) -> None:
        worker.stopped_until = self.world.now + seconds
        self.world.tell(f"{worker.name}: child stopped for {seconds:.1f} s")

    def _advance(self, *, short: bool = False) -> bool:
        """Move the clock to the next thing that waits for it; return whether there is one."""
        now = self.world.now
        times = [process.wakes for process in self.world.processes if process.wakes is not None]
        times += [worker.stopped_until for worker in self.workers]
        times += [worker.down_until for worker in self.workers if self.broker.queue or worker.reserved]
        times += [eta for worker in self.workers if (eta := worker.next_eta()) is not None]
        times += [timeout] if (timeout := self.broker.next_timeout()) is not None else []
        later = [time for time in times if time > now]
        if not later:
            return False
        ahead = min(later) - now
        self.world.now += min(ahead, self.world.random.expovariate(2.0)) if short else ahead
        return True


class NoThread:
    """The thread of a heartbeat, which is a process of the simulation."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True


_CODED = SimpleNamespace(codecs=virtual.Channel.codecs)


@contextmanager
def simulated_clock() -> Iterator[None]:
    """Have the library's modules on the clock of the current simulation, without threads and without its log."""

    def now() -> float:
        return current.world.now

    def sleep(seconds: float) -> None:
        current.world.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, heartbeat, lease, backoff, breaker):
            patch.setattr(module, "monotonic", now)
        patch.setattr(memory_store, "time", now)
        for module in (backoff, delivery):
            patch.setattr(module, "time", SimpleNamespace(sleep=sleep))
        patch.setattr(heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Thread": NoThread}))
        # Celery's copy of a traceback, with code compiled for each frame, takes longer than the rest of a delivery.
        patch.setattr(einfo, "Traceback", lambda tb, *_: None)
        patch.setattr(einfo.traceback, "format_exception", lambda *_, **__: [""])
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            with suppress(Ignore):
                message.random.seed()
