"""The tasks that the applications of the tests publish, and what a request publishes of them."""

from __future__ import annotations

import json
from typing import Any

from celery import Celery, chain, chord, group

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.journal import Journal
from tests.support.http import views

app = from_env(Celery("orders"))
app.conf.idempotency = {"lease_ttl": 30}


@app.task(base=IdempotentTask, bind=True)
def work(self: Any, name: str, *before: object) -> str:
    """Note a run."""
    Journal.from_env().write("ran", name, task_id=self.request.id)
    if name == "failing":
        raise ValueError(name)
    return name


def publish(tag: str) -> Any:
    """Publish what a request does, and note the ids of its results, outside the process; return that of its chain."""
    of = work.si
    results = {
        "one": work.delay("one"),
        "one more": work.delay("one"),
        "chain": chain(of("first"), of("second"), of("third")).apply_async(),
        "chord": chord([of("left"), of("right")], of("body")).apply_async(),
        "group": group(of("a"), chain(of("b"), group(of("c"), of("d")), of("e"))).apply_async(),
        "parent": work.apply_async(("parent",), link=of("callback")),
        "failing": work.apply_async(("failing",), link_error=of("errback")),
    }
    ids = {name: result.as_tuple() for name, result in results.items()}
    views.note(f"published {tag} {json.dumps(ids)}")
    return results["chain"]
