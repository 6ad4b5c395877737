"""A broker that delivers at least once, and workers of one child each, around the library's own code."""

from __future__ import annotations

import gc
import logging
import marshal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from datetime import datetime, timedelta, timezone
from functools import cached_property
from queue import Empty
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from billiard import einfo
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated
from celery import Celery, canvas
from celery.app import base as app_base
from celery.app import task as app_task
from celery.app.utils import Settings
from celery.backends import base, cache
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from greenlet import GreenletExit, getcurrent
from kombu import transport as transports
from kombu.serialization import dumps
from kombu.transport import memory, virtual

from celery_idempotent import IdempotentTask, add_hook, functions, remove_hook
from celery_idempotent.celery import app as bindings
from celery_idempotent.celery import delivery, message, unique
from celery_idempotent.celery import pool as shared
from celery_idempotent.celery import request as main_process
from celery_idempotent.celery import worker as shutdown
from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.celery.worker import ShutdownMarks
from celery_idempotent.core import backoff, breaker, guard, heartbeat, lease, reservations
from celery_idempotent.core.backoff import never
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.http import asgi, wsgi
from celery_idempotent.stores import memory as memory_store
from tests.support.unit.scripted import ScriptedStore

from .law import Unended
from .world import Choices, Condition, Lock, Process, Step, World

T = TypeVar("T")
LEASE_TTL = 6.0
#: Seconds for which a record is kept that is not settled, and one that is.
KEPT, SETTLED_KEPT = 60.0, 86400.0
#: Stands for the library's hour: with that, a retry that is due later would be waited for with hundreds of copies.
LONG_WAIT = 40.0
#: So many deaths in a row are one too many, unless a holder has renewed its lease for so many seconds.
MAX_CRASHES, STEADY = 5, LEASE_TTL * 9 / 3
#: Seconds after which the broker delivers again what was not acked.
VISIBILITY = 12.0
EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
#: When that is, in seconds since 1970.
BEGAN = EPOCH.timestamp()


def simulated(microseconds: int) -> float:
    """Return a store's time in seconds of the simulation."""
    return microseconds / 1e6 - BEGAN


WORKERS = 3
PREFETCH = 2
INFINITE = float("inf")

#: What may happen to a worker, and how likely it is.
FAULTS_OF_WORKERS = (("killed", 0.1), ("connection lost", 0.1), ("warm shutdown", 0.2), ("cold shutdown", 0.2))
FAULTS_OF_CHILDREN = (
    ("child killed", 0.3),
    ("child stopped", 0.4),
    ("soft time limit", 0.3),
    ("hard time limit", 0.2),
    ("cut off from the store", 0.1),
    ("slow store", 0.1),
    *FAULTS_OF_WORKERS,
)
#: For how many steps nothing happens after a fault: else all happen before there is anything to be lost.
QUIET = (0, 0, 5, 15, 30, 60)
#: Trouble that comes at once: for so many seconds, so many faults, each so many times as likely.
BURST, FAULTS_OF_BURST, HASTE = 2.0, 4, 12
#: How the thread is called that releases the lease of a child that was killed.
RELEASE = " release"
#: By what a child loses its lease while it lives.
LOSING = ("child stopped", "cut off from the store")
#: How often the broker is away when a copy or a retry is about to be published.
COPY_FAILS, RETRY_FAILS = 0.03, 0.3
#: Seconds after which processes have seen that their worker is about to end, and acted.
SEEN_WITHIN = 1.5
#: With what a delivery ends.
ENDINGS = ("settle", "release")
#: How much more likely a fault is that does most harm just now: a moment, or for a while.
MOMENT, WHILE = 20, 6
#: After so many steps nothing happens to anybody any more.
STEPS_WITH_FAULTS = 2500
#: Seconds after the last fault within which all is at its end: what waits for a lease, a retry or a body has had its
#: turn in a third of that. One that has its end later, but within `LONGEST`, is only long: its calls were nineteen
#: bodies of up to a minute each. A clock that moves by more than `AT_REST` has found nothing that goes on.
ENDS_WITHIN, LONGEST, AT_REST = 1000.0, 3000.0, 100.0
#: So many steps without a moment in between are a circle: none has taken a fourth of that.
STEPS_AT_ONCE = 1000
#: After so many steps it is not known whether there is an end.
MOST_STEPS = 50_000
#: After so many new objects Python's collector comes; schedules leave few circles.
COLLECTED = 10_000
#: What becomes of a request where not all is well: it is lost, or its reply is; the reply comes after a while; it is
#: carried out after its caller has given up.
FATES = ("request", "reply", "slow reply", "late")
#: Likewise where the way to the store is slow.
SLOW_FATES = ("", "slow reply", "slow reply", "late")
#: Of a task, the failures that are final.
PAYING = {"key": "order", "remember_failures": KeyError, "on_conflict": "wait"}
REFUNDING = {"key": "order", "remember_failures": KeyError, "on_conflict": "raise"}
BILLING = {"key": "order", "remember_failures": KeyError, "on_duplicate": "raise"}
#: One at a time, and no more.
TURNS = {"key": "document", "result_ttl": 0}
CHANNEL = SimpleNamespace(decode_body=lambda body, encoding=None: body)

#: The classes of workers, by their pools.
POOLS: dict[str, type[Worker]] = {}
#: What else is on the clock of the simulation.
PATCHES: list[Callable[[pytest.MonkeyPatch], None]] = []
#: The one that runs now; the library's modules have one clock.
current: Simulation


class Transport(memory.Transport):
    """What the library takes the broker for."""

    driver_type = "redis"


class Producer:
    """The end of Celery's publishing, and all that is left out of it is kombu's own."""

    def __init__(self, app: Any) -> None:
        self.connection = app.connection_for_write()

    def publish(
        self,
        body: Any,
        *,
        exchange: str,
        routing_key: str,
        serializer: str,
        headers: dict[str, Any],
        priority: int = 0,
        expiration: float | None = None,
        **options: Any,
    ) -> None:
        content_type, encoding, text = dumps(body, serializer)
        properties = {
            "correlation_id": options.get("correlation_id"),
            "reply_to": options.get("reply_to"),
            "priority": priority,
            "delivery_tag": "",
            "delivery_info": {"exchange": exchange, "routing_key": routing_key},
        }
        current.broker.publish(
            {
                "body": text,
                "content-type": content_type,
                "content-encoding": encoding,
                "headers": headers,
                "properties": properties,
            }
        )


class App(Celery):
    """An app on the simulation's clock, which asks its configuration once."""

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=current.world.now)

    def connection_for_write(self, *args: Any, **options: Any) -> Any:
        if args or options:
            return super().connection_for_write(*args, **options)
        return self._for_write

    @cached_property
    def _for_write(self) -> Any:
        return super().connection_for_write()

    def producer_or_acquire(self, producer: Any = None) -> Any:
        return nullcontext(producer or self._producer)

    @cached_property
    def _producer(self) -> Producer:
        return Producer(self)


