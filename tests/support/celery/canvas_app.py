"""A Celery app of which every task has one base: IdempotentTask, or what BASE names, as Celery's own.

Every task writes down what it saw of its message, so that the two can be compared; the signatures that `canvases` puts
together carry the name of their canvas as `tag`.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task, chain, chord, current_task, group, signals
from kombu import Queue

from celery_idempotent import IdempotentTask, events
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import from_env
from tests.support.celery.canvases import anonymous
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal


class PlainTask(Task):
    """Celery's own, acked as late as ours."""

    abstract = True
    acks_late = True
    reject_on_worker_lost = True


class UniqueTask(IdempotentTask):
    """Of which a call is skipped while an equal one waits, unless it is part of a canvas."""

    abstract = True
    unique = True


BASES = {"": IdempotentTask, "plain": PlainTask, "unique": UniqueTask}
app = from_env(Celery("canvas", task_cls=BASES[os.environ.get("BASE", "")]))
app.conf.task_queues = [Queue(name) for name in ("celery", "side")]
app.conf.broker_transport_options["queue_order_strategy"] = "sorted"
app.conf.task_inherit_parent_priority = True
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60"))}


def ran(tag: str, *args: object) -> None:
    """Write down what the running task sees of its message."""
    request = current_task.request
    delivery = request.delivery_info or {}
    seen = {
        "args": args,
        "kwargs": sorted(request.kwargs or ()),
        "headers": {k: v for k, v in sorted((request.headers or {}).items()) if k != "timelimit"},
        "stamps": request.stamps,
        "stamped_headers": sorted(request.stamped_headers or ()),
        "queue": delivery.get("routing_key"),
        "priority": delivery.get("priority"),
        "retries": request.retries,
        "nesting": request.replaced_task_nesting,
        "group": bool(request.group),
        "group_index": request.group_index,
        "chord": bool(request.chord),
        "chain": len(request.chain or ()),
        "links": [len(request.callbacks or ()), len(request.errbacks or ())],
        "root": request.root_id == request.id,
        "parent": bool(request.parent_id),
        "ignored": bool(request.ignore_result),
        "limits": request.timelimit,
        "timed": [bool(request.eta), bool(request.expires)],
        "shadow": request.shadow,
        "replies": bool(request.reply_to),
        "reprs": [request.get("argsrepr"), request.get("kwargsrepr")] if current_task.name != tally.name else None,
    }
    name = current_task.name.rpartition(".")[2]
    Journal.from_env().write("ran", tag, task=name, id=request.id, seen=anonymous(seen))
    Gates.from_env().wait(f"{name} of {tag}")


@app.task
def add(x: int, y: int = 0, *, tag: str) -> int:
    ran(tag, x, y)
    return x + y


@app.task
def total(values: list[int], *, tag: str) -> int:
    ran(tag, values)
    return sum(values)


def _succeeded(self: Any, value: Any, task_id: str, args: Any, kwargs: Any) -> None:
    """Celery has dispatched what follows, and the record says so."""
    Gates.from_env().wait(f"succeeded {self.name.rpartition('.')[2]} of {kwargs['tag']}")


@app.task(on_success=_succeeded)
def echo(*values: Any, tag: str) -> list[Any]:
    ran(tag, values)
    return list(values)


@app.task
def tally(values: list[Any], *, tag: str) -> list[Any]:
    """The body of chords in which Celery leaves the order of results to chance."""
    values = sorted((sorted(v, key=repr) if isinstance(v, list) else v for v in values), key=repr)
    ran(tag, values)
    return values


