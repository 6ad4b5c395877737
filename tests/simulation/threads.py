"""Workers whose pool is Celery's of threads: several bodies in one process, which share what a process has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import partial
from operator import attrgetter
from typing import Any

from celery import states
from celery.concurrency import thread
from celery.concurrency.base import BasePool
from celery.exceptions import TaskRevokedError
from celery.worker import state
from greenlet import getcurrent

from celery_idempotent.core.lease import current_lease

from .celery import FAULTS_OF_WORKERS, INFINITE, POOLS, PREFETCH, STEADY, Host, HostStore, Worker, install_store
from .charges import Charges, Run
from .world import Process, Step

#: What may happen to a process whose threads run bodies, and how likely it is.
FAULTS_OF_PROCESSES = (
    ("killed", 0.3),
    ("child stopped", 0.4),
    ("cut off from the store", 0.1),
    ("slow store", 0.1),
    ("connection lost", 0.3),
    ("warm shutdown", 0.2),
    ("cold shutdown", 0.2),
)
#: What is more likely where several of them do.
FAULTS_OF_SEVERAL = (("warm shutdown", 0.4), ("child stopped", 0.4))


def of_process(name: str) -> Any:
    """Return an attribute of a thread that is its process's."""

    def write(self: PoolThread, value: object) -> None:
        setattr(self.worker, name, value)

    return property(attrgetter(f"worker.{name}"), write)


class PoolThread(Host):
    """A thread of a pool, with the delivery that it runs; it shares all else with its process.

    Arguments:
        worker: The process.
        number: Which of its threads it is.
    """

    ends_with = ("worker",)
    #: it ends no body at a limit, and is no late request's
    limiting = is_way = False
    app, heartbeat, breaker, confirmations = map(of_process, ("app", "heartbeat", "breaker", "confirmations"))
    shown = of_process("shown")
    stopped_until, stopping, doomed = map(of_process, ("stopped_until", "stopping", "doomed"))
    cut_off_until, slow_until, replies = map(of_process, ("cut_off_until", "slow_until", "replies"))
    ripe_for, awaited, renewals_failed = map(of_process, ("ripe_for", "awaited", "renewals_failed"))

    def __init__(self, worker: ThreadedWorker, number: int) -> None:
        self.worker, self.name = worker, f"{worker.name} thread-{number}"
        #: what its deliveries leave in its context variables, those after them have
        self.context = Context()
        self.request: Any = None
        self.child: Any = None
        self.failures = self.troubles = self.failures_before = 0
        #: when its delivery began, and the troubles there had been then
        self.began = (0.0, 0)
        self.holder_remains = INFINITE

    @property
    def whole(self) -> Host:
        return self.worker

    def begin(self, request: Any, work: Callable[[], object]) -> None:
        """Run a delivery."""
        world = self.worker.simulation.world
        self.request, self.failures_before = request, self.failures
        self.began, self.holder_remains = (world.now, self.troubles), INFINITE

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - which its future has, that nobody reads
                world.tell(f"{self.name}: {error!r:.60}")
            finally:
                self.child = None

        self.child = world.start(self, self.name, run)
        self.child.gr_context = self.context


class Executor:
    """What Celery's pool takes for Python's threads: deliveries wait in it for one that is free."""

    def __init__(self, worker: ThreadedWorker) -> None:
        self.worker = worker

    def submit(
        self, apply: Any, target: Any, args: Any, kwargs: Any, callback: Any, accept_callback: Any
    ) -> Future[Any]:
        request = callback.__self__

        answered, given = partial(self.worker.finished, request, callback), {**kwargs, "app": self.worker.app}
        self.worker.waiting.append((request, partial(apply, target, args, given, answered, accept_callback)))
        return Future()


class Pool(thread.TaskPool):
    """Celery's own pool of threads, but for the threads."""

    def __init__(self, worker: ThreadedWorker) -> None:
        BasePool.__init__(self, app=worker.app)
        self.executor = Executor(worker)
        self.start()


