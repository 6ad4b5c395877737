"""A Celery app whose tasks are unique: while a message waits, calls that want the same are not published."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from celery import Celery, Task, chain
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("unique"))
app.conf.idempotency = {"lease_ttl": 30, "on_store_error": os.environ.get("ON_STORE_ERROR", "wait")}
app.conf.worker_prefetch_multiplier = 1
app.conf.task_inherit_parent_priority = "INHERIT_PRIORITY" in os.environ
app.conf.task_track_started = "TRACK_STARTED" in os.environ
app.conf.task_routes = {"*.elsewhere": {"queue": "other"}}


def work(document: object, **fields: object) -> Any:
    """Note that a body begins and ends, with a gate between."""
    journal = Journal.from_env()
    journal.write("begin", document, **fields)
    Gates.from_env().wait(f"in {document}")
    journal.write("end", document)
    return document


@app.task(base=IdempotentTask, unique="document")
def index(document: int, version: int = 0) -> Any:
    """Until its body starts."""
    return work(document, version=version)


@app.task(base=IdempotentTask, unique="document")
def emptied(document: int, parts: list[str]) -> Any:
    """Until its body starts, which uses up what it was given."""
    work(document, parts=[*parts])
    parts.clear()
    return document


@app.task(base=IdempotentTask, unique={"key": "document", "until": "done"})
def rebuild(document: int) -> Any:
    """Until its operation has ended."""
    return work(document)


@app.task(base=IdempotentTask, unique={"key": "document", "on_duplicate": "raise"})
def strict(document: int) -> Any:
    """A second call is an error."""
    return work(document)


@app.task(base=IdempotentTask, unique={"key": "document", "on_duplicate": "replace"})
def newest(document: int, version: int = 0) -> Any:
    """The newest arguments count."""
    work(document, version=version)
    return version


@app.task(base=IdempotentTask, bind=True, unique={"key": "document", "on_duplicate": "replace"})
def newest_again(self: Any, document: int, version: int, how: str = "") -> Any:
    """The newest arguments count, also where an older message goes on."""
    if how and not self.request.retries:
        Journal.from_env().write("tried", document, version=version)
        Gates.from_env().wait(f"retry {document}")
        if how == "replace":
            raise self.replace(chain(other.si(document + 1), self.si(document, version)))
        raise self.retry(countdown=1)
    return work(document, version=version)


@app.task(base=IdempotentTask, unique={"key": "document", "debounce": 1, "max_wait": 3})
def quiet(document: int, version: int = 0) -> Any:
    """Runs once it has been quiet."""
    work(document, version=version)
    return version


@app.task(base=IdempotentTask, unique={"key": "document", "throttle": 2})
def gathered(document: int, version: int = 0) -> Any:
    """Runs now, and once at the end of each period."""
    work(document, version=version)
    return version


@app.task(base=IdempotentTask, unique={"key": "document", "throttle": 1, "on_duplicate": "replace"})
def newest_gathered(document: int, version: int = 0) -> Any:
    """Runs now, and at the end of each period with the newest arguments."""
    work(document, version=version)
    return version


@app.task(base=IdempotentTask, unique=True)
def elsewhere(document: int, flag: bool = False) -> Any:
    """Of equal arguments; in a queue of its own."""
    return work(document)


@app.task(base=IdempotentTask, bind=True, unique="document", max_retries=5)
def retried(self: Any, document: int, delay: float = 1.0, queue: str | None = None) -> Any:
    """Retries once."""
    Journal.from_env().write("tried", document, retries=self.request.retries)
    if not self.request.retries:
        Gates.from_env().wait(f"retry {document}")
        raise self.retry(countdown=delay, queue=queue)
    return work(document)


@app.task(base=IdempotentTask, bind=True, unique={"key": "document", "until": "done"}, max_retries=5)
def retried_until_done(self: Any, document: int, delay: float = 1.0, **options: Any) -> Any:
    """Retries once, and holds its reservation."""
    Journal.from_env().write("tried", document, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=delay, **options)
    return work(document)


@app.task(base=IdempotentTask, bind=True, unique={"key": "document", "until": "done"})
def ending(self: Any, document: int, how: str) -> Any:
    """End as it is told."""
    Journal.from_env().write("ends", document, how=how)
    match how:
        case "raise":
            raise ValueError(document)
        case "ignore":
            raise Ignore
        case "reject":
            raise Reject("no", requeue=False)
        case "replace":
            self.replace(other.si(document))
    return document


@app.task(base=IdempotentTask)
def other(document: int) -> Any:
    """Is not unique."""
    return work(document)


@app.task
def plain(document: int) -> Any:
    """A task of Celery's own."""
    return work(document)


def die(document: int, how: str) -> None:
    """Take the child along."""
    Journal.from_env().write("dies", document)
    if how == "exit":
        raise SystemExit(1)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(base=IdempotentTask, unique={"key": "document", "until": "done"}, reject_on_worker_lost=False)
def lost(document: int, how: str) -> None:
    """Its message does not come back."""
    die(document, how)


@app.task(
    base=IdempotentTask,
    unique={"key": "document", "until": "done"},
    acks_late=False,
    idempotency={"allow_early_ack": True},
)
def lost_early(document: int, how: str) -> None:
    """Likewise, since it was acknowledged."""
    die(document, how)


