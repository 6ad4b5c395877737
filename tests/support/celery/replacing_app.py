"""A Celery app whose tasks replace themselves, in every shape that may contain the replaced task.

Where PLAIN is set, the same tasks are Celery's own, so that the two can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, chain, chord, group, signals

from celery_idempotent import IdempotentTask, events
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal


class PlainTask(Task):
    """Celery's own, acked as late as ours, which takes the key for an option that it does not know."""

    abstract = True
    acks_late = True
    reject_on_worker_lost = True


PLAIN = bool(os.environ.get("PLAIN"))
app = from_env(Celery("replacing", task_cls=PlainTask if PLAIN else IdempotentTask))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60"))}


def guarded(**options: object) -> dict[str, Any]:
    """Return the options of an idempotent task; Celery's own has none."""
    return {} if PLAIN else {"idempotency": options}


if os.environ.get("NO_RESULTS"):
    app.conf.result_backend = None


def ran(self: Any, order: str, then: str, tag: str) -> None:
    """Write down a run, and wait at its gate."""
    name = self.name.rpartition(".")[2]
    key = None if PLAIN else getattr(getattr(self, "lease", None), "key", None)
    Journal.from_env().write("ran", tag, task=name, order=order, then=then, id=self.request.id, store_key=key)
    Gates.from_env().wait(f"{name} of {order} {then}".strip())


def begin(self: Any, values: tuple[Any, ...], order: str, then: str, tag: str) -> Any:
    """Return what came from the step before, or be replaced."""
    ran(self, order, then, tag)
    if not then:
        return [order, *values]
    return self.replace(SHAPES[then](Parts(self, order, tag)))


@app.task(bind=True, **guarded(fingerprint=["then", "values", "tag"]))
def same(self: Any, *values: Any, order: str, then: str = "", tag: str = "") -> Any:
    return begin(self, values, order, then, tag)


@app.task(bind=True, **guarded(key="order", fingerprint=["then", "values", "tag"]))
def keyed(self: Any, *values: Any, order: str, then: str = "", tag: str = "") -> Any:
    return begin(self, values, order, then, tag)


@app.task(bind=True)
def second(self: Any, *values: Any, order: str, then: str = "", tag: str = "") -> Any:
    return begin(self, values, order, then, tag)


@app.task(bind=True)
def other(self: Any, *values: Any, order: str, then: str = "", tag: str = "") -> Any:
    ran(self, order, then, tag)
    return list(values)


@app.task(bind=True)
def broken(self: Any, *values: Any, order: str, then: str = "", tag: str = "") -> Any:
    """Fails at first."""
    first = not [entry for entry in Journal.from_env().entries("ran", tag) if entry.fields["task"] == "broken"]
    ran(self, order, then, tag)
    if first:
        raise ValueError(f"no {order}")
    return list(values)


@app.task(bind=True, name="tests.support.celery.replacing_app.plain", base=PlainTask)
def plain(self: Any, order: str, by: str, tag: str) -> Any:
    """A task of Celery's own, which replaces itself by the task named."""
    Journal.from_env().write("ran", tag, task="plain", order=order)
    return self.replace(app.tasks[by].s("from plain", order=order, tag=tag))


@app.task
def collect(values: Any, *, tag: str) -> Any:
    Journal.from_env().write("ran", tag, task="collect")
    return values


class Parts:
    """The signatures that a shape is put together of: of the task itself, and of others."""

    def __init__(self, task: Any, order: str, tag: str) -> None:
        self.task, self.order, self.tag = task, order, tag

    def s(self, *values: Any, **kwargs: Any) -> Any:
        return self.task.s(*values, **{"order": self.order, "tag": self.tag, **kwargs})

    def si(self, *values: Any, **kwargs: Any) -> Any:
        return self.s(*values, **kwargs).set(immutable=True)

    def o(self, *values: Any, task: Any = None, **kwargs: Any) -> Any:
        return (task or other).s(*values, order=self.order, tag=self.tag, **kwargs)