class ThreadedWorker(Worker):
    """A worker that is one process: its threads run the bodies, and its main thread talks with the broker."""

    #: fewer than those of one child, so that several bodies meet in one
    number = 2
    enforces_limits = False
    new_pool: type[BasePool] = Pool
    new_thread = PoolThread

    def __init__(self, simulation: Any, name: str, app: Any) -> None:
        self.size = simulation.choices.one_of(f"threads of {name}", [2, 3])
        super().__init__(simulation, name, app)
        self.main = self

    def new_child(self) -> None:
        """Start the process: all its threads have one store, one heartbeat and one breaker."""
        self.new_process()
        install_store(self.app, HostStore(self.simulation), self.heartbeat, self.breaker)
        self.threads = [self.new_thread(self, number) for number in range(1, self.size + 1)]
        #: the deliveries for which no thread is free
        self.waiting: list[tuple[Any, Callable[[], object]]] = []
        self.pool = self.new_pool(self)
        #: what the main thread has yet to tell the broker
        self.hub: list[Callable[[], object]] = []

    @property
    def busy(self) -> list[PoolThread]:
        """The threads that run a delivery."""
        return [each for each in self.threads if each.child is not None]

    @property
    def requests(self) -> list[Any]:
        return [each.request for each in self.busy]

    # -- messages ------------------------------------------------------------------------------------------------------

    def can_start(self, now: float) -> bool:
        while (at := self.due(now)) is not None:  # no thread need be free for them: they wait in the pool
            request, tag = self.reserved.pop(at)
            self.simulation.world.tell(f"{self.name} has {request.id} of {tag} wait for a thread")
            with suppress(TaskRevokedError):  # which has answered it
                request.execute_using_pool(self.pool)
        return bool(self.waiting) and len(self.busy) < self.size

    def can_receive(self) -> bool:
        return len(self.reserved) + len(self.waiting) < PREFETCH

    def execute(self) -> None:
        request, work = self.waiting.pop(0)
        free = next(each for each in self.threads if each.child is None)
        self.simulation.world.tell(f"{free.name} starts {request.id}")
        free.begin(request, work)

    def acks(self, request: Any, tag: int) -> None:
        self._check_own(request)
        self.hub.append(partial(self.simulation.broker.ack, tag))

    def rejects(self, request: Any, tag: int, *, requeue: bool) -> None:
        self._check_own(request)
        broker = self.simulation.broker
        if requeue:
            self.simulation.law.given_back(request, getcurrent().host)
        self.hub.append(partial(broker.requeue if requeue else broker.ack, tag))

    def _check_own(self, request: Any) -> None:
        """Check that what answers a message is its delivery."""
        answers = getattr(getcurrent(), "host", None)
        if isinstance(answers, PoolThread) and answers.request is not request:
            self.simulation.law.fail(f"the delivery of {answers.request.id} answers {request.id} of another one")

    def finished(self, request: Any, report: Callable[..., object], *found: Any) -> None:
        """A delivery has ended in its thread, which reports what came of it."""
        if not getcurrent().killed:  # that exit is the simulation's own
            self.simulation.law.finished(request, getcurrent().host)
            self.simulation.world.step()
            report(*found)

    def run_hub(self) -> None:
        """Let the main thread tell the broker what it has to."""
        while self.hub:
            self.hub.pop(0)()

    # -- faults --------------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[tuple[str, float]]:
        if self.busy:
            yield from FAULTS_OF_PROCESSES
        elif self.reserved or self.waiting or self.hub:
            yield from FAULTS_OF_WORKERS
        if len(self.busy) > 1:  # what is done for one of them may be left undone for the others
            yield from FAULTS_OF_SEVERAL

    def disconnect(self) -> None:
        """What the main thread has yet to tell the broker is lost; what waits for a thread runs all the same."""
        self.hub.clear()
        super().disconnect()

    def _end(self, down_for: float) -> None:
        since, law = max(self.ends_since, self.stopped_until), self.simulation.law
        for each in self.busy:
            if self.stopping and self.troubles == self.troubles_before:
                law.announced(each.request, since)
            law.killed(each.child)
        self._kill_processes(self, *self.threads)
        super()._end(down_for)

    def _stop(self, *, cold: bool) -> None:
        world, patience = self.simulation.world, INFINITE
        if cold:
            patience = world.now + world.choices.one_of("a second signal comes after", [INFINITE, 0.0, 4.0])
            self.cut_off_all()
        self.waiting.clear()
        while world.now < patience and self.busy:
            world.sleep(0.5)
            self._check_slot()
        self.run_hub()
        self.simulation.broker.lose(self)  # its connection is closed
        self.wait_for_threads()
        self.doomed = "stopped"

    def wait_for_threads(self) -> None:
        """Wait for all bodies, as Python does for its threads."""
        while self.busy:
            self.simulation.world.sleep(0.5)

    def cut_off_all(self) -> None:
        """Do as Celery's handler of signals does in a cold shutdown."""
        for request in self.requests:
            if not request.acknowledged and request.id not in self.succeeded:
                try:
                    request.cancel(self.pool, "TERM")
                except Exception as error:  # noqa: BLE001 - in a handler of signals, which it would end
                    self.simulation.law.fail(f"a cold shutdown of {self.name} raises {error!r}")

    def _check_slot(self) -> None:
        """Check that no delivery waits for its lease in a worker that is about to end."""
        for each in self.busy:
            self.check_begun(each)


