"""Where copies and retries of a message go, on RabbitMQ with quorum queues and elsewhere; no broker is asked."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_idempotent.celery.message import destination, publisher

pytest.importorskip("celery.utils.quorum_queues", reason="Celery before 5.5 has no native delayed delivery")

DELAYED = "celery_delayed_delivery"
BITS = "0." * 27 + "1."


def app_with(queue_type: str, broker: str = "amqp://localhost") -> Celery:
    app = Celery("destinations", broker=broker, set_as_current=False)
    arguments = {"x-queue-type": queue_type}
    app.conf.task_queues = [
        Queue("orders", Exchange("orders", type="topic"), routing_key="orders", queue_arguments=arguments),
        Queue("mails", Exchange("mails", type="topic"), routing_key="mails.#", queue_arguments=arguments),
        Queue("plain", Exchange("plain", type="direct"), routing_key="plain", queue_arguments=arguments),
        Queue("all", Exchange("all", type="fanout"), routing_key="", queue_arguments=arguments),
    ]
    app.conf.task_default_queue = "orders"
    return app


@pytest.mark.parametrize(
    ("came_by", "kind"),
    [
        (("mails", "mails.de"), "topic"),
        ((DELAYED, f"{BITS}mails.de"), "topic"),
        (("celery_delayed_0", f"{BITS}mails.de"), "topic"),
        (("celery_delayed_26", f"{BITS}mails.de"), "topic"),
        (("plain", "plain"), "direct"),
        (("unknown", "plain"), "direct"),
    ],
)
def test_what_may_be_delayed_goes_back_by_the_exchange_and_the_key_it_came_by(
    came_by: tuple[str, str], kind: str
) -> None:
    exchange, key = came_by
    options = destination(app_with("quorum"), {"exchange": exchange, "routing_key": key})
    exchange = DELAYED if exchange.startswith("celery_delayed_") else exchange
    assert (options["exchange"], options["routing_key"]) == (exchange, key.removeprefix(BITS))
    # What Celery looks at; it publishes to what is no topic exchange directly, and lets the worker wait.
    queue = options["queue"]
    assert (queue.exchange.name, queue.exchange.type, queue.routing_key) == (exchange, kind, options["routing_key"])
    # Only kombu's own transports need to be told of a fanout exchange, and RabbitMQ knows it.
    assert [(exchange.name, exchange.type) for exchange in options["declare"]] == (
        [("all", "fanout")] if came_by[0] == "all" else []
    )


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_what_came_by_a_fanout_exchange_goes_back_by_it_and_declares_it_as_what_it_is(queue_type: str) -> None:
    options = destination(app_with(queue_type), {"exchange": "all", "routing_key": "any"})
    assert (options["exchange"], options["routing_key"]) == ("all", "any")
    assert [(exchange.name, exchange.type) for exchange in options["declare"]] == [("all", "fanout")]
    assert options["queue"].exchange.type == "direct"


@pytest.mark.parametrize(
    ("app", "came_by"),
    [
        (app_with("classic"), ("mails", "mails.de")),
        (app_with("quorum", "memory://"), ("unknown", "mails.de")),
        (app_with("quorum"), ("", "mails")),
        (app_with("quorum"), (None, None)),
    ],
    ids=["classic queues", "another broker", "by the name of the queue", "from nowhere"],
)
def test_elsewhere_celery_is_right(app: Celery, came_by: tuple[str, str]) -> None:
    exchange, key = came_by
    assert destination(app, {"exchange": exchange, "routing_key": key}) == {}


@pytest.mark.parametrize(
    ("came_by", "kind", "declared"),
    [
        ("mails", "", ["mails"]),
        ("plain", "", ["plain"]),
        ("added", "topic", ["added"]),
        ("added", "fanout", ["added"]),
        ("added", "", None),
    ],
)
def test_kombus_own_transports_are_told_of_the_exchange(came_by: str, kind: str, declared: list[str] | None) -> None:
    """Else they take it for a direct one, and drop what is bound by a pattern."""
    found = destination(app_with("classic", "redis://"), {"exchange": came_by, "routing_key": "mails.de"}, kind)
    assert (declared is None) == (found == {})
    assert [entity.name for entity in found.get("declare", [])] == (declared or [])


def test_other_brokers_are_not_asked_to_confirm() -> None:
    with publisher(app_with("classic", "memory://")) as options:
        assert options == {}