class Known(Settings):
    """A configuration that does not change any more."""

    def __getitem__(self, name: str) -> Any:
        known = self.__dict__["known"]
        if name not in known:
            try:
                known[name] = super().__getitem__(name)
            except KeyError:
                known[name] = KeyError(name)
        if isinstance(known[name], KeyError):
            raise known[name]
        return known[name]

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = super().__getattr__(name)  # which is not called again
        return value


def make_app() -> Celery:
    """Make an app of one process, with the task of the simulation."""
    transports.TRANSPORT_ALIASES["simulated"] = f"{__name__}:Transport"
    app = App("shop", broker="simulated://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        idempotency={"lease_ttl": LEASE_TTL, "failure_ttl": KEPT, "history": False, "wait_timeout": 3},
        idempotency_store="memory://",
        broker_transport_options={"visibility_timeout": VISIBILITY},
        task_publish_retry=False,
        result_expires=None,
        worker_hijack_root_logger=False,
    )

    @app.task(name="charge", base=IdempotentTask, bind=True, idempotency={"key": "order"}, max_retries=3, shared=False)
    def charge(self: Any, order: str) -> str:
        return current.law.body(self, order)

    @app.task(name="pay", base=IdempotentTask, bind=True, idempotency=PAYING, max_retries=3, shared=False)
    def pay(self: Any, order: str) -> str:
        return current.law.body(self, order)

    @app.task(name="refund", base=IdempotentTask, bind=True, idempotency=REFUNDING, max_retries=3, shared=False)
    def refund(self: Any, order: str) -> str:
        return current.law.body(self, order)

    @app.task(name="index", base=IdempotentTask, bind=True, idempotency=TURNS, max_retries=3, shared=False)
    def index(self: Any, document: str, version: int) -> None:
        current.law.body(self, document, version)

    @app.task(name="pack", base=IdempotentTask, bind=True, max_retries=3, shared=False)
    def pack(self: Any, order: str, number: int) -> str:
        return current.law.body(self, order, number)

    @app.task(name="ship", base=IdempotentTask, bind=True, max_retries=3, shared=False)
    def ship(self: Any, parts: Any, order: str) -> str:
        return current.law.body(self, order, parts)

    _add_tasks(app)
    app.finalize()
    app.guarded = [app.tasks[name] for name in ("charge", "pay", "refund", "bill", "mail", "index", "pack", "ship")]
    for task in app.guarded:
        task.codec = task._binding._codec()
    app.conf.__dict__["known"] = {}
    object.__setattr__(app.conf, "__class__", Known)  # a configuration takes what is assigned for one of its values
    return app


def _add_tasks(app: Celery) -> None:
    """Declare a task that refuses duplicates of what is done, and one by which others are replaced."""

    def on_failure(self: Any, error: Exception, task_id: str, *_: Any) -> None:
        current.law.fails(task_id, error)

    billing = {"idempotency": BILLING, "on_failure": on_failure}

    @app.task(name="bill", base=IdempotentTask, bind=True, max_retries=3, shared=False, **billing)
    def bill(self: Any, order: str) -> str:
        return current.law.body(self, order)

    @app.task(name="mail", base=IdempotentTask, bind=True, idempotency={"key": "order"}, max_retries=3, shared=False)
    def mail(self: Any, order: str) -> str:
        return current.law.mail(self, order)


class Broker:
    """Messages that wait, and those that workers have and did not ack.

    With a visibility timeout it is as Redis is: a message that is delivered again keeps its tag, so that whichever
    worker acks it does so for all. Without one it is as RabbitMQ is: each delivery has its own.

    Arguments:
        world: The world.
        visibility: Seconds after which what was not acked is delivered again; None: when its worker is gone.
    """

    def __init__(self, world: World, visibility: float | None) -> None:
        self.world, self.visibility = world, visibility
        #: texts, with the tag that they had
        self.queue: list[tuple[bytes, int]] = []
        self.unacked: dict[int, tuple[bytes, float, Worker]] = {}
        self.away_until = 0.0
        #: how many messages were delivered again
        self.deliveries_again = 0
        self._tag = self._serial = 0
        self._published: Counter[int] = Counter()

    def publish(self, message: Any) -> None:
        world = self.world
        world.step()
        headers = message["headers"]
        copy = (headers.get("idempotency") or {}).get("copy")
        often = COPY_FAILS if copy else RETRY_FAILS if headers["retries"] else 0.0
        if often and world.choices.chance("the broker goes away", often if current.may_lose_broker else 0.0):
            current.broker_away()
        away = self.away_until > world.now
        if not away or world.choices.chance("the broker has what it did not confirm", 0.3):
            self._serial += 1
            self._published[id(getcurrent())] += 1
            message["properties"]["serial"] = self._serial
            current.law.published(message, getcurrent())
            self.queue.append((marshal.dumps(message), 0))
            eta = f"eta {headers['eta'][14:22]}" if headers.get("eta") else ""
            world.tell(f"    published {headers['id']} {eta}")
        world.step()
        if away:
            world.tell(f"    {headers['id']}: the broker does not answer")
            raise OSError("the broker does not answer")

    def published_by(self, process: Any) -> int:
        """Return how many messages a process has published."""
        return self._published[id(process)]

    def deliver(self, worker: Worker) -> None:
        text, tag = self.queue.pop(self.world.choices.one_of("which message", range(len(self.queue))))
        if not tag:
            self._tag = tag = self._tag + 1
        self.unacked[tag] = (text, self.world.now, worker)
        worker.receive(text, tag)

    def is_unacked(self, serial: int) -> bool:
        """Return whether a message was handed out, and would come again."""
        return any(marshal.loads(text)["properties"]["serial"] == serial for text, _, _ in self.unacked.values())

    def ack(self, tag: int) -> None:
        if self.unacked.pop(tag, None):
            self.world.tell(f"    ack {tag}")

    def requeue(self, tag: int) -> None:
        found = self.unacked.pop(tag, None)
        if found:
            self.deliveries_again += 1
            current.untroubled = False
            message = marshal.loads(found[0])
            message["properties"]["delivery_info"]["redelivered"] = True
            self.queue.append((marshal.dumps(message), tag if self.visibility else 0))
            self.world.tell(f"    {tag} is delivered again")

    def lose(self, worker: Worker) -> None:
        """The connection of a worker breaks."""
        for tag in [tag for tag, (_, _, holder) in self.unacked.items() if holder is worker]:
            self.requeue(tag)

    def next_timeout(self) -> float | None:
        if self.visibility is None or not self.unacked:
            return None
        _, since, _ = next(iter(self.unacked.values()))  # the first is with its worker for longest
        return since + self.visibility

    def expire(self) -> None:
        """Deliver again what has been with its worker for too long."""
        timeout = self.next_timeout()
        if timeout is not None and timeout <= self.world.now:
            now = self.world.now
            for tag in [tag for tag, (_, since, _) in self.unacked.items() if since + self.visibility <= now]:
                self.requeue(tag)


