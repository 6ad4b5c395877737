"""The demo: one load and one set of faults, on plain Celery and on `IdempotentTask`."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click

from . import report
from .processes import DemoError, Interrupted, Processes, Redis, Signals, start_redis
from .report import NAMES, Lines, Outcome, Progress, open_screen
from .scenario import BURST, ORDERS, Fault, Order, count, draw_orders
from .shop import TASK, VISIBILITY_TIMEOUT, DemoAddress, make_app

EXIT_BAD = 1
#: Seconds for each run, start included, of which it needs a few where nothing else keeps the machine busy; what it does
#: not need is left to the next. Orders not done by then are lost.
RUN_SECONDS = 120.0


def run(*, seed: int, as_json: bool, fetch_redis: bool) -> int:
    """Run the demo, and return its exit status.

    Arguments:
        seed: Draws the orders, and which of them meets which fault.
        as_json: Print JSON instead of a table.
        fetch_redis: Let pip fetch a redis-server into the demo's directory if there is none.

    Returns:
        0 if the idempotent run charged every customer once; 1 if not, or if the demo cannot run here; 128 + the number
        of the signal that ended it.
    """
    with Signals() as signals:
        try:
            outcomes = _run_both(signals, seed, fetch_redis)
        except DemoError as error:
            click.echo(f"celery-idempotent demo: {error}", err=True)
            return EXIT_BAD
        except Interrupted as interruption:
            click.echo("Interrupted; every process is ended and the temporary directory removed.", err=True)
            return 128 + interruption.number
    if as_json:
        click.echo(report.as_json(seed, outcomes))
    else:
        report.show(outcomes)
    return 0 if report.is_good(outcomes["idempotent"]) else EXIT_BAD


def _run_both(signals: Signals, seed: int, fetch_redis: bool) -> dict[str, Outcome]:
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]  # CELERY_BROKER_URL would win over the demo's broker
    orders = draw_orders(seed)
    deadline = monotonic()
    outcomes = {}
    with Processes() as processes:
        redis = start_redis(processes, signals.check, fetch=fetch_redis)
        click.echo(_introduction(redis.version, seed), err=True)
        with open_screen() as screen:
            for name in NAMES:
                screen.run = name
                deadline += RUN_SECONDS
                run = DemoRun(name, orders, name == "idempotent", redis, deadline, processes, signals.check, screen)
                outcomes[name] = run.run()
    return outcomes


def _introduction(redis_version: str, seed: int) -> str:
    import celery

    head = click.style(f"Celery {celery.__version__}, Redis {redis_version}, seed {seed}", dim=True)
    text = (
        f"{ORDERS} orders, each to be charged once, go to {WORKERS} workers of {CHILDREN} processes: first on plain "
        "Celery with acks_late and reject_on_worker_lost, then with IdempotentTask. Both times the same orders meet "
        "the same faults: kill -9 before a charge, after it and before the ack; a visibility timeout that passes "
        f"during a charge; {BURST} publishes at once; a failure and its retry."
    )
    return f"\n{textwrap.fill(text, report.WIDTH)}\n{head}\n"


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

_WORKER = (
    "-m",
    "celery",
    "-A",
    "celery_idempotent.cli.demo.shop",
    "worker",
    "--pool=prefork",
    f"--concurrency={CHILDREN}",
)
_QUICK = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING")


@dataclass
class DemoRun:
    """One run.

    Arguments:
        name: Names its processes and its directory.
        orders: The load.
        idempotent: Whether the task is an `IdempotentTask`.
        redis: Its broker and its store.
        deadline: Monotonic time at which it ends, whatever is not done.
        processes: Starts and ends what it needs.
        check: Raises if the demo is to end.
        screen: Shows how far it is, and each fault.
    """

    name: str
    orders: list[Order]
    idempotent: bool
    redis: Redis
    deadline: float
    processes: Processes
    check: Callable[[], None]
    screen: Lines
    _progress: Progress = field(default_factory=Progress)
    _events: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _next_sweep: float = 0.0

    @property
    def _directory(self) -> Path:
        return self.processes.directory / self.name

    def run(self) -> Outcome:
        """Run it.

        Raises:
            DemoError: something does not start, or ends too early.
            Interrupted: the demo is to end.
        """
        self._directory.mkdir()
        self.screen.log("starting the payment gateway and the workers")
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
            self.processes.end(*self._started.values())

    def _start_gateway(self) -> None:
        orders, ledger = self._directory / "orders.json", self._directory / "ledger"
        orders.write_text(json.dumps({order.id: (order.latency, order.fault) for order in self.orders}))
        ledger.touch()
        command = [sys.executable, "-m", "celery_idempotent.cli.demo.gateway", str(ledger), str(orders)]
        gateway = self._start("gateway", command, stdout=subprocess.PIPE)
        threading.Thread(target=self._read_events, args=(gateway,), daemon=True).start()
        self._wait_until(lambda: bool(self._progress.port), "the payment gateway listens")

    def _place(self) -> DemoAddress:
        books = self._directory / "books"
        books.touch()
        first = 2 if self.idempotent else 0
        gateway = f"http://127.0.0.1:{self._progress.port}"
        return DemoAddress(self.idempotent, self.redis.url(first), self.redis.url(first + 1), gateway, str(books))

    def _start_workers(self, place: DemoAddress) -> None:
        # They would warn of root.
        env = {**place.environment(), "PYTHONWARNINGS": "ignore"}
        for number in range(1, WORKERS + 1):
            node = f"--hostname=worker{number}@localhost"
            self._start(f"worker{number}", [sys.executable, *_WORKER, node, *_QUICK], env=env)
        self._wait_until(lambda: self._progress.ready == WORKERS, "the workers are ready")

    def _start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        name = f"{self.name}-{name}"
        self._started[name] = self.processes.start(name, command, **options)
        return self._started[name]

    def _work(self, broker: Broker, place: DemoAddress) -> Outcome:
        began = monotonic()
        for order in self.orders:
            broker.publish(order)
            self._progress.published += order.copies
            self._attend(broker)
        ended = self._watch(broker)
        # Counted from the files, when no process can write to them any more.
        self.processes.end(*self._started.values(), grace=GRACE_SECONDS if ended else 0.0)
        charged, paid = (_first_words(path) for path in (self._directory / "ledger", Path(place.books)))
        seconds = (ended or monotonic()) - began
        return Outcome(count(self.orders, charged, paid), self._progress, finished=bool(ended), seconds=seconds)

    def _watch(self, broker: Broker) -> float | None:
        """Attend to the run until its end, and return when that was, or None at the deadline."""
        quiet_since: float | None = None
        while (now := monotonic()) < self.deadline:
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
        kills = sum(order.fault.kills for order in self.orders)
        return len(self._progress.killed) == kills and not self._progress.charging and not broker.on_its_way()

    def _attend(self, broker: Broker) -> None:
        """Do what is due: faults, the broker's sweep, the screen."""
        self._take_events()
        if monotonic() >= self._next_sweep:
            self._next_sweep = monotonic() + SWEEP_SECONDS
            if late := broker.sweep():
                self._progress.redelivered += late
                self.screen.log(f"visibility timeout passed: the broker hands out {late} again")
        self.screen.show(self._progress)

    def _take_events(self) -> None:
        self.check()
        while not self._events.empty():
            event = self._events.get()
            self._progress.take(event)
            if event["event"] == "held" and self.processes.kill_child(event["pid"]):
                self._progress.kill(event["order"], event["pid"], monotonic())
                self.screen.log(f"{event['order']}: {Fault(event['fault']).text}")
        for name, process in self._started.items():
            if process.poll() is not None:
                log = self.processes.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise DemoError(f"{name} ended with status {process.returncode}. Its last words:\n\n" + "\n".join(log))

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if monotonic() > self.deadline:
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