@app.task(
    base=IdempotentTask,
    unique={"key": "document", "until": "done"},
    retry_on_worker_lost=True,
    default_retry_delay=600,
)
def lost_and_retried(document: int, how: str) -> None:
    """Celery publishes its retry."""
    die(document, how)


@app.task(base=IdempotentTask, unique="name")
def chained(name: str, rounds: int) -> None:
    """Publish the next round of itself."""
    Journal.from_env().write("round", name, rounds=rounds)
    if rounds > 1:
        chained.delay(name, rounds - 1)


@app.task(base=IdempotentTask, unique={"key": "name", "until": "done"})
def chained_until_done(name: str, rounds: int) -> None:
    """Publish the next round of itself, while it holds its own reservation."""
    Journal.from_env().write("round", name, rounds=rounds)
    if rounds > 1:
        chained_until_done.delay(name, rounds - 1)


@app.task(base=IdempotentTask, unique="document", idempotency={"key": "document", "result_ttl": 0})
def one_running(document: int, version: int = 0) -> Any:
    """At most one runs, and one waits."""
    return work(document, version=version)


@app.task(base=IdempotentTask, bind=True)
def parent(self: Any, document: int) -> list[str]:
    """Publish twice, and return the ids of the children that it has."""
    index.delay(document)
    index.delay(document)
    return [child.id for child in self.request.children]


@app.task(base=IdempotentTask)
def scheduling(document: int) -> str:
    """Publish what is due in an hour, and return its id."""
    return str(index.apply_async((document,), countdown=3600).id)


@app.task(base=IdempotentTask, unique={"key": "name", "until": "done"})
def chained_apart(name: str, rounds: int, how: str) -> None:
    """Have the next round of itself published by a task that runs within it, or by a thread of its own."""
    Journal.from_env().write("round", name, rounds=rounds)
    if rounds > 1 and how == "apply":
        next_round.apply((name, rounds - 1, how))
    elif rounds > 1:
        thread = threading.Thread(target=chained_apart.delay, args=(name, rounds - 1, how))
        thread.start()
        thread.join()


@app.task
def next_round(name: str, rounds: int, how: str) -> None:
    """Publish a round of another task."""
    chained_apart.delay(name, rounds, how)


@app.task(base=IdempotentTask, unique="document", idempotency={"key": "document", "result_ttl": 0})
def slow(document: int) -> None:
    """Takes longer than the interval at which beat publishes it."""
    Journal.from_env().write("begin", document)
    time.sleep(1)


@app.task(base=IdempotentTask, unique=lambda document: document % 10)
def called(document: int) -> None:
    """Its key is computed."""


class Document(BaseModel):
    """An argument that its message has as a mapping."""

    number: int


@app.task(base=IdempotentTask, unique=True, pydantic=True)
def modelled(document: Document) -> None:
    """Its argument is a model."""


def move(self: Any, document: int, how: str, version: int) -> Any:
    """Go on with another document, or with another version of the same, ten minutes later."""
    Journal.from_env().write("moves", document, version=version)
    if version:
        return work(document, version=version)
    target = document if how == "same" else document + 1
    if how == "replace":
        raise self.replace(self.si(target, how, 1).set(countdown=600))
    raise self.retry(args=(target, how), kwargs={"version": 1}, countdown=600)


@app.task(base=IdempotentTask, bind=True, unique="document")
def moved(self: Any, document: int, how: str, version: int = 0) -> Any:
    """Until its body starts."""
    return move(self, document, how, version)


@app.task(base=IdempotentTask, bind=True, unique={"key": "document", "until": "done"})
def moved_until_done(self: Any, document: int, how: str, version: int = 0) -> Any:
    """Until its operation has ended."""
    return move(self, document, how, version)


class Checked(IdempotentTask):
    """May end the delivery before the task is called."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        document, how = args
        Journal.from_env().write("checks", document, how=how)
        if self.request.retries:
            return
        match how:
            case "raise":
                raise ValueError(document)
            case "ignore":
                raise Ignore
            case "reject":
                raise Reject("no", requeue=False)
            case "retry":
                raise self.retry(countdown=0)


@app.task(base=Checked, unique="document")
def checked(document: int, how: str) -> Any:
    """Until its body starts."""
    return work(document)


@app.task(base=Checked, unique={"key": "document", "until": "done"})
def checked_until_done(document: int, how: str) -> Any:
    """Until its operation has ended."""
    return work(document)


class Traced(Task):
    """Gives each message headers of its own, in place of those that it is handed, and only options that it knows."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        known = {name: options[name] for name in ("retries", "countdown", "eta") if name in options}
        return super().apply_async(args, kwargs, task_id, headers={"request_id": "r-1"}, **known)


class TracedBehind(IdempotentTask, Traced):
    """Has it after the library's class."""

    abstract = True


class TracedBefore(Traced, IdempotentTask):
    """Has it before the library's class."""

    abstract = True


def trace(self: Any, document: int) -> None:
    """Retry once."""
    Journal.from_env().write("tried", document, request=self.request.request_id, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=0.1)


UNTIL_DONE = {"key": "document", "until": "done"}
traced_behind = app.task(base=TracedBehind, bind=True, name="traced_behind", unique=UNTIL_DONE, ignore_result=True)(
    trace
)
traced_before = app.task(base=TracedBefore, bind=True, name="traced_before", unique=UNTIL_DONE, ignore_result=True)(
    trace
)