class Host:
    """What processes run on, and may be stopped or cut off from the store.

    Arguments:
        name: What a story calls it.
    """

    #: what its child raises whose time is over
    time_limit: type[Exception] = SoftTimeLimitExceeded
    #: what a body may end with itself
    ends_with: Sequence[str] = ("child", "child", "worker", "limit")

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped_until = 0.0
        self.cut_off_until = 0.0
        self.slow_until = 0.0
        #: whether it is only what a late request comes from
        self.is_way = False
        #: how many replies of the store are on their way to it
        self.replies = 0
        #: what would do most harm to it now, and how much more likely that is for it
        self.ripe_for: dict[str, float] = {}
        #: whether another delivery waits for what its child holds
        self.awaited = False
        #: how often the store has failed it, and how often it has failed it or was slow
        self.failures = self.troubles = 0
        #: whether what it runs kills it at its next step
        self.doomed: Any = False
        #: whether it is about to end, as its processes can see
        self.stopping = False
        self.new_process()
        #: for how long the holder remains that a delivery has met, as it was told
        self.holder_remains = INFINITE
        #: by owner: when a renewal failed that was not tried again yet
        self.renewals_failed: dict[str, float] = {}

    @property
    def whole(self) -> Host:
        """The process that it is, or is a part of."""
        return self

    def new_process(self) -> None:
        """Have what a process has for itself."""
        self.heartbeat, self.breaker = heartbeat.Heartbeat(), Breaker()
        self.confirmations = reservations.Confirmations(self.breaker)
        #: the leases that it shows
        self.shown: dict[int, Any] = {}

    def failed(self, verb: str, args: Any, now: float) -> None:
        """A request of this host got no answer."""
        if verb == "renew":
            self.renewals_failed.update({lease.owner: now for lease in args[0]})
        elif verb == "acquire":  # whatever the store has said
            self.holder_remains = INFINITE

    def waits(self, verb: str, seconds: float) -> None:
        """A request of this host waits for so long for its answer, in which its heartbeat tries no other."""
        if verb == "renew":
            self.renewals_failed = {owner: since + seconds for owner, since in self.renewals_failed.items()}

    def answered(self, verb: str, args: Any) -> None:
        """A request of this host got its answer."""
        if verb == "renew":
            for lease in args[0]:
                self.renewals_failed.pop(lease.owner, None)


class Breaker(breaker.Breaker):
    """A process's breaker: where it answers in place of the store, the store has failed the host that asked."""

    def _admit(self, store: Any, now: float) -> None:
        try:
            super()._admit(store, now)
        except StoreUnreachable:
            getcurrent().host.failures += 1
            raise


class HostStore(ScriptedStore):
    """The store, as a host reaches it: each request and each reply is a step, and may be lost.

    Arguments:
        simulation: The simulation.
        host: The host (default: whichever asks).
    """

    def __init__(self, simulation: Simulation, host: Host | None = None) -> None:
        super().__init__(simulation.store)
        self.simulation, self._host = simulation, host

    @property
    def host(self) -> Host:
        return self._host or getcurrent().host

    def settle_within(self, lease: Any, outcome: Any, *, ttl: float, using: Any) -> None:
        self._do("settle_within", lease, outcome, ttl=ttl, using=using)

    def _do(self, verb: str, *args: Any, **options: Any) -> Any:
        simulation, host, world = self.simulation, self.host, self.simulation.world
        simulation.law.asks(verb, args, host)
        # An ending that is interrupted before the store has it.
        host.ripe_for, since = {"soft time limit": MOMENT} if verb in ENDINGS else {}, world.now
        world.step()
        fate = simulation.fate_of_call(host)
        host.failures += fate not in ("", "slow reply")
        host.troubles += fate != ""
        if fate in ("request", "late"):
            if fate == "late" and verb != "settle_within":  # that is the connection's own, and ends with it
                self._send_late(verb, args, options)
            world.tell(f"    {verb} of {host.name}: {'late' if fate == 'late' else 'lost'}")
            world.sleep(world.choices.one_of("a lost request takes", [0.0, 0.0, 1.0]))
            host.failed(verb, args, world.now)
            raise StoreUnreachable("the store does not answer")
        try:
            answer = simulation.law.watch(verb, args, host, lambda: getattr(self.inner, verb)(*args, **options))
        except Exception as error:
            world.tell(f"    {verb} of {host.name}: {error!r:.60}")
            world.step()
            raise
        world.tell(f"    {verb} of {host.name}: {type(answer).__name__} {getattr(answer, 'verdict', '')}")
        if verb == "settle":
            getcurrent().settled_at = world.now
        host.replies += 1
        if verb == "renew" and getattr(getcurrent(), "interruptible", False):  # a body that looks at its lease
            simulation.ripen(host, "child stopped")
        try:
            slow = fate == "slow reply"
            seconds = world.choices.one_of("a slow reply takes", [0.5, 2.0, 4.0, 7.0]) if slow else 0.0
            host.waits(verb, seconds)
            world.sleep(seconds)
        finally:
            host.replies -= 1
        if fate == "reply":
            host.failed(verb, args, world.now)
            raise StoreUnreachable("the store's reply was lost")
        host.answered(verb, args)
        host.ripe_for = {}
        if verb == "acquire" and world.now - since > LEASE_TTL / 2:  # a lease that was granted late
            simulation.ripen(host, "soft time limit")
        simulation.law.told(verb, args, answer, host)
        return answer

    def _send_late(self, verb: str, args: Any, options: Any) -> None:
        """Have the store carry a request out after its caller has given up, or is gone."""
        law, world, asking = self.simulation.law, self.simulation.world, self.host
        seconds = world.choices.one_of("a late request takes", [0.5, 2.0, 8.0, 20.0])
        way = Host(f"the way from {asking.name}")
        way.is_way = True
        way.request = getattr(asking, "request", None)

        def arrive() -> None:
            world.sleep(seconds, f"{verb} arrives late")
            law.arrives_late(verb, args)
            try:
                law.watch(verb, args, way, lambda: getattr(self.inner, verb)(*args, **options))
            except Exception as error:  # noqa: BLE001 - nobody reads the answer
                world.tell(f"    {verb}: {error!r:.60}")

        world.start(way, f"{verb} from {asking.name}", arrive)


def install_store(app: Any, store: HostStore, heart: Any, own: Any) -> None:
    """Have the tasks of an app use a store, as one process does."""
    for task in app.guarded:
        task._binding.__dict__["_guard"] = guard.Guard(store, task._binding.policy, task.codec, heart, own)


def worker_of(main: Host) -> Worker:
    """Return the worker whose main process this is."""
    return next(worker for worker in current.workers if worker.main is main)


class Request(IdempotentRequest):
    """A request whose main process has no threads of its own."""

    def _in_background(self, work: Callable[[], object]) -> Any:
        if work == self._release_when_gone:
            main = getcurrent().host
            current.world.start(main, f"{main.name}{RELEASE}", work)
        else:
            work()
        return SimpleNamespace(join=lambda timeout: None)

    def on_success(self, *args: Any, **options: Any) -> Any:
        answer = super().on_success(*args, **options)
        self.worker.succeeded.add(self.id)
        return answer


