"""One run of the load: gateway, workers, orders, and the faults as the gateway calls for them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from .broker import Broker
from .errors import DemoError
from .processes import Processes
from .progress import Outcome, Progress
from .scenario import Fault, Order, count
from .screen import Screen
from .servers import Redis
from .shop import Place, make_app

__all__ = ["CHILDREN", "WORKERS", "Trial"]

WORKERS = 2
CHILDREN = 4
SWEEP_SECONDS = 0.5
#: A run is over when nothing was on its way for this long: a message that a worker is just taking is nowhere.
QUIET_SECONDS = 0.6
TICK_SECONDS = 0.05
#: Seconds that idle workers get to end by themselves.
GRACE_SECONDS = 3.0
#: Lines of a log that an error quotes.
LOG_LINES = 15

_WORKER = ("-m", "celery", "-A", "celery_idempotent.demo.shop", "worker", "--pool=prefork", f"--concurrency={CHILDREN}")
_QUICK = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING")


class Trial:
    """One run.

    Arguments:
        name: Names its processes and its directory.
        orders: The load.
        idempotent: Whether the task is an `IdempotentTask`.
        redis: Its broker and its store.
        deadline: Monotonic time at which it ends, whatever is not done.
        processes: Starts and ends what it needs.
        check: Raises if the demo shall end.
        screen: Shows how far it is, and each fault.
    """

    def __init__(
        self,
        name: str,
        orders: list[Order],
        *,
        idempotent: bool,
        redis: Redis,
        deadline: float,
        processes: Processes,
        check: Callable[[], None],
        screen: Screen,
    ) -> None:
        self._name = name
        self._orders = orders
        self._idempotent = idempotent
        self._redis = redis
        self._deadline = deadline
        self._processes = processes
        self._check = check
        self._screen = screen
        self._directory = processes.directory / name
        self._progress = Progress()
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._started: dict[str, subprocess.Popen[str]] = {}
        self._next_sweep = 0.0

    def run(self) -> Outcome:
        """Run it.

        Raises:
            DemoError: something does not start, or ends too early.
            Interrupted: the demo shall end.
        """
        self._directory.mkdir()
        self._screen.say("starting the payment gateway and the workers")
        try:
            self._start_gateway()
            place = self._place()
            self._start_workers(place)
            broker = Broker(make_app(place))
            try:
                return self._work(broker, place)
            finally:
                broker.close()
        finally:
            self._processes.end(*self._started.values())

    def _start_gateway(self) -> None:
        orders, ledger = self._directory / "orders.json", self._directory / "ledger"
        orders.write_text(json.dumps({order.id: (order.latency, order.fault) for order in self._orders}))
        ledger.touch()
        command = [sys.executable, "-m", "celery_idempotent.demo.gateway", str(ledger), str(orders)]
        gateway = self._start("gateway", command, stdout=subprocess.PIPE)
        threading.Thread(target=self._read_events, args=(gateway,), daemon=True).start()
        self._wait_until(lambda: bool(self._progress.port), "the payment gateway listens")

    def _place(self) -> Place:
        books = self._directory / "books"
        books.touch()
        first = 2 if self._idempotent else 0
        gateway = f"http://127.0.0.1:{self._progress.port}"
        return Place(self._idempotent, self._redis.url(first), self._redis.url(first + 1), gateway, str(books))

    def _start_workers(self, place: Place) -> None:
        # The warnings would say that somebody tries this as root.
        env = {**place.environment(), "PYTHONWARNINGS": "ignore"}
        for number in range(1, WORKERS + 1):
            node = f"--hostname=worker{number}@localhost"
            self._start(f"worker{number}", [sys.executable, *_WORKER, node, *_QUICK], env=env)
        self._wait_until(lambda: self._progress.ready == WORKERS, "the workers are ready")

    def _start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        name = f"{self._name}-{name}"
        self._started[name] = self._processes.start(name, command, **options)
        return self._started[name]

    def _work(self, broker: Broker, place: Place) -> Outcome:
        began = monotonic()
        for order in self._orders:
            broker.publish(order)
            self._progress.published += order.copies
            self._attend(broker)
        ended = self._watch(broker)
        # Counted from the files, when nobody can write to them any more.
        self._processes.end(*self._started.values(), grace=GRACE_SECONDS if ended else 0.0)
        charged, paid = (_first_words(path) for path in (self._directory / "ledger", Path(place.books)))
        seconds = (ended or monotonic()) - began
        return Outcome(count(self._orders, charged, paid), self._progress, finished=bool(ended), seconds=seconds)

    def _watch(self, broker: Broker) -> float | None:
        """Attend to the run until its end, and return when that was, or None at the deadline."""
        quiet_since: float | None = None
        while (now := monotonic()) < self._deadline:
            self._attend(broker)
            if not self._is_over(broker):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            elif now > quiet_since + QUIET_SECONDS:
                return quiet_since
            sleep(TICK_SECONDS)
        return None

    def _is_over(self, broker: Broker) -> bool:
        kills = sum(order.fault.kills for order in self._orders)
        return len(self._progress.killed) == kills and not self._progress.charging and not broker.on_its_way()

    def _attend(self, broker: Broker) -> None:
        """Do what is due: faults, the broker's sweep, the screen."""
        self._take_events()
        if monotonic() >= self._next_sweep:
            self._next_sweep = monotonic() + SWEEP_SECONDS
            if late := broker.sweep():
                self._progress.redelivered += late
                self._screen.say(f"visibility timeout passed: the broker hands out {late} again")
        self._screen.show(self._progress)

    def _take_events(self) -> None:
        self._check()
        while not self._events.empty():
            event = self._events.get()
            self._progress.take(event)
            if event["event"] == "held" and self._processes.kill_child(event["pid"]):
                self._progress.kill(event["order"], event["pid"], monotonic())
                self._screen.say(f"{event['order']}: {Fault(event['fault']).text}")
        for name, process in self._started.items():
            if process.poll() is not None:
                log = self._processes.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise DemoError(f"{name} ended with status {process.returncode}. Its last words:\n\n" + "\n".join(log))

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if monotonic() > self._deadline:
                raise DemoError(
                    f"Waited until {what}, in vain: this machine is too busy for the demo. Try again later."
                )
            self._take_events()
            sleep(TICK_SECONDS)

    def _read_events(self, gateway: subprocess.Popen[str]) -> None:
        assert gateway.stdout is not None
        with gateway.stdout as lines:
            for line in lines:
                self._events.put(json.loads(line))


def _first_words(path: Path) -> list[str]:
    return [line.split()[0] for line in path.read_text().splitlines()]