POOLS["threads"] = ThreadedWorker


class Threads(Charges):
    """The same in one process for several bodies: none is in another's way."""

    kind = "threads"
    pools = ("threads",)
    orders = (1, 2, 2)

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        self.leaves = self.choices.one_of("leaves", [0, 0, 0, 0, 0.2, 0.9])
        if self.leaves:  # else it would go on for ever, or for longer than is looked at
            self.requeues = 0
            self.long = [seconds for seconds in self.long if 2 * seconds < STEADY]
        #: by process: the task whose body it runs
        self.running: dict[Process, Any] = {}
        #: the tasks that an operator has revoked, and was to end
        self.revoked: set[str] = set()

    def faults(self) -> list[Step]:
        running = [request for worker in self.simulation.workers for request in worker.requests]
        # Known: one that waits for a thread then has no end, for Celery would end it as it starts.
        started = [each for each in running if each.time_start]
        revokes = [(f"an operator revokes {each.id}", 0.03, self._revoke, each) for each in started]
        return super().faults() + revokes

    def _revoke(self, request: Any) -> None:
        """Do as remote control does for ``revoke(terminate=True)``: no thread can be ended, which is the reply."""
        self.world.tell(f"an operator revokes {request.id}")
        self.simulation.spend()
        self.revoked.add(request.id)
        state.revoked.add(request.id)
        with suppress(NotImplementedError):
            request.terminate(request.worker.pool, "TERM")

    def check_answer_of(self, order: str, task_id: str, meta: Any) -> None:
        # Celery discards what comes of a task that was revoked; a result that is there stays.
        if meta["status"] != states.REVOKED or task_id not in self.revoked:
            super().check_answer_of(order, task_id, meta)

    def may_fail_with(self, kind: str, task_id: str, runs: list[Run]) -> bool:
        replaced = kind == "TaskRevokedError" and any(run.task_id in self.revoked and run.handed_over for run in runs)
        return replaced or super().may_fail_with(kind, task_id, runs)

    def body(self, task: Any, order: str) -> str:
        self.running[getcurrent()] = task
        return super().body(task, order)

    def mail(self, task: Any, order: str) -> str:
        self.running[getcurrent()] = task
        return super().mail(task, order)

    def check_turn(self, run: Run, request: Any) -> None:
        super().check_turn(run, request)
        self.check_own(run)
        beside = [other for other in self.runs if not other.ending and other.worker.whole is run.worker.whole]
        self.counts["side by side"] += bool(beside)

    def charge(self, run: Run) -> None:
        super().charge(run)
        self.check_own(run)

    def conclude(self, run: Run) -> None:
        self.check_own(run)
        if self.choices.chance(f"run of {run.order}: leaves", self.leaves):
            if not run.ending:  # else it has published its retry
                run.left, run.in_shutdown = True, run.worker.stopping
                run.ending, run.ended = "killed", self.world.now
                self.deaths[run.order] += 1
            raise SystemExit(3)

    def check_own(self, run: Run) -> None:
        """Check that a body finds its own lease and its own message, whatever runs beside it."""
        if current_lease() is not run.held or self.running[getcurrent()].lease is not run.held:
            self.fail(f"run {run.number} of {run.order} finds the lease of another")
        request = getcurrent().host.request
        if run.task_id != request.id or run.held.lease.owner != request._owner:
            self.fail(f"run {run.number} of {run.order} is taken for {run.task_id}, and is of {request.id}")

    def check(self) -> None:
        super().check()
        for run in self.runs:
            if not run.ending and not run.process.dead:
                self.check_kept(run)

    def check_kept(self, run: Run) -> None:
        """Check that a body that runs keeps what is its own, whatever ends beside it."""
        if id(run.held) not in run.worker.shown:
            self.fail(f"run {run.number} of {run.order} goes on, and is not shown")
        if run.held not in run.worker.heartbeat.holdings():
            self.fail(f"run {run.number} of {run.order} goes on, and its lease is not renewed")