class Pool:
    """One child, which runs what the worker's main process gives it."""

    is_green = False
    signal_safe = True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def terminate_job(self, pid: int, signal: object) -> None:
        obeys = current.choices.one_of("a child obeys", [True, True, False])  # it may be deep within a call
        if obeys and self.worker.is_alive(pid):
            self.worker.cut_off()

    def apply_async(
        self, target: Any, args: Any, callback: Any, error_callback: Any, accept_callback: Any, **_: Any
    ) -> Any:
        worker = self.worker

        def run() -> None:
            child = getcurrent()
            child.interruptible = not child.signalled
            try:
                try:
                    found = target(*args, app=worker.app)
                except (SystemExit, GreenletExit):
                    raise
                except BaseException:  # noqa: BLE001 - as a child of billiard's returns it
                    info = ExceptionInfo()
                    worker.ends(child, lambda: error_callback(info))
                else:
                    worker.ends(child, lambda: callback(found))
            except SystemExit:
                worker.doomed = worker.doomed or "exited"

        worker.children += 1
        accept_callback(worker.children, current.world.now)
        worker.starts(run, error_callback)
        return None


class Worker(Host):
    """A worker: its main process, which outlives its child, and the child."""

    #: how many of them there are
    number = WORKERS
    #: whether a body is ended at its limits
    enforces_limits = True
    #: what its main thread has yet to tell the broker
    hub: Sequence[Callable[[], object]] = ()

    def __init__(self, simulation: Simulation, name: str, app: Any) -> None:
        super().__init__(name)
        self.simulation, self.app = simulation, app
        self.main = Host(f"{name} main")
        self.reserved: list[tuple[Any, int]] = []
        self.pool = Pool(self)
        self.down_until = 0.0
        self.request: Any = None
        self.child: Any = None
        self.lost: Any = None
        self.ending: Any = None
        #: how often the store had failed when the delivery began, or its child was killed
        self.failures_before = 0
        #: how many children it has given a task to, which is the id of the last one's process
        self.children = 0
        #: whether its main process has found that a body takes too long, and has yet to kill the child
        self.limiting = False
        #: whether the child dies at its next step
        self.doomed = ""
        #: how it is being shut down, and what announces that to the store
        self.ends_by = ""
        self.marks: Any = None
        #: when that began, when the last task began, and the troubles there had been then
        self.ends_since, self.began, self.troubles_before = 0.0, (0.0, 0), 0
        #: whether its main process is cutting a child off
        self.cuts_off = False
        #: the tasks that have succeeded here, as it knows
        self.succeeded: set[str] = set()
        kinds = [kind for kind, _ in (*FAULTS_OF_CHILDREN, *FAULTS_OF_WORKERS)]
        does = ("starts a task", "gets a message", "tells the broker")
        self.names = {kind: f"{name}: {kind}" for kind in (*does, *kinds)}
        self.new_child()

    def new_child(self) -> None:
        """Fork a child: a process of its own, with a heartbeat and a breaker of its own."""
        self.new_process()
        store = HostStore(self.simulation, self)
        install_store(self.app, store, self.heartbeat, self.breaker)
        if self.marks is not None:
            self.marks._store = store

    @property
    def requests(self) -> list[Request]:
        """The deliveries that it runs, or whose ends it has yet to see."""
        return [self.request] if self.child is not None or self.ending is not None else []

    def can_start(self, now: float) -> bool:
        """Return whether it has a message that can start now."""
        if not self.reserved or self.child is not None or self.ending is not None:
            return False
        return self.due(now) is not None

    def can_receive(self) -> bool:
        """Return whether it takes one more message."""
        return len(self.reserved) < PREFETCH

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        child = self.child
        for kind, weight in FAULTS_OF_CHILDREN if child is not None else FAULTS_OF_WORKERS if self.reserved else ():
            if not kind.endswith("time limit") or (child.interruptible and not self.limiting):
                yield kind, weight

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive(self, text: bytes, tag: int) -> None:
        payload = marshal.loads(text)
        received = virtual.Message(payload, channel=CHANNEL)
        request = Request(
            received,
            on_ack=lambda *_, **__: self.acks(request, tag),
            on_reject=lambda *args: self.rejects(request, tag, requeue=args[-1]),
            hostname=self.name,
            app=self.app,
            task=self.app.tasks[received.headers["task"]],
            body=received.body,
            headers=received.headers,
            decoded=False,
        )
        request.serial, request.worker = payload["properties"]["serial"], self
        request.due = (request.eta - EPOCH).total_seconds() if request.eta is not None else 0.0
        self.reserved.append((request, tag))
        self.simulation.world.tell(f"{self.name} receives {request.id} as {tag}")

    def run_hub(self) -> None:
        """Tell the broker what is to be told."""

    def acks(self, request: Any, tag: int) -> None:
        self.simulation.broker.ack(tag)

    def rejects(self, request: Any, tag: int, *, requeue: bool) -> None:
        if requeue:
            self.simulation.law.given_back(request, self)
            self.simulation.broker.requeue(tag)
        else:
            self.simulation.broker.ack(tag)

    def due(self, now: float) -> int | None:
        """Return where the first message is that can start."""
        for at, (request, _) in enumerate(self.reserved):
            if request.due <= now:
                return at
        return None

    def execute(self) -> None:
        request, tag = self.reserved.pop(self.due(self.simulation.world.now) or 0)
        self.simulation.world.tell(f"{self.name} starts {request.id} of {tag}")
        self.request = request
        request.execute_using_pool(self.pool)

    # -- processes -----------------------------------------------------------------------------------------------------

    def starts(self, run: Callable[[], None], lost: Any) -> None:
        self.lost, self.failures_before, self.awaited = lost, self.failures, False
        self.holder_remains = INFINITE
        self.began = (self.simulation.world.now, self.troubles)
        self.child = self.simulation.world.start(self, f"{self.name} child", run)

    def ends(self, child: Process, call: Callable[[], object]) -> None:
        """The child returned; the main process learns of it by a pipe."""
        child.interruptible, child.interruption = False, None
        self.simulation.law.finished(self.request, self)
        self.simulation.world.step()
        if self.limiting:
            return  # what it says now nobody reads
        self.child = None
        self.ending = self.simulation.world.start(self.main, f"{self.name} main", lambda: self._ended(call))

    def _ended(self, call: Callable[[], object]) -> None:
        try:
            while self.cuts_off:  # one thread does both
                self.simulation.world.sleep(0.01)
            call()
        finally:
            self.ending = None

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill_child(self, error: type[Exception] = WorkerLostError) -> None:
        world = self.simulation.world
        world.tell(f"{self.name}: child {'killed' if error is WorkerLostError else 'exits'}")
        if self.limiting:  # its main process looks for it no more
            self._kill_processes(self)
            self.doomed = ""
            return
        lost = self.lost
        self._end_child()

        def notice() -> None:
            try:
                raise error("killed")
            except error:
                lost(ExceptionInfo())

        self.ending = world.start(self.main, f"{self.name} main", lambda: self._ended(notice))

    def limit_child(self) -> None:
        """The main process finds that the body takes too long: it reports that, and then kills the child."""
        world = self.simulation.world
        world.tell(f"{self.name}: hard time limit")
        self.limiting = True
        request, lost, child = self.request, self.lost, self.child
        self.simulation.law.timed_out(child)

        def limit() -> None:
            try:
                raise TimeLimitExceeded(30)
            except TimeLimitExceeded:
                failure = ExceptionInfo()
            for report in (lambda: lost(failure), lambda: request.on_timeout(soft=False, timeout=30)):
                try:
                    report()
                except Exception as error:  # noqa: BLE001 - which the pool logs
                    world.tell(f"{self.name} main: {error!r:.60}")
                world.step()
            world.sleep(world.choices.one_of("the kill takes", [0.0, 0.1, 3.0]))
            self._end_child()
            self.limiting, failures = False, self.failures
            world.sleep(0.1)  # as it looks for the end of the child
            while any(each.name == f"{self.main.name}{RELEASE}" for each in world.processes):
                world.sleep(0.1)
            if self.failures == failures:
                self.simulation.law.released_when_gone(request)

        world.start(self.main, f"{self.name} main", limit)

    def cut_off(self) -> None:
        """The main process sends a signal to the child by which it ends itself."""
        self.child.interruptible, self.child.signalled = False, True
        self.simulation.world.interrupt(self.child, SystemExit(-241))

    def child_exited(self) -> None:
        """The child has ended itself, as it was told."""
        self.simulation.law.finished(self.request, self)
        self.kill_child(Terminated)

    def _end_child(self) -> None:
        """The child is gone, and there is another one."""
        if not self.child.cut_off:
            self.simulation.law.killed(self.child)
        self._kill_processes(self)
        self.child, self.doomed, self.stopped_until = None, "", 0.0
        self.failures_before = self.failures
        self.new_child()

    def is_alive(self, child: int) -> bool:
        """Return whether a child is there that was given a task."""
        return child == self.children and self.child is not None

    def kill(self, down_for: float) -> None:
        """Kill the whole worker; another is started in its place."""
        self.simulation.world.tell(f"{self.name}: killed")
        self._end(down_for)
        if self.simulation.broker.visibility is None:
            self.simulation.broker.lose(self)

    def _end(self, down_for: float) -> None:
        if self.stopping and self.troubles == self.troubles_before:
            self.simulation.law.announced(self.request, self.ends_since)
        if self.child is not None and not self.child.cut_off:
            self.simulation.law.killed(self.child)
        self._kill_processes(self, self.main)
        self.child, self.ending, self.doomed, self.limiting = None, None, "", False
        self.stopping = self.main.stopping = False
        self.ends_by, self.marks = "", None
        for request in [request for request in state.active_requests if request.worker is self]:
            state.active_requests.discard(request)
        for request in [request for request in main_process.cut_off if request.worker is self]:
            main_process.cut_off.remove(request)
        self.succeeded.clear()
        self.reserved.clear()
        self.stopped_until = 0.0
        self.down_until = self.simulation.world.now + down_for
        self.new_child()

    # -- shutdowns -----------------------------------------------------------------------------------------------------

    def shut_down(self, *, cold: bool) -> None:
        """The worker gets a signal to end: once what it runs has ended, or after it has cut that off."""
        simulation, begun = self.simulation, self.stopping
        self.ends_by = "cold" if cold else "warm"
        simulation.world.tell(f"{self.name}: {self.ends_by} shutdown")
        self.stopping = self.main.stopping = True
        self.ends_since, self.troubles_before = simulation.world.now, self.troubles
        simulation.law.counts["shutdowns"] += 1
        if not begun:
            waits = simulation.choices.one_of("a supervisor waits for", [INFINITE, 1.0, 4.0])
            if waits < INFINITE:
                simulation.world.start(self.main, f"{self.name} supervisor", lambda: self._wait_no_longer(waits))
            self.marks = marks = ShutdownMarks(self.app.guarded[0]._binding.guard.store)
            simulation.world.start(self.main, f"{self.name} marks", lambda: marks.keep_looking(never))
        simulation.world.start(self.main, f"{self.name} stops", lambda: self._stop(cold=cold))

    def _wait_no_longer(self, seconds: float) -> None:
        self.simulation.world.sleep(seconds)
        self.doomed = "worker"

    def _stop(self, *, cold: bool) -> None:
        world, request, patience = self.simulation.world, self.request, INFINITE
        if cold:
            patience = world.now + world.choices.one_of("a cold shutdown takes", [0.0, 4.0, 4.0])
            running = self.child is not None and not self.limiting
            if running and not request.acknowledged and request.id not in self.succeeded:
                self.cuts_off = True
                try:
                    request.cancel(self.pool, "TERM")
                finally:
                    self.cuts_off = False
        while world.now < patience and (self.child is not None or self.ending is not None or self.limiting):
            world.sleep(0.5)
            self._check_slot()
        self.doomed = "stopped"

    def _check_slot(self) -> None:
        """Check that no delivery waits for its lease in a worker that is about to end."""
        if self.child is not None and not self.limiting and not self.child.cut_off:
            self.check_begun(self)

    def check_begun(self, runs: Any) -> None:
        """Check that a delivery has begun its body, where nothing has held it up."""
        (began, troubles), law = runs.began, self.simulation.law
        since = max(began, self.ends_since, self.stopped_until, self.simulation.broker.away_until)
        waits = troubles == runs.troubles and self.simulation.world.now - since > SEEN_WITHIN
        if waits and not law.has_begun(runs.child):
            law.fail(f"{runs.request.id} waits in {self.name}, which is about to end")

    def stop(self) -> None:
        """The worker has ended, and its messages go back; another is started in its place."""
        self.simulation.world.tell(f"{self.name}: ends")
        self._end(self.simulation.choices.between("down for", 0.0, 20.0))
        self.simulation.broker.lose(self)

    def _kill_processes(self, *hosts: Host) -> None:
        world = self.simulation.world
        for process in [process for process in world.processes if process.host in hosts]:
            if not process.dead:
                world.kill(process)

    def disconnect(self) -> None:
        """The connection to the broker breaks, and is there again; bodies go on."""
        self.simulation.world.tell(f"{self.name}: connection lost")
        self.reserved.clear()
        self.simulation.broker.lose(self)


