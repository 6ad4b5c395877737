"""Random faults over workers and their store, while operations and duplicates of them are published."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from celery import Celery
from celery.result import AsyncResult

from tests.support.celery.apps import messages
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.faults.broker_file import BrokerFile
from tests.support.faults.ledger import LEASE_TTL, Ledger
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

#: How long a process is paused: past its lease.
PAUSE = LEASE_TTL + 2.0
#: How long a fault of the network or the store lasts: it may not cost a lease.
FAULT = 1.5
KINDS = {"charge": 60, "flaky": 15, "shaky": 10, "chain": 12, "long": 3}


@dataclass
class Aftermath:
    """What was not answered, and by whose fault."""

    #: Redis popped a message for a client that was dying, so that it is nowhere.
    broker: int = 0
    #: Celery's backend looks for SUCCESS, then writes: a process that pauses in between stores its RETRY over it.
    backend: int = 0
    lost: set[str] = field(default_factory=set)

    def explains(self, result: AsyncResult[Any], file: BrokerFile, ledger: Ledger) -> bool:
        """Count who lost this answer, if it was not the library."""
        ids = {result.id, result.parent.id} if result.parent else {result.id}
        broker = not ids.isdisjoint(file.vanished())
        backend = result.state == "RETRY" and result.id in ledger.answered
        self.broker += broker
        self.backend += backend and not broker
        return broker or backend


@dataclass
class Storm:
    """What is published, and what is done to those who work on it.

    Arguments:
        app: Publishes.
        nodes: The workers.
        broker: What they take messages from; started as `broker_file.PERSISTED` says.
        server: Their store.
        proxy: Stands between them and the store.
        journal: Where kills are written down.
        random: Decides everything.
    """

    app: Celery
    nodes: list[WorkerNode]
    broker: RedisServer
    server: RedisServer
    proxy: Proxy
    journal: Journal
    random: random.Random
    callers: list[tuple[str, str, AsyncResult[Any]]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    #: what ends a fault, and when
    due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    paused: list[WorkerNode] = field(default_factory=list)

    def blow(self, operations: int, seconds: float) -> None:
        """Publish the operations over so many seconds, and let a fault strike about every second."""
        began = time.monotonic()
        strike_at = began + 2.0
        late: list[tuple[float, str, str]] = []
        for n in range(operations):
            kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
            name = f"{kind}-{n}"
            self._publish(kind, name)
            duplicates = self.random.choice((0, 0, 0, 1, 2)) if kind != "chain" else 0
            late += [(time.monotonic() + self.random.uniform(0, 8), kind, name) for _ in range(duplicates)]
            while time.monotonic() < began + (n + 1) * seconds / operations:
                self._end_what_is_due()
                for each in [each for each in late if each[0] <= time.monotonic()]:
                    late.remove(each)
                    self._publish(*each[1:])
                if time.monotonic() >= strike_at:
                    self._strike()
                    strike_at = time.monotonic() + self.random.uniform(0.3, 1.7)
                time.sleep(0.005)  # the pace of a producer; nothing is asserted of it
        for _, kind, name in late:
            self._publish(kind, name)
        wait_until(lambda: self._end_what_is_due() or not self.due, PAUSE + 10, "the last faults to end")

    def settle_down(self, deadline: float) -> Aftermath:
        """Wait until all is answered, and publish again what others lost, as its producer would in life."""
        after = Aftermath()
        until = time.monotonic() + deadline
        while time.monotonic() < until:
            try:
                wait_until(lambda: messages(self.app.conf.broker_url) == 0, until - time.monotonic())
                wait_until(lambda: not self._unanswered(), 5.0)
            except WaitTimeout:
                pass
            if messages(self.app.conf.broker_url):
                continue
            ledger, file = Ledger(self.journal, LEASE_TTL), BrokerFile(self.broker.directory)
            for caller in self._unanswered():
                if after.explains(caller[2], file, ledger):
                    self.callers.remove(caller)
                    self._publish(*caller[:2])
                else:
                    after.lost.add(caller[1])
                    print(f"{caller[1]} is not answered; its messages: {file.of(caller[2].id)}")
            if after.lost or not self._unanswered():
                return after
        after.lost.update(name for _, name, _ in self._unanswered())
        return after

    def _unanswered(self) -> list[tuple[str, str, AsyncResult[Any]]]:
        return [caller for caller in self.callers if not caller[2].ready()]

    def _publish(self, kind: str, name: str) -> None:
        module = self.app.module
        task = {"chain": module.charge, "long": module.charge}.get(kind) or getattr(module, kind)
        # 1.3 leases: the holder must renew.
        args = (name, LEASE_TTL * 1.3) if kind == "long" else (name,)
        signature = task.s(*args)
        result = (signature | module.ship.s()).apply_async() if kind == "chain" else signature.apply_async()
        self.callers.append((kind, name, result))

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        for each in [each for each in self.due if each[0] <= now]:
            self.due.remove(each)
            each[1]()

    def _later(self, seconds: float, end: Callable[[], object]) -> None:
        self.due.append((time.monotonic() + seconds, end))

    def _strike(self) -> None:
        choices = {
            self._kill_child: 50,
            self._kill_worker: 5,
            self._pause_worker: 4,
            self._pause_child: 6,
            self._disturb_store: 20,
            self._restart_store: 4,
        }
        for node in self.nodes:
            if not node.running:  # Celery gives up when a child dies while the pool starts
                node.start()
                self.done["worker that gave up at its start"] += 1
        fault = self.random.choices(list(choices), list(choices.values()))[0]
        try:
            struck = fault()
        except (psutil.NoSuchProcess, IndexError):  # it was gone before it could be struck
            return
        if struck:
            self.done[fault.__name__.strip("_").replace("_", " ")] += 1

    def _node(self) -> WorkerNode | None:
        node = self.random.choice(self.nodes)
        return node if node not in self.paused and node.children() else None

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            self.journal.write("killed", pid)

    def _kill_child(self) -> bool:
        node = self._node()
        if node is None:
            return False
        child = psutil.Process(self.random.choice(node.children()))
        self._kill([child.pid])
        child.kill()
        return True

    def _kill_worker(self) -> bool:
        node = self._node()
        if node is None or self.paused:  # one worker of them all is left
            return False
        self._kill(node.members())
        node.kill("SIGKILL")
        node.start()
        return True

    def _pause_worker(self) -> bool:
        node = self._node()
        if node is None or self.paused:
            return False
        node.kill("SIGSTOP")
        self.paused.append(node)
        self._later(PAUSE, lambda: (node.resume(), self.paused.remove(node)))
        return True

    def _pause_child(self) -> bool:
        node = self._node()
        if node is None:
            return False
        child = psutil.Process(self.random.choice(node.children()))
        child.suspend()
        self._later(PAUSE, lambda: child.is_running() and os.kill(child.pid, signal.SIGCONT))
        return True

    def _store_is_disturbed(self) -> bool:
        return any(end == self.proxy.heal for _, end in self.due)

    def _disturb_store(self) -> bool:
        if self._store_is_disturbed():
            return False
        fault = self.random.choice(
            (
                self.proxy.reset,
                self.proxy.drop,
                self.proxy.partition,
                lambda: self.proxy.delay(0.2),
                lambda: (self.proxy.refuse(), self.proxy.reset()),
                lambda: self.proxy.swallow_reply(5, matching=b"EVALSHA"),
            )
        )
        fault()
        self._later(FAULT, self.proxy.heal)
        return True

    def _restart_store(self) -> bool:
        if self._store_is_disturbed():
            return False
        self.server.kill()
        self.server.start()
        return True