class Broker:
    """A Redis broker.

    Arguments:
        app: The shop's Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection = app.connection_for_write()
        self._channel = self._connection.default_channel

    def close(self) -> None:
        """Close every connection to it."""
        self._connection.close()
        self._app.close()

    def publish(self, order: Order) -> None:
        """Publish an order, as often as its fault wants and then at once."""
        if order.copies == 1:
            self._send(order)
            return
        start = threading.Barrier(order.copies)

        def send() -> None:
            start.wait()
            self._send(order)

        threads = [threading.Thread(target=send) for _ in range(order.copies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def on_its_way(self) -> int:
        """Return how many messages wait, or are with a worker and not acked."""
        with self._channel.conn_or_acquire() as client:
            return int(client.llen(self._app.conf.task_default_queue)) + int(client.hlen(self._channel.unacked_key))

    def sweep(self) -> int:
        """Put back into the queue what was not acked within the visibility timeout, and return its number.

        Every worker does this, with this very method, about every 100 seconds; a demo cannot wait that long.
        """
        with self._channel.conn_or_acquire() as client:
            late = int(client.zcount(self._channel.unacked_index_key, "-inf", time.time() - VISIBILITY_TIMEOUT))
        if late:
            self._channel.qos.restore_visible(num=None, interval=1)
        return late

    def _send(self, order: Order) -> None:
        self._app.send_task(TASK, (order.id, order.amount))