def _errbacks_dispatched(self: Any, error: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
    Gates.from_env().wait(f"dispatched {self.name.rpartition('.')[2]} of {kwargs['tag']}")


@app.task(on_failure=_errbacks_dispatched)
def fail(*values: Any, tag: str) -> None:
    ran(tag, values)
    raise ValueError(f"no {tag}")


@app.task(on_failure=_errbacks_dispatched)
def hesitate(x: int, *, tag: str) -> int:
    """Fails when it runs for the first time."""
    ran(tag, x)
    if sum(entry.fields["task"] == "hesitate" for entry in Journal.from_env().entries("ran", tag)) == 1:
        raise ValueError(f"not yet {tag}")
    return x


@app.task(ignore_result=True)
def quiet(x: int, *, tag: str) -> int:
    ran(tag, x)
    return x


@app.task(bind=True, max_retries=2)
def stubborn(self: Any, x: int, *, tag: str) -> int:
    ran(tag, x)
    if self.request.retries < 2:
        raise self.retry(countdown=0.5)  # not at once: Celery may write RETRY over what a quicker retry has left
    return x


@app.task(bind=True)
def become(self: Any, x: int, shape: str, *, tag: str) -> Any:
    """Replaces itself with another task, a chain, a group, a chord, or a task that fails."""
    ran(tag, x, shape)
    shapes = {
        "task": lambda: add.s(x, 1, tag=tag),
        "chain": lambda: chain(add.s(x, 1, tag=tag), add.s(1, tag=tag)),
        "group": lambda: group(add.s(x, 1, tag=tag), add.s(x, 2, tag=tag)),
        "chord": lambda: chord([add.s(x, 1, tag=tag), add.s(x, 2, tag=tag)], tally.s(tag=tag)),
        "failure": lambda: fail.si(tag=tag),
    }
    return self.replace(shapes[shape]())


@app.task(bind=True)
def again(self: Any, x: int, *, tag: str) -> Any:
    """Replaces itself with itself, twice."""
    ran(tag, x)
    return self.replace(again.s(x + 1, tag=tag)) if self.request.replaced_task_nesting < 2 else x


@app.task(bind=True)
def spawn(self: Any, x: int, *, tag: str) -> int:
    """Calls others in its body: as messages, directly, itself too."""
    ran(tag, x)
    if x:
        spawn.apply_async((x - 1,), {"tag": tag})
        add.apply_async((x, x), {"tag": tag}, countdown=0.1)
        return spawn.run(0, tag=tag) + add(x, 1, tag=tag)
    return 1


@app.task(bind=True)
def grow(self: Any, x: int, *, tag: str) -> int:
    """Adds a member to its own chord."""
    ran(tag, x)
    if x:
        self.add_to_chord(grow.s(x - 1, tag=tag))
    return x


@app.task
def failed(task_id: str, *, tag: str) -> None:
    """An errback of the old kind: a task of its own."""
    ran(tag)


@app.task
def failed_inline(request: Any, error: Any, traceback: Any, *, tag: str) -> None:
    """An errback of the new kind, which Celery calls where the task has failed."""
    Journal.from_env().write("ran", tag, task="failed_inline", id="-", seen=anonymous(error))


@app.task
def double(x: int) -> int:
    """What map, starmap and chunks call, whose items have no room for a tag."""
    Journal.from_env().write("ran", "map", task="double", id="-", seen=anonymous(x))
    return 2 * x


@signals.worker_init.connect(weak=False)
def _watch(**_: Any) -> None:
    """Watch what happens in this worker, and hold it where a test closes a gate."""
    signals.before_task_publish.connect(_publishing, weak=False)
    signals.task_postrun.connect(_ended, weak=False)
    events.add_hook(_happened)
    mark = RedisStore.mark_dispatched

    def dispatched(self: RedisStore, *args: Any) -> bool:
        """Celery has dispatched what follows, and the record does not say so yet."""
        if current_task:
            tag = current_task.request.kwargs.get("tag")
            Gates.from_env().wait(f"dispatched {current_task.name.rpartition('.')[2]} of {tag}")
        return mark(self, *args)

    RedisStore.mark_dispatched = dispatched  # type: ignore[method-assign]


def _publishing(sender: str = "", body: Any = None, **_: Any) -> None:
    if current_task:
        Gates.from_env().wait(f"publishing {sender.rpartition('.')[2]} of {body[1].get('tag')}")


def _ended(task: Any = None, kwargs: Any = None, **_: Any) -> None:
    """Celery has done all there is to do but to ack."""
    Gates.from_env().wait(f"ended {task.name.rpartition('.')[2]} of {kwargs.get('tag')}")


def _happened(event: events.Event) -> None:
    if isinstance(event, (events.Replayed, events.Superseded, events.LeaseLost)):
        Journal.from_env().write(type(event).__name__.lower(), event.task.rpartition(".")[2], id=event.task_id)
