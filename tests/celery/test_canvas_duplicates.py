"""Messages of a canvas that are delivered twice: what follows them is set off once, and nobody hangs."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from tests.celery.test_canvas_as_celery import is_idle
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.servers import open_client
from tests.support.waiting import wait_until

CANVAS = "tests.support.celery.canvas_app"
TAG = "canvas"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CANVAS)


class Held:
    """The queue that no worker consumes; what lies in it is delivered by the test, as often as it likes."""

    def __init__(self, broker_url: str) -> None:
        self.broker_url = broker_url

    def take(self) -> dict[str, Any]:
        """Wait for a message, and take it out."""
        with open_client(self.broker_url) as client:
            raw: bytes = wait_until(lambda: client.rpop("held"), 20, "a message in the queue that is held")
        message: dict[str, Any] = json.loads(raw)
        return message

    def deliver(self, message: dict[str, Any]) -> None:
        """Publish the message, as a producer does that tries again."""
        message["properties"]["delivery_info"]["routing_key"] = "celery"
        message["properties"]["delivery_tag"] = str(uuid.uuid4())
        with open_client(self.broker_url) as client:
            client.lpush("celery", json.dumps(message))


def signatures(module: ModuleType) -> Callable[..., Any]:
    return lambda task, *args, **options: getattr(module, task).s(*args, tag=TAG).set(**options)


def runs(journal: Journal) -> Counter[str]:
    return Counter(entry.fields["task"] for entry in journal.entries("ran"))


CANVASES: dict[str, tuple[Callable[[Any], Any], dict[str, int], object]] = {
    "a step of a chain": (
        lambda t: chain(t("add", 1, 1), t("echo", queue="held"), t("tally"), t("total")),
        {"add": 1, "echo": 1, "tally": 1, "total": 1},
        2,
    ),
    "a member of a chord": (
        lambda t: chain(chord([t("echo", 1, queue="held"), t("add", 1, 1)], t("tally")), t("echo", 5)),
        {"add": 1, "echo": 2, "tally": 1},
        [[2, [1]], 5],
    ),
    "the body of a chord": (
        lambda t: chain(chord([t("add", 1, 1), t("add", 2, 2)], t("echo", queue="held")), t("tally")),
        {"add": 2, "echo": 1, "tally": 1},
        [[2, 4]],
    ),
    "the body of a chord in a chord": (
        lambda t: chord([chord([t("add", 1, 1)], t("echo", queue="held")), t("add", 2, 2)], t("tally")),
        {"add": 2, "echo": 1, "tally": 1},
        [4, [[2]]],
    ),
    "a member of a group that a chain goes on from": (
        lambda t: chain(t("add", 1, 1), group(t("echo", queue="held"), t("add", 1)), t("tally"), t("echo", 9)),
        {"add": 2, "echo": 2, "tally": 1},
        [[3, [2]], 9],
    ),
}


@pytest.mark.parametrize("which", CANVASES)
def test_a_message_delivered_while_it_runs_and_after_runs_once_and_so_does_what_follows(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str, which: str
) -> None:
    build, expected, value = CANVASES[which]
    node, held, gate = start_worker(CANVAS), Held(broker_url), gates.close(f"echo of {TAG}")
    result = build(signatures(app.module)).apply_async()
    message = held.take()
    held.deliver(message)
    gate.reached()
    held.deliver(message)
    node.wait_for_log("copy=1")
    gate.open()
    assert result.get(timeout=30) == value
    held.deliver(message)
    wait_until(lambda: journal.count("replayed", "echo") >= 2, 30, lambda: f"two replays\n{journal}")
    journal.wait_for_count(sum(expected.values()), "ran", timeout=30)
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == expected


def test_a_callback_delivered_twice_sets_off_its_own_once(
    app: Celery, start_worker: StartWorker, journal: Journal, broker_url: str
) -> None:
    start_worker(CANVAS)
    t, held = signatures(app.module), Held(broker_url)
    t("add", 1, 1).apply_async(link=[t("echo", queue="held", link=[t("tally"), group(t("total"), t("echo", 7))])])
    message = held.take()
    held.deliver(message)
    journal.wait_for_count(5, "ran")
    held.deliver(message)
    wait_until(lambda: journal.count("replayed", "echo") >= 1, 30, lambda: f"a replay\n{journal}")
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"add": 1, "echo": 2, "tally": 1, "total": 1}