SHAPES: dict[str, Callable[[Parts], Any]] = {
    "itself": lambda p: p.s(1),
    "another": lambda p: p.o(1),
    "a chain of itself": lambda p: chain(p.s(1), p.s(2), p.s(3)),
    "first": lambda p: chain(p.s(1), p.o(2)),
    "middle": lambda p: chain(p.o(1), p.s(2), p.o(3)),
    "last": lambda p: chain(p.o(1), p.s(2)),
    "last, without what is before it": lambda p: chain(p.o(1), p.si(2)),
    "first and last": lambda p: chain(p.s(1), p.o(2), p.s(3)),
    "last of a chain in a chain": lambda p: chain(p.o(1), chain(p.o(2), p.s(3))),
    "in a group": lambda p: group(p.s(1), p.o(2)),
    "in a group alone": lambda p: group(p.s(1)),
    "in a group at the end of a chain": lambda p: chain(p.o(1), group(p.s(2), p.s(3))),
    "after a group": lambda p: chain(p.o(1), group(p.o(2), p.o(3)), p.s(4)),
    "in a header": lambda p: chord([p.s(1), p.o(2)], p.o(3)),
    "in a chain in a header": lambda p: chord([chain(p.s(1), p.s(2)), p.o(2)], p.o(3)),
    "in a body": lambda p: chord([p.o(1), p.o(2)], p.s(3)),
    "in a header and a body": lambda p: chord([p.s(1), p.s(2)], p.s(3)),
    "last of a chain in a body": lambda p: chord([p.o(1), p.o(2)], chain(p.o(3), p.s(4))),
    "in the body of a chord in a body": lambda p: chord([p.o(1)], chord([p.o(2), p.o(3)], p.s(4))),
    "two deep": lambda p: chain(p.o(1), p.s(2, then="last")),
    "three deep": lambda p: chain(p.o(1), p.s(2, then="two deep")),
    "three deep in first places": lambda p: chain(p.s(1, then="two deep in first places"), p.o(2)),
    "two deep in first places": lambda p: chain(p.s(1, then="first"), p.o(2)),
    "three deep in bodies": lambda p: chord([p.o(1)], p.s(2, then="two deep in bodies")),
    "two deep in bodies": lambda p: chord([p.o(1)], p.s(2, then="in a body")),
    "around another that does the same": lambda p: chain(p.o(1, task=second, then="last"), p.s(2)),
    "by way of another": lambda p: second.s(order=p.order, tag=p.tag, then=f"back to {p.task.name}"),
    "by way of another, at the end of a chain": lambda p: chain(
        p.o(1), second.s(order=p.order, tag=p.tag, then=f"back to {p.task.name}")
    ),
    "by way of one of Celery's own": lambda p: plain.s(order=p.order, tag=p.tag, by=p.task.name),
    "for another order": lambda p: p.s(1, order=f"{p.order} too"),
    "for another order, last": lambda p: chain(p.o(1), p.s(2, order=f"{p.order} too")),
    "for another order, first": lambda p: chain(p.s(1, order=f"{p.order} too"), p.o(2)),
    "after what fails": lambda p: chain(p.o(1, task=broken), p.s(2)),
    "in a body after what fails": lambda p: chord([p.o(1, task=broken), p.o(2)], p.s(2)),
}
for task in (same, keyed):
    SHAPES[f"back to {task.name}"] = lambda p, task=task: task.s("and back", order=p.order, tag=p.tag)


def _happened(event: events.Event) -> None:
    name = event.task.rpartition(".")[2]
    if isinstance(event, (events.Replayed, events.Superseded, events.Conflicted, events.Deferred)):
        Journal.from_env().write(type(event).__name__.lower(), name, id=event.task_id)
    if isinstance(event, events.Released):
        Gates.from_env().wait(f"released {name}")


@signals.worker_init.connect(weak=False)
def _watch(**_: Any) -> None:
    """Hear events in workers alone; tests import the app as well."""
    events.add_hook(_happened)