POOLS["prefork"] = Worker


class Simulation:
    """One schedule.

    Arguments:
        choices: Fix it.
        law: What must hold.
        apps: One of a producer, and one for each worker.
        story: Gets its lines.
    """

    def __init__(
        self, choices: Choices, law: Any, apps: Sequence[Any], story: Callable[[str], object] | None = None
    ) -> None:
        global current
        current = self
        self.choices, self.law = choices, law
        self._ids = 0
        self.world = World(choices, self._interrupted, story)
        self.store = law.store()
        self.broker = Broker(self.world, choices.one_of("visibility", [None, VISIBILITY, 30.0]))
        self.faults = choices.one_of("faults", [0, 1, 1, 2, 2, 3, 4])
        #: whether there may be one more, where it does most harm
        self.one_more = self.faults > 0 and choices.schedule is None
        #: the step before which nothing happens to anybody
        self.quiet_until = choices.one_of("quiet at first", QUIET)
        self.lossy = choices.one_of("lossy", [0.0, 0.0, 0.03, 0.1])
        #: how many messages that a worker has the broker delivers to another one
        self.again = choices.one_of("delivered again", [0, 0, 0, 3, 20])
        if choices.schedule is not None:
            self.faults = self.again = len(choices.schedule.steps)
        self.lossy = self.lossy if self.faults else 0.0
        self.again = self.again if self.broker.visibility else 0
        #: whether no holder has been stopped, killed or cut off from the store
        self.calm = not self.lossy
        self.troubled: Any = None
        #: until when trouble comes at once, and how much is left of it
        self.burst_until, self.burst = 0.0, 0
        #: whether nothing has happened yet
        self.untroubled = True
        #: since when nothing has happened, while something went on
        self.undisturbed_since = self.world.now
        #: the step at which time went by last
        self.moved_at = 0
        self.producer = apps[0]
        install_store(self.producer, HostStore(self), OfHost("heartbeat"), OfHost("breaker"))
        kind = POOLS[law.pools[0] if len(law.pools) == 1 else choices.one_of("pool", law.pools)]
        shared.enforces_limits = kind.enforces_limits
        self.workers = [kind(self, f"worker-{n}", app) for n, app in enumerate(apps[1 : kind.number + 1], 1)]
        acks = choices.one_of("acks on timeouts", [True, True, False])
        for task in [task for app in apps for task in app.guarded]:
            task.acks_on_timeout = acks
        cache._DUMMY_CLIENT_CACHE.clear()
        for names in (state.active_requests, state.reserved_requests, state.revoked):
            names.clear()
        delivery._requeue_pauses.pause = delivery.REQUEUE_PAUSE[0]
        self._clear(main_process.cut_off, unique._skipped_for, unique._looked_in, unique._late)
        law.begins(self)
        if choices.made is not None:
            choices.made.kind = law.kind

    def new_id(self) -> str:
        """Return the id of a message for which its publisher names none."""
        self._ids += 1
        return f"message-{self._ids}"

    @staticmethod
    def _clear(*known: Any) -> None:
        for each in known:
            each.clear()

    def _interrupted(self, process: Process) -> None:
        if process.signalled:
            process.cut_off = True
            self.law.shut_down(process)
        else:
            self.law.interrupted(process)

    def fate_of_call(self, host: Host) -> str:
        if host.cut_off_until > self.world.now:
            return "request"
        if host.slow_until > self.world.now:
            return self.choices.one_of(f"what {host.name} loses slowly", SLOW_FATES)
        if self.choices.chance(f"{host.name} loses a call", self.lossy if self.faults else 0.0):
            self.undisturbed_since = self.world.now
            return self.choices.one_of(f"what {host.name} loses", FATES)
        return ""

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def run(self, most_steps: int = MOST_STEPS) -> None:
        """Take steps until nothing is left to do.

        Raises:
            Broken: the law is broken, which also has it that there is an end.
            Unended: it takes more steps than are tried, or more time than all others.
        """
        world, choices, law, broker, longest = self.world, self.choices, self.law, self.broker, 0.0
        while True:
            world.steps += 1
            broker.expire()
            law.check()
            longest = max(longest, world.now - self.undisturbed_since)
            self._check_end(longest, most_steps)
            if world.steps > STEPS_WITH_FAULTS:
                self.faults, self.again, self.one_more = 0, 0, False
            if self._doom():
                continue
            steps = self._steps()
            if steps:
                _, _, call, argument = choices.step(steps)
                call(argument)
            elif not self._advance():
                break
        law.ended()
        for process in [process for process in world.processes if not process.dead]:
            world.kill(process)
        if longest > ENDS_WITHIN:
            raise Unended(f"at its end only {longest:.0f} s after the last that happened to it")

    def _check_end(self, longest: float, most_steps: int) -> None:
        if longest > LONGEST:
            self.law.fail(f"not at its end {LONGEST:.0f} s after the last that happened to it")
        if self.world.steps - self.moved_at > STEPS_AT_ONCE:
            self.law.fail(f"goes round for {STEPS_AT_ONCE} steps in which no time goes by")
        if self.world.steps > most_steps:
            raise Unended(f"not at its end after {most_steps} steps")

    def _doom(self) -> bool:
        """End the first worker or child whose end is due; return whether there was one."""
        for worker in self.workers:
            if worker.doomed:
                self._end(worker)
                return True
        return False

    def _end(self, worker: Worker) -> None:
        kind, worker.doomed = worker.doomed, ""
        if kind == "worker":
            worker.kill(0.0)
        elif kind == "child":
            worker.kill_child()
        elif kind == "exited":
            worker.child_exited()
        elif kind == "stopped":
            worker.stop()
        elif not worker.limiting:
            worker.limit_child()

    def _steps(self) -> list[Step]:
        """Return what can happen now."""
        world, broker = self.world, self.broker
        now, run = world.now, world.run
        steps: list[Step] = [
            (each.name, 10.0, run, each)
            for each in world.processes
            if each.wakes <= now and each.host.stopped_until <= now
        ]
        if world.between and steps:
            return steps
        for worker in self.workers:
            if worker.down_until > now or worker.main.stopped_until > now or worker.stopping:
                continue
            if worker.can_start(now):
                steps.append((worker.names["starts a task"], 6.0, type(worker).execute, worker))
            if broker.queue and worker.can_receive():
                steps.append((worker.names["gets a message"], 4.0, broker.deliver, worker))
            if worker.hub:
                steps.append((worker.names["tells the broker"], 8.0, type(worker).run_hub, worker))
        steps += self.law.steps()
        if steps:
            steps.append(("time goes by", 0.04 * sum([step[1] for step in steps]), self._go_by, None))
            hasty = self.hasty
            if hasty or (self.faults and world.steps >= self.quiet_until):
                self._add_faults(steps, HASTE if hasty else 1)
                steps += self.law.faults()
            if broker.unacked and (self.again or (hasty and broker.visibility)):
                weight = 0.5 * HASTE if hasty else 0.5
                steps.append(("a message is delivered again", weight, self._deliver_again, None))
        return steps

    def _add_faults(self, steps: list[Step], haste: int) -> None:
        for host in self.law.hosts():
            for kind, weight in host.faults():
                weight = haste * (weight * 3 if host is self.troubled else weight) * host.ripe_for.get(kind, 1)
                steps.append((f"{host.name}: {kind}", weight, self._fault, (host, kind)))
        for worker in self.workers:
            names = worker.names
            for kind, weight in worker.faults():
                if worker.ends_by and kind in ("warm shutdown", f"{worker.ends_by} shutdown", "connection lost"):
                    continue
                # Trouble seldom comes alone, and does most harm where a reply is on its way.
                weight = haste * (weight * 3 if worker is self.troubled else weight)
                weight *= worker.ripe_for.get(kind, WHILE if worker.awaited and kind in LOSING else 1)
                steps.append((names[kind], weight * 4 if worker.replies else weight, self._fault, (worker, kind)))
        if self.law.broker_goes_away and self.broker.away_until <= self.world.now:
            steps.append(("the broker is away", 0.05 * haste, self.broker_away, None))
        steps.append(("the store is away", 0.05 * haste, self._store_away, None))
        if haste == 1:
            steps.append(("trouble comes at once", 0.2, self._trouble, None))

    def _fault(self, which: tuple[Worker, str]) -> None:
        worker, kind = which
        self.spend()
        self.calm = False
        self.troubled = worker
        if kind == "child killed":
            worker.kill_child()
        elif kind == "child stopped":
            self._stop(worker)
        elif kind == "soft time limit":
            self._interrupt(worker)
        elif kind == "hard time limit":
            worker.limit_child()
        elif kind == "cut off from the store":
            self._cut_off(worker)
        elif kind == "slow store":
            self._slow(worker)
        elif kind == "killed":
            worker.kill(self.choices.between("down for", 0.0, 20.0) if worker in self.workers else 0.0)
        elif kind in ("warm shutdown", "cold shutdown"):
            worker.shut_down(cold=kind == "cold shutdown")
        elif worker in self.workers:
            worker.disconnect()
        else:
            worker.suffer(kind)

    def ripen(self, host: Host, *kinds: str, factor: float = MOMENT) -> None:
        """Something has happened to a host after which these faults would do most harm."""
        host.ripe_for, self.quiet_until = dict.fromkeys(kinds, factor), 0
        if self.one_more and not self.faults:
            self.faults, self.one_more = 1, False

    def spend(self) -> None:
        """A fault happens, of those that there are, or of those that come at once."""
        self.untroubled, self.undisturbed_since = False, self.world.now
        if self.hasty:
            self.burst -= 1
        else:
            self.faults -= 1
            self.quiet_until = self.world.steps + self.choices.one_of("quiet for", QUIET)

    def _trouble(self, _: None) -> None:
        self.spend()
        self.burst_until, self.burst = self.world.now + BURST, FAULTS_OF_BURST
        self.world.tell("trouble comes at once")

    def _store_away(self, _: None) -> None:
        self.spend()
        self.calm = False
        seconds = self.choices.between("the store is away for", 0.2, 2.5) * LEASE_TTL
        for host in [*self.workers, *self.law.hosts()]:
            host.cut_off_until = max(host.cut_off_until, self.world.now + seconds)
        self.world.tell(f"the store is away for {seconds:.1f} s")

    def _slow(self, worker: Any) -> None:
        seconds = self.choices.between("slow for", 0.5, 3.0) * LEASE_TTL
        worker.slow_until = self.world.now + seconds
        self.world.tell(f"{worker.name}: its way to the store is slow for {seconds:.1f} s")

    def _stop(self, worker: Any) -> None:
        seconds = self.choices.between("stopped for", 0.5, 3.0) * LEASE_TTL
        if worker not in self.workers:
            seconds = self.choices.one_of("a publisher is stopped for", [15.0, 90.0])
        worker.renewals_failed.clear()
        worker.stopped_until = self.world.now + seconds
        self.world.tell(f"{worker.name}: child stopped for {seconds:.1f} s")

    def _cut_off(self, worker: Worker) -> None:
        seconds = self.choices.between("cut off for", 0.5, 4.0) * LEASE_TTL
        worker.cut_off_until = self.world.now + seconds
        self.world.tell(f"{worker.name}: cut off from the store for {seconds:.1f} s")

    def _interrupt(self, worker: Worker) -> None:
        worker.child.interruptible = False  # it rings once
        self.world.interrupt(worker.child, worker.time_limit("its time is over"))

    @property
    def hasty(self) -> bool:
        """Whether trouble comes at once."""
        return self.burst > 0 and self.burst_until > self.world.now

    def calm_down(self) -> None:
        """Have nothing happen to anybody."""
        self.faults = self.again = 0
        self.lossy, self.one_more = 0.0, False

    @property
    def may_lose_broker(self) -> bool:
        """Whether the broker may be away now, and is not."""
        return self.law.broker_goes_away and self.faults > 0 and self.broker.away_until <= self.world.now

    def broker_away(self, _: None = None) -> None:
        self.spend()
        self.broker.away_until = self.world.now + self.choices.between("the broker is away for", 1.0, 20.0)
        self.world.tell(f"the broker is away for {self.broker.away_until - self.world.now:.1f} s")

    def _deliver_again(self, _: None) -> None:
        if self.hasty:
            self.spend()
        else:
            self.again -= 1
        self.untroubled, self.undisturbed_since = False, self.world.now
        self.broker.requeue(self.choices.one_of("which is delivered again", list(self.broker.unacked)))

    def _go_by(self, _: None) -> None:
        self._advance(self.choices.between("seconds go by", 0.01, 1.0))

    def _advance(self, most: float = INFINITE) -> bool:
        """Move the clock to the next thing that waits for it; return whether there is one."""
        now = self.world.now
        wakes = [max(process.wakes, process.host.stopped_until) for process in self.world.processes]
        soonest = min(wakes, default=INFINITE)
        for worker in self.workers:
            later = max(worker.down_until, worker.main.stopped_until)
            if later > now and (self.broker.queue or worker.reserved):
                soonest = min(soonest, later)
            for request, _ in worker.reserved:
                if request.due > now:
                    soonest = min(soonest, request.due)
        soonest = min(soonest, self.broker.next_timeout() or INFINITE, self.law.next_step())
        if soonest == INFINITE:
            return False
        self.world.now = max(now, min(soonest, now + most))
        self.moved_at = self.world.steps if self.world.now > now else self.moved_at
        if self.world.now - now > AT_REST:
            self.undisturbed_since = self.world.now
        return True


