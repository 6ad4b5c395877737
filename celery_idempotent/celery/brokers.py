"""What brokers other than Redis ask of a message that is published again: the way back to its queue, and certainty."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kombu import entity

__all__ = ["delays_natively", "destination", "kept_properties", "place_of", "publisher"]

#: Longest time in seconds that RabbitMQ may take to answer, or to confirm a copy.
ANSWER_TIMEOUT = 30.0
#: Where Celery's native delayed delivery hands messages out, under routing keys that begin with 28 bits of delay.
DELAYED = "celery_delayed_delivery"
#: Between the queues of a worker that has several of one fanout exchange, so that it cannot tell which it was.
SEVERAL = ","
DELAY_BITS = re.compile(r"^(?:[01]\.){28}")


def delays_natively(app: Any) -> bool:
    """Tell whether Celery lets the broker delay messages, which it does where an app has quorum queues."""
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:  # pragma: no cover - Celery < 5.5 has no native delayed delivery; `tox -e oldest` comes here
        return False
    return bool(detect_quorum_queues(app, app.connection_for_write().transport.driver_type)[0])


def destination(app: Any, delivery_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that send a message back to where it came from, beside its exchange and routing key.

    With its native delayed delivery, Celery delays it on its way to the default queue without them. What came by a
    fanout exchange, as of a broadcast queue, would be lost on Redis.
    """
    exchange, key = ((delivery_info or {}).get(name) for name in ("exchange", "routing_key"))
    make: Any = entity  # whose constructors have no types
    if found := _fanout(app.amqp.queues, exchange):
        # Declared anew, or kombu's transports for Redis and the like take it for an exchange of one queue.
        queue = make.Queue(exchange, make.Exchange(exchange, type="direct"), routing_key=key)
        return {"queue": queue, "exchange": exchange, "routing_key": key or "", "declare": [found[0].exchange]}
    if not exchange or not key or not delays_natively(app):
        return {}
    key = DELAY_BITS.sub("", key)
    kinds = {queue.exchange.name: queue.exchange.type for queue in app.amqp.queues.values()}
    kinds[DELAYED] = "topic"
    # What is not a topic exchange cannot be reached by way of the delaying ones; a worker holds such a message instead.
    kind = "topic" if kinds.get(exchange) == "topic" else "direct"
    queue = make.Queue(key, make.Exchange(exchange, type=kind), routing_key=key)
    return {"queue": queue, "exchange": exchange, "routing_key": key, "declare": []}  # it names a way; it is no queue


def place_of(app: Any, delivery_info: Mapping[str, Any] | None, hostname: str) -> str:
    """Return which of the consumers of a fanout exchange this worker is; "" for a message that one worker gets.

    That is the queue, which a `kombu.common.Broadcast` makes for each worker. A Redis broker keeps no such queues: each
    worker listens.
    """
    found = _fanout(app.amqp.queues.consume_from, (delivery_info or {}).get("exchange"))
    if not found:
        return ""
    if app.connection_for_read().transport.driver_type == "redis":
        return hostname
    return SEVERAL.join(sorted(queue.name for queue in found))


def _fanout(queues: Mapping[str, Any], exchange: str | None) -> list[Any]:
    """Return the queues that get all that is published to an exchange."""
    if not exchange:
        return []
    of_it = [queue for queue in queues.values() if queue.exchange is not None and queue.exchange.name == exchange]
    return [queue for queue in of_it if queue.exchange.type == "fanout"]


def kept_properties(request: Any) -> dict[str, Any]:
    """Return the properties of a message that its copy must have too.

    A copy of an SQS message stays in its group. It has no MessageDeduplicationId, or SQS would take it for the message
    it is to replace, and drop it.
    """
    group = (request.properties or {}).get("MessageGroupId")
    return {} if group is None else {"MessageGroupId": group}


@contextmanager
def publisher(app: Any) -> Iterator[dict[str, Any]]:
    """Yield the options of a publish that returns only once the broker has the message.

    What RabbitMQ has not confirmed may still sit in a socket, or was refused by a full queue: a message whose copy is
    lost like that must not be acked.

    Raises:
        OSError: the connection broke; whether the broker has the message is not known.
        amqp.exceptions.MessageNacked: the broker refused the message.
    """
    if app.connection_for_write().transport.driver_name != "py-amqp":
        yield {}
        return
    with app.producer_or_acquire() as pooled:
        connection = pooled.connection
        channel = _channel(connection)
        channel.basic_publish = channel.basic_publish_confirm
        with _within(connection.connection):
            # Celery's own second try would go through a channel that confirms nothing.
            yield {"producer": app.amqp.Producer(channel, auto_declare=False), "retry": False}
            channel.close()


def _channel(connection: Any) -> Any:
    """Return a channel of our own: in one that confirms, whoever does not wait for the answers piles them up."""
    try:
        with _within(connection.connection):
            return connection.channel()
    except connection.connection_errors:  # it was lost while nobody used it
        with _within(connection.connection):
            return connection.channel()


@contextmanager
def _within(connection: Any) -> Iterator[None]:
    """Limit how long each answer may take, and give the connection up if one does not come."""
    try:
        with connection.transport.having_timeout(ANSWER_TIMEOUT):
            yield
    except BaseException:
        connection.collect()  # what comes later would be taken for the answer to something else
        raise
