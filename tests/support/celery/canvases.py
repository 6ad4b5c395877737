"""Canvases: every way of putting tasks together that Celery has, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

from celery import chain, chord, group
from celery.canvas import StampingVisitor

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def anonymous(value: object) -> str:
    """Return the text of a value without the ids in it, which differ from run to run."""
    return UUID.sub("<id>", repr(value))


class Visitor(StampingVisitor):
    """Stamps every signature with its task's name, and callbacks and errbacks as what they are."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"mark": f"on {sig.task.rpartition('.')[2]}", "stamped_headers": ["mark"]}

    def on_callback(self, callback: Any, **headers: Any) -> dict[str, Any]:
        return {"linked": "callback", "stamped_headers": ["linked"]}

    def on_errback(self, errback: Any, **headers: Any) -> dict[str, Any]:
        return {"linked": "errback", "stamped_headers": ["linked"]}


def stamped(sig: Any) -> Any:
    sig.stamp(Visitor(), tenant="blue")
    return sig


def linked_errors(sig: Any, *errbacks: Any) -> Any:
    for errback in errbacks:
        sig.link_error(errback)
    return sig


def canvases(m: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return, by name, functions that apply one canvas each, of the tasks of `canvas_app`, and return its result."""

    def t(task: str, *args: Any, **options: Any) -> Any:
        return getattr(m, task).s(*args, tag=tag).set(**options)

    def i(task: str, *args: Any, **options: Any) -> Any:
        return t(task, *args, **options).set(immutable=True)

    table: dict[str, Callable[[], Any]] = {
        "one task": lambda: t("add", 1, 2).apply_async(),
        "chain": lambda: chain(t("add", 1, 2), t("add", 3), t("add", 4)).apply_async(),
        "chain with partial arguments": lambda: chain(t("add", 1), t("add", 3)).apply_async((7,)),
        "chain of immutable steps": lambda: chain(t("add", 1, 2), i("add", 5, 5), i("echo", "x")).apply_async(),
        "chain of groups": lambda: chain(
            group(t("add", 1, 1), t("add", 2, 2)), t("total"), group(t("add", 1), t("add", 2)), t("total"), t("add", 1)
        ).apply_async(),
        "chain in a chain": lambda: chain(t("add", 1, 1), chain(t("add", 2), t("add", 3)), t("add", 4)).apply_async(),
        "chain with a failing step": lambda: linked_errors(
            chain(t("add", 1, 1), t("fail"), t("add", 4)), t("failed"), t("failed_inline")
        ).apply_async(),
        "chain with links": lambda: chain(
            t("add", 1, 1).set(link=[t("echo", "linked to the first")]), t("add", 2)
        ).apply_async(link=[t("echo", "linked to the chain")]),
        "group": lambda: group(t("add", n, n) for n in range(4)).apply_async(),
        "group of one": lambda: group(t("add", 1, 1)).apply_async(),
        "empty group": lambda: group().apply_async(),
        "group in a group": lambda: group(t("add", 1, 1), group(t("add", 2, 2), t("add", 3, 3))).apply_async(),
        "group with a failing member": lambda: group(t("add", 1, 1), t("fail")).apply_async(),
        "group of chains": lambda: group(chain(t("add", 1, 1), t("add", n)) for n in range(2)).apply_async(),
        "chord": lambda: chord([t("add", n, n) for n in range(3)], t("total")).apply_async(),
        "chord of one": lambda: chord([t("add", 1, 1)], t("total")).apply_async(),
        "chord of none": lambda: chord([], t("total")).apply_async(),
        "chord of chains": lambda: chord([chain(t("add", 1, 1), t("add", 2)), t("add", 3)], t("total")).apply_async(),
        "chord whose body is a chain": lambda: chord(
            [t("add", 1, 1), t("add", 2, 2)], chain(t("total"), t("add", 1))
        ).apply_async(),
        "chord whose body is a group": lambda: chord(
            [t("add", 1, 1), t("add", 2, 2)], group(t("total"), t("echo", "too"))
        ).apply_async(),
        "chord in a chord": lambda: chord(
            [chord([t("add", 1, 1), t("add", 2, 2)], t("total")), t("add", 3, 3)], t("total")
        ).apply_async(),
        "chord after a step": lambda: chain(
            t("add", 1, 1), chord([t("add", 1), t("add", 2)], t("total")), t("add", 1)
        ).apply_async(),
        "chord after a chord": lambda: chain(
            chord([t("add", 1, 1), t("add", 2, 2)], t("total")), chord([t("add", 1), t("add", 2)], t("total"))
        ).apply_async(),
        "chord with a failing member": lambda: linked_errors(
            chord([t("add", 1, 1), t("fail")], linked_errors(t("total"), t("failed")))
        ).apply_async(),
        "chord with a failing body": lambda: chord(
            [t("add", 1, 1), t("add", 2, 2)], t("fail").on_error(t("failed"))
        ).apply_async(),
        "chord with a failing member of an inner chord": lambda: chord(
            [chord([t("fail")], t("total")), t("add", 1, 1)], t("total").on_error(t("failed"))
        ).apply_async(),
        "chord with the same member twice": lambda: chord([t("add", 1, 1), t("add", 1, 1)], t("total")).apply_async(),
        "chord with a member that retries": lambda: chord([t("stubborn", 1), t("add", 1, 1)], t("total")).apply_async(),
        "chord with a member that adds members": lambda: chord(
            [t("grow", 1), t("add", 1, 1)], t("tally")
        ).apply_async(),
        "chord with a member that replaces itself": lambda: chord(
            [t("again", 1), t("add", 1, 1)], t("total")
        ).apply_async(),
        "link": lambda: t("add", 1, 1).apply_async(link=t("add", 5)),
        "links": lambda: t("add", 1, 1).apply_async(link=[t("add", 5), i("echo", "immutable"), group(t("add", 6))]),
        "canvases as links": lambda: t("add", 1, 1).apply_async(
            link=[
                chain(t("add", 1), t("add", 2)),
                chord([t("add", 3), t("add", 4)], t("total")),
                chain(group(t("add", 5), t("add", 6)), t("total")),
            ]
        ),
        "link_error": lambda: t("fail").apply_async(link_error=[t("failed"), t("failed_inline"), i("echo", "handled")]),
        "link of a task that retries": lambda: t("stubborn", 1).apply_async(link=t("add", 5), link_error=t("failed")),
        "task replaced by one that fails": lambda: t("become", 1, "failure").apply_async(
            link=t("add", 5), link_error=t("failed")
        ),
        "task that replaces itself": lambda: chain(t("again", 1), t("add", 1)).apply_async(link=t("echo", "linked")),
        "task that calls others": lambda: chain(t("spawn", 2), t("add", 1)).apply_async(),
        "task without a result": lambda: chain(t("add", 1, 1, ignore_result=True), t("add", 1)).apply_async(),
        "members without results": lambda: chord(
            [t("quiet", 1), t("add", 1, 1, ignore_result=True)], t("total")
        ).apply_async(),
        "map": lambda: m.double.map([1, 2, 3]).apply_async(),
        "starmap": lambda: m.double.starmap([(1,), (2,)]).apply_async(),
        "chunks": lambda: m.double.chunks([(n,) for n in range(5)], 2).apply_async(),
        "map in a chord": lambda: chord([m.double.map([1, 2])], t("echo")).apply_async(),
        "stamps": lambda: stamped(
            chain(t("add", 1, 1), chord([t("add", 1), t("add", 2)], t("total").set(link=[t("echo", "linked")])))
        ).apply_async(),
        "stamps of errors": lambda: stamped(linked_errors(t("fail"), t("failed"))).apply_async(),
        "stamps of what retries and replaces": lambda: stamped(
            chain(t("stubborn", 1), t("again"), t("become", "task"))
        ).apply_async(),
        "routing": lambda: chain(
            t("add", 1, 1, queue="side"), group(t("add", 1, queue="side"), t("add", 2)), t("total", queue="side")
        ).apply_async(),
        "routing of a chain": lambda: chain(t("add", 1, 1), t("add", 2)).apply_async(queue="side"),
        "routing of what retries and replaces": lambda: chain(
            t("stubborn", 1, queue="side"), t("again", queue="side"), t("become", "task", queue="side")
        ).apply_async(),
        "priority": lambda: chain(t("add", 1, 1), group(t("add", 1), t("add", 2)), t("total")).apply_async(priority=6),
        "priorities": lambda: group(t("add", n, 1, priority=n) for n in (0, 3, 9)).apply_async(),
        "headers": lambda: chain(t("stubborn", 1, headers={"x-tenant": "blue"}), t("add", 1)).apply_async(),
        "countdowns": lambda: chord(
            [t("add", 1, 1, countdown=0.2), t("add", 2, 2)], t("total", countdown=0.1)
        ).apply_async(),
        "eta and expiry": lambda: t("add", 1, 1).apply_async(
            eta=datetime.now(timezone.utc) + timedelta(seconds=0.2), expires=60
        ),
        "limits, shadow and representations": lambda: t("stubborn", 1).apply_async(
            time_limit=50, soft_time_limit=40, shadow="ghost", argsrepr="(secret)", kwargsrepr="{secret}"
        ),
    }
    for shape in ("task", "chain", "group", "chord"):
        table[f"replaced by a {shape} in a chain"] = lambda shape=shape: chain(  # type: ignore[misc]
            t("become", 1, shape), t("tally" if shape == "group" else "echo")
        ).apply_async()
        table[f"replaced by a {shape} in a chord"] = lambda shape=shape: chord(  # type: ignore[misc]
            [t("become", 1, shape), t("add", 5, 5)], t("tally")
        ).apply_async()

    tag = ""

    def apply(name: str) -> Any:
        nonlocal tag
        tag = name
        return table[name]()

    return {name: lambda name=name: apply(name) for name in table}  # type: ignore[misc]