class Thread:
    """A thread, which is a process of the simulation on the host of whatever started it."""

    def __init__(self, target: Callable[[], object], name: str = "", **_: Any) -> None:
        self._target, self._name, self._process = target, name.rpartition("-")[2], None

    def start(self) -> None:
        host = getcurrent().host.whole
        self._process = current.world.start(host, f"{host.name} {self._name}", self._run)

    def _run(self) -> None:
        try:
            self._target()
        except Exception as error:  # noqa: BLE001 - a thread ends alone
            current.world.tell(f"{self._process.name} ends with {error!r}")

    def is_alive(self) -> bool:
        return self._process is not None and not self._process.dead and not self._process.killed


class OfHost:
    """What each process has for itself, as the one has it that asks.

    Arguments:
        name: The attribute of its host.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(getcurrent().host, self._name), name)

    def __contains__(self, item: object) -> bool:
        return item in getattr(getcurrent().host, self._name)

    def __setitem__(self, key: object, value: object) -> None:
        getattr(getcurrent().host, self._name)[key] = value


class MainProcess:
    """What the main process knows of its children, and the rest of the library's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(shared, name)

    @staticmethod
    def is_alive(pid: int) -> bool:
        """Return whether a child is there."""
        return worker_of(getcurrent().host).is_alive(pid)


