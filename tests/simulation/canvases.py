"""Chords, chains and callbacks: an order is packed in parts, then shipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import chain, chord, states
from greenlet import getcurrent

from celery_idempotent.celery.canvas import RETURNING
from celery_idempotent.stores import Refusal

from .celery import WHILE
from .law import Law
from .world import Process, Step


@dataclass(eq=False)
class Order:
    """An order, and what came of it."""

    name: str
    shape: str
    parts: int
    result: Any = None
    #: the ids under which it was shipped, and with what each body was called
    shipped: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    #: the ids under which a message to ship it was published
    published: set[str] = field(default_factory=set)


class Canvases(Law):
    """What follows a task follows it once, under one id, with all that went before."""

    kind = "canvases"
    pools = ("prefork", "prefork", "threads", "greenlets")
    steps_in_backend = True
    #: Celery itself drops what it cannot publish after a task.
    broker_goes_away = False

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        choices = self.choices
        self.long = choices.one_of("takes", [[0], [0, 0, 1, 9]])
        self.retries = choices.one_of("retries", [0, 0, 0.2])
        self.waiting = [
            Order(name, choices.one_of(f"shape of {name}", ["chord", "chord", "chain", "callback"]), 1)
            for name in ("ORD-1", "ORD-2")[: choices.one_of("orders", [1, 1, 2])]
        ]
        for order in self.waiting:
            order.parts = choices.one_of(f"parts of {order.name}", [2, 3]) if order.shape == "chord" else 1
        self.orders: dict[str, Order] = {}
        #: by process: the task whose continuations it knows to be dispatched, as the store has told it
        self.knows: dict[Any, str] = {}
        #: runs of which a caller may have an answer that was not settled
        self.failed_to_settle = False
        #: members that have RETRY, or had it when their chord was to be complete, though they were done
        self.given_back_as_retries: set[str] = set()

    def steps(self) -> list[Step]:
        return [("an order is published", 2.0, self._publish, None)] if self.waiting else []

    def _publish(self, _: None) -> None:
        order = self.waiting.pop(0)
        self.orders[order.name] = order
        self.counts[order.shape] += 1
        tasks = self.simulation.producer.tasks
        pack, ship = tasks["pack"], tasks["ship"]
        parts = [pack.si(order.name, number).set(task_id=f"{order.name}-{number}") for number in range(order.parts)]
        if order.shape == "chord":
            order.result = chord(parts)(ship.s(order.name))
        elif order.shape == "chain":
            order.result = chain(parts[0], ship.s(order.name)).apply_async()
        else:
            parts[0].link(ship.s(order.name))
            parts[0].apply_async()

    def body(self, task: Any, order: str, *given: Any) -> Any:
        """Pack a part, or ship what was packed."""
        world, choices, name = self.world, self.choices, f"{task.name} {order}"
        self.counts["runs"] += 1
        world.sleep(choices.one_of(f"{name}: before", self.long), f"{name} begins")
        if task.request.retries < 3 and choices.chance(f"{name}: retries", self.retries):
            raise task.retry(countdown=choices.one_of(f"{name}: retries after", [0, 2]))
        world.sleep(choices.one_of(f"{name}: after", self.long), f"{name} ends")
        if task.name == "pack":
            return f"part {given[0]}"
        self.orders[order].shipped[task.request.id].append(given[0])
        return f"shipped {order}"

    def watch(self, verb: str, args: Any, host: Any, call: Callable[[], Any]) -> Any:
        answer = call()
        if verb == "acquire":
            id_, known = args[0].announcer, isinstance(answer, Refusal) and answer.record.dispatched
            self.knows[getcurrent()] = id_ if known and id_ in known else ""
        return answer

    def told(self, verb: str, args: Any, answer: Any, host: Any) -> None:
        if verb == "settle":  # and what follows is yet to be dispatched, and the part to be counted
            self.simulation.ripen(host, "child killed", "child stopped", factor=WHILE)

    def published(self, message: Any, process: Any) -> None:
        if message["headers"]["task"] == "ship":
            if message["headers"]["parent_id"] and self.knows.get(process) == message["headers"]["parent_id"]:
                self.fail(f"what follows {self.knows[process]} is published by a replay, and was before")
            order = next(name for name in self.orders if name in message["headers"]["argsrepr"])
            self.orders[order].published.add(message["headers"]["id"])
            if isinstance(process, Process):
                self.simulation.ripen(process.host, "child killed")  # which has yet to note that it did

    def interrupted(self, process: Process) -> None:
        super().interrupted(process)
        self._excuse(process.host.request)

    def timed_out(self, process: Process) -> None:
        super().timed_out(process)
        self._excuse(process.host.request)

    def _excuse(self, request: Any) -> None:
        """One of an order's tasks may have failed."""
        self.orders[request._args[-1 if request.name == "ship" else 0]].shape = ""

    def killed(self, process: Process) -> None:
        super().killed(process)
        # Known: the backend only counts the parts, and that one was counted is noted after that.
        if process.counted:
            self.orders[process.host.request._args[0]].shape = ""

    def counts_late(self, process: Process, seconds: float) -> None:
        # Known: by then it is taken for dead, and another one counts the part.
        if seconds > self.simulation.producer.conf.result_chord_join_timeout + RETURNING:
            self.orders[process.host.request._args[0]].shape = ""

    def stored(self, key: Any, value: Any) -> None:
        """Take note of a task that Celery has as a retry for a shutdown, perhaps over its success."""
        if '"RETRY"' in str(value) and getcurrent().host.stopping:
            self.given_back_as_retries.add(bytes(key).decode().rpartition("task-meta-")[2])

    def emitted(self, event: Any) -> None:
        self.failed_to_settle = self.failed_to_settle or type(event).__name__ == "SettleFailed"

    def ended(self) -> None:
        super().ended()
        for order in self.orders.values():
            if order.shape and not self.failed_to_settle:
                self.check_order(order)

    def check_order(self, order: Order) -> None:
        members = [f"{order.name}-{number}" for number in range(order.parts if order.shape == "chord" else 0)]
        backend = self.simulation.producer.backend
        # Celery looks for a success, and stores its RETRY after that: the chord fails for it.
        if any(backend.get_task_meta(member)["status"] == states.RETRY for member in members):
            return
        if not self.given_back_as_retries.isdisjoint(members) and order.result.failed():  # before that was mended
            return
        if len(order.published) != 1:
            self.fail(f"{order.name} ({order.shape}) is to be shipped under {len(order.published)} ids")
        parts = [f"part {number}" for number in range(order.parts)]
        expected = parts if order.shape == "chord" else parts[0]
        if not order.shipped:
            self.fail(f"{order.name} ({order.shape}) was never shipped")
        for given in [given for all_given in order.shipped.values() for given in all_given if given != expected]:
            self.fail(f"{order.name} ({order.shape}) was shipped with {given!r}")
        (task_id,) = order.published
        meta = self.simulation.producer.backend.get_task_meta(task_id)
        if meta["status"] == states.RETRY and order.shipped[task_id]:
            return  # Celery looks for a success, and stores its RETRY after that
        if meta["status"] != states.SUCCESS or meta["result"] != f"shipped {order.name}":
            self.fail(f"{order.name} ({order.shape}) ends as {meta['status']}: {meta['result']!r}")
        if order.result is not None and order.result.id != task_id:
            self.fail(f"{order.name} ({order.shape}) was promised as {order.result.id} and shipped as {task_id}")