class ActiveRequests:
    """What runs in the worker that asks."""

    @property
    def active_requests(self) -> list[Request]:
        asking = getcurrent().host
        return sorted(
            (each for each in state.active_requests if each.worker.main is asking), key=lambda each: each.serial
        )


def is_stopping() -> bool:
    """Return whether the worker is about to end whose process asks."""
    return getattr(getattr(getcurrent(), "host", None), "stopping", False)


class SimpleQueue:
    """A queue from which one thread gets."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting: Any = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            self._waiting.wakes = current.world.now

    def get(self, timeout: float = INFINITE) -> Any:
        if not self._items:
            self._waiting = getcurrent()
            current.world.sleep(timeout)
            self._waiting = None
        if not self._items:
            raise Empty
        return self._items.pop(0)


def within(seconds: float, call: Callable[[], Any], what: str = "") -> Any:
    """Call in another thread, which goes on if that takes longer; as `reservations.within` does."""
    world, asking, answers = current.world, getcurrent(), []
    if not isinstance(asking, Process) or asking.inside:
        return call()

    def work() -> None:
        getcurrent().inside = True
        try:
            answers.append((True, call()))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            answers.append((False, error))
        if asking.wakes == end:
            asking.wakes = world.now

    end = world.now + seconds
    world.start(asking.host, f"{asking.name} store", work)
    world.sleep(seconds)
    if not answers:
        raise StoreUnreachable("the store did not answer in time")
    (returned, answer) = answers[0]
    if returned:
        return answer
    raise answer


class Threads:
    """Threads that end what a server's thread has begun, as those of `functions`."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        ended: Future[Any] = Future()
        waiting, context = getcurrent(), copy_context()

        def work() -> None:
            if not ended.set_running_or_notify_cancel():
                return
            try:
                found = context.run(call)
            except GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                ended.set_exception(error)
            else:
                ended.set_result(found)
            if waiting.wakes_for is ended:
                waiting.wakes = min(waiting.wakes, current.world.now)

        process = current.world.start(waiting.host, f"{waiting.name} end", work)
        process.works, process.works_for = True, current.law.working_for(waiting)
        return ended


class Future(futures.Future[T]):
    """What comes of a call in another thread."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            getcurrent().wakes_for = self
            current.world.sleep(timeout or 0.0)
            getcurrent().wakes_for = None
        if not self.done():
            raise futures.TimeoutError
        return super().exception(0)


def uniform(low: float, high: float) -> float:
    """Return a pause."""
    return current.choices.between("a pause", low, high)


@contextmanager
def simulated_clock() -> Iterator[None]:
    """Have the library's modules on the clock of the current simulation, on its threads, and without its log."""

    def now() -> float:
        return current.world.now

    def sleep(seconds: float) -> None:
        current.world.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, heartbeat, lease, backoff, breaker, reservations, unique, asgi, wsgi):
            patch.setattr(module, "monotonic", now)
        for module in (memory_store, unique, reservations, main_process):
            patch.setattr(module, "time", lambda: BEGAN + current.world.now)
        patch.setattr(base, "time", SimpleNamespace(sleep=sleep, monotonic=now))
        patch.setattr(reservations, "sleep", sleep)
        for module in (backoff, delivery):
            patch.setattr(module, "time", SimpleNamespace(sleep=sleep))
        patch.setattr(delivery, "LONG_WAIT", LONG_WAIT)
        for module in (backoff, message):
            patch.setattr(module, "random", SimpleNamespace(uniform=uniform))
        patch.setattr(main_process, "shared", MainProcess())
        patch.setattr(shared, "is_stopping", is_stopping)
        patch.setattr(shared, "enforces_limits", True)  # until a schedule says otherwise
        patch.setattr(shared, "_shown", OfHost("shown"))
        patch.setattr(delivery.CeleryDelivery, "stopping", staticmethod(is_stopping))
        patch.setattr(delivery._requeue_pauses, "stopping", is_stopping)
        patch.setattr(shutdown, "worker_state", ActiveRequests())
        patch.setattr(shutdown, "heartbeat", OfHost("heartbeat"))
        patch.setattr(shutdown, "sleep", sleep)
        patch.setattr(main_process, "monotonic", now)
        patch.setattr(main_process, "sleep", sleep)
        _patch_threads(patch)
        _patch_celery(patch)
        for more in PATCHES:
            more(patch)
        logging.disable(logging.CRITICAL)
        add_hook(_hear)
        first, *others = gc.get_threshold()
        gc.set_threshold(COLLECTED, *others)
        try:
            yield
        finally:
            gc.set_threshold(first, *others)
            remove_hook(_hear)
            logging.disable(logging.NOTSET)


def _patch_threads(patch: pytest.MonkeyPatch) -> None:
    threads = SimpleNamespace(Thread=Thread, Condition=Condition, RLock=Lock)
    for module in (heartbeat, reservations, unique):
        patch.setattr(module, "threading", threads)
    for module in (breaker, lease):
        patch.setattr(module, "threading", SimpleNamespace(RLock=Lock, Lock=Lock))
    patch.setattr(shared, "lock", Lock())
    patch.setattr(bindings, "_lock", Lock())
    for name in ("_beginning", "_ending"):
        patch.setattr(functions, name, Threads())
    patch.setattr(reservations, "within", within)
    patch.setattr(reservations, "queue", SimpleNamespace(SimpleQueue=SimpleQueue))
    patch.setattr(reservations, "atexit", SimpleNamespace(register=lambda _: None))
    patch.setattr(reservations, "os", SimpleNamespace(register_at_fork=lambda **_: None))
    for name in ("heartbeat", "breaker", "confirmations"):
        patch.setattr(unique, name, OfHost(name))


def _patch_celery(patch: pytest.MonkeyPatch) -> None:
    for module in (app_base, app_task, canvas, unique):
        patch.setattr(module, "uuid", lambda: current.new_id())
    for name in ("set", "incr", "delete"):
        patch.setattr(cache.DummyClient, name, _stepping(getattr(cache.DummyClient, name)))
    # Celery's copy of a traceback, with code compiled for each frame, takes longer than the rest of a delivery.
    patch.setattr(einfo, "Traceback", lambda tb, *_: None)
    patch.setattr(einfo.traceback, "format_exception", lambda *_, **__: [""])


def _stepping(method: Callable[..., Any]) -> Callable[..., Any]:
    def stepping(*args: Any, **options: Any) -> Any:
        process = getcurrent()
        if isinstance(process, Process) and process.killed:
            raise GreenletExit
        if method.__name__ == "set":
            current.law.stored(*args[1:3])
        if not current.law.steps_in_backend or not isinstance(process, Process):
            return method(*args, **options)
        counts, noting, since = method.__name__ == "incr", process.counted, current.world.now
        current.world.step()
        process.counted = counts
        if counts or noting:  # others wait for that since the end was recorded
            since = min(since, process.settled_at)
        if noting:
            process.settled_at = INFINITE
        if (counts or noting) and current.world.now > since:
            current.law.counts_late(process, current.world.now - since)
        return method(*args, **options)

    return stepping


def _hear(event: Any) -> None:
    current.law.hook(event)
