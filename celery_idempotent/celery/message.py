"""Messages: the headers of a delivery, publishing a deferred copy, and the differences between brokers.

Unknown keys of a Celery request become attributes of the request and entries of its ``headers``, and those are copied
into every retry. The library's own are therefore taken out before the body runs, and put back on purpose where a
message continues this operation.
"""

from __future__ import annotations

import math
import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypedDict

from celery.app.task import Context, Task
from celery.exceptions import Ignore, Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import entity
from kombu.serialization import registry

from ..core.lease import HeldLease
from ..core.policy import Unique, UniqueOptions
from ..core.reservations import Token
from ..core.serialization import serialization
from ..errors import MissingKey
from ..stores.records import RETRIES_LIMIT, new_owner

if TYPE_CHECKING:
    from kombu.connection import Connection
    from kombu.entity import Exchange, Queue
    from kombu.messaging import Producer

#: Header with the key that the producer gave; part of the public interface.
KEY_HEADER = "idempotency_key"
#: In that header, what holds a key that is neither text nor a small number.
JSON_KEY = "json"
#: Header with what this library writes about a message for itself: the fields of `MessageHeaders` but for the key.
META_HEADER = "idempotency"
#: The fields of that header.
META_FIELDS = {
    *("copy", "token", "from", "sending", "fingerprint", "fingerprint_of", "nesting", "operation", "within", "part"),
    *("place", "unique", "expires", "eta", "retried"),
}
#: The largest number in it that every store can keep.
MOST = RETRIES_LIMIT - 1
#: Where a message has the token of its reservation, within that header.
RESERVATION = "unique"
#: Entry of the request, set by the worker's main process for one delivery and never published.
DELIVERY_ENTRY = "idempotency_delivery"
#: Attribute of the request under which the read identity is kept.
STATE_ATTRIBUTE = "_idempotency"
#: How the names of tasks begin that are never guarded, whatever an app's task class: Celery's own, and the library's.
UNGUARDED = ("celery.", "celery_idempotent.")


class MessageOptions(TypedDict, total=False):
    """Name the options of ``apply_async`` beside its parameters, for type checkers: the library's two, and Celery's."""

    idempotency_key: str | None
    """The key of this message, before the one that the task's options give (default: None)."""
    unique: bool | Unique | UniqueOptions | None
    """False publishes whatever waits; options of `Unique` are laid on top of the task's (default: the task's)."""
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    queue: str | Queue | None
    exchange: str | Exchange | None
    exchange_type: str | None
    routing_key: str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    delivery_mode: int | str | None
    mandatory: bool
    immediate: bool
    expiration: float | None
    timeout: float | None
    confirm_timeout: float | None
    declare: Sequence[Any] | None
    headers: Mapping[str, Any] | None
    time_limit: float | None
    soft_time_limit: float | None
    ignore_result: bool | None
    add_to_parent: bool
    argsrepr: str | None
    kwargsrepr: str | None
    connection: Connection | None
    publisher: Producer | None
    router: Any
    result_cls: Any
    reply_to: str | None
    correlation_id: str | None
    group_id: str | None
    group_index: int | None
    root_id: str | None
    parent_id: str | None
    retries: int
    chain: Any
    chord: Any
    route_name: str | None
    task_type: Any
    replaced_task_nesting: int
    stamped_headers: Sequence[str] | None


def given_key(options: Mapping[str, Any]) -> object:
    """Return the key that a producer gives in the options of a message, or in their headers; None for none."""
    given = options.get(KEY_HEADER)
    return (options.get("headers") or {}).get(KEY_HEADER) if given is None else given


def write_key(key: object) -> object:
    """Return a producer's key as any broker carries it: AMQP's tables have no UUIDs, and times in whole seconds."""
    if key is None or isinstance(key, (str, dict)) or (type(key) is int and key.bit_length() < 64):
        return key
    try:
        return {JSON_KEY: serialization.to_json(key)}
    except TypeError:
        return key  # publishing it fails, as it does with any header that cannot be encoded


def read_key(written: object) -> object:
    """Return the key that `write_key` wrote, or the one of a producer that has not imported this library.

    Raises:
        MissingKey: it cannot be read here.
    """
    if not isinstance(written, dict) or written.keys() != {JSON_KEY}:
        return written
    try:
        return serialization.from_json(str(written[JSON_KEY]))
    except Exception as error:
        raise MissingKey(
            f"Expected an {KEY_HEADER} that this process can read, got {str(written[JSON_KEY])[:200]!r} ({error!r}). "
            "Register its type with kombu's JSON here too, as its producer does, or send text."
        ) from error


def own_header(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what this library wrote into the headers of a message; {} where it wrote nothing."""
    found = (headers or {}).get(META_HEADER)
    return found if isinstance(found, dict) else {}


class Publishing:
    """Publishes a task's messages with this library's headers, whatever its base classes do with theirs.

    A base may give each message headers of its own, in place of those that it is handed, or hand on only the options
    that it knows.

    Arguments:
        name: Of the task.
        send: Publishes, with the options that it is given.
    """

    #: whether the last message went out as it was meant to: with these headers, and under its id
    whole = True

    def __init__(self, name: str, send: Callable[..., Any]) -> None:
        self.name, self.send = name, send
        self.task_id: str | None = None
        self.own: dict[str, Any] = {}

    def __call__(self, **options: Any) -> Any:
        """Publish a message."""
        headers, key = options.get("headers") or {}, given_key(options)
        self.own = {META_HEADER: headers[META_HEADER]} if META_HEADER in headers else {}
        if key is not None:
            self.own[KEY_HEADER] = key
        if not self.own:
            return self.send(**options)
        self.task_id, self.whole = options.get("task_id"), False
        before = _publishing.set(self)
        try:
            return self.send(**options)
        finally:
            _publishing.reset(before)


#: What publishes a message here, whose headers are to go with it.
_publishing: ContextVar[Publishing | None] = ContextVar("publishing", default=None)


def restore_headers(name: object, headers: dict[str, Any]) -> None:
    """Give the message that is about to go out those of its headers that got lost on the way."""
    own = _publishing.get()
    if own is not None and name == own.name and own.task_id in (None, headers.get("id")):
        for header, value in own.own.items():
            headers.setdefault(header, value)
        own.whole = True


def new_token() -> str:
    """Return a random id for one copy of a message."""
    return secrets.token_urlsafe(9)


@dataclass(slots=True)
class MessageHeaders:
    """The headers that identify a delivery.

    Arguments:
        owner: Random id of this delivery.
        key: The key that the producer gave, or None.
        copy, token: Which copy of the message this is; 0 and empty as its producer sent it.
        sender: Owner of the delivery that published this message under its lease.
        sending: Random id of one sending of the message, the same in its redeliveries, copies and retries; empty where
            it has no errbacks, or was published by its task's name alone.
        fingerprint: The digest of the arguments of the first attempt. A retry may have other ones, and duplicates are
            compared with the first.
        fingerprint_of: The store key to which that digest belongs.
        retried: Store key of the operation of which the message is a retry with other arguments, which may name another
            one; empty where its arguments are those of before.
        nesting: How often the message's task had been replaced when it was published to continue; Celery sends that
            too, but not to the body of a chord.
        operation: Store key of the operation that the message was published to continue, or empty.
        within: Store keys of the operations that were replaced by signatures of which the message is a part.
        part: Which part it is, where Celery gives every part the same task id: in a call of ``apply()``.
        place: Which of the workers that all get the message this is, see `place_of`; empty where one gets it.
        meant_for: Of which of them it continues the delivery, or empty.
        reservation: The token of the reservation that the message holds while it waits, or None.
        content_type, compression: How the message was encoded, so that a copy can be encoded alike.
        limit: The hard time limit that the worker's main process applies, 0 for none; None where there is no worker.
        exchange_type: Of the exchange it came by, as the worker's main process knows it; empty where it does not.
    """

    owner: str
    key: object = None
    copy: int = 0
    token: str = ""
    sender: str = ""
    sending: str = ""
    fingerprint: str = ""
    fingerprint_of: str = ""
    retried: str = ""
    nesting: int = 0
    operation: str = ""
    within: tuple[str, ...] = ()
    part: str = ""
    place: str = ""
    meant_for: str = ""
    reservation: Token | None = None
    content_type: str | None = None
    compression: str | None = None
    limit: float | None = None
    exchange_type: str = ""

    @classmethod
    def take(cls, request: Any) -> MessageHeaders:
        """Read the identity from a request and remove every trace of it there."""
        headers = dict(request.headers or {})
        own: dict[str, Any] = {}
        for name in (KEY_HEADER, META_HEADER, DELIVERY_ENTRY):
            own[name] = headers.pop(name, None)
            if name in request.__dict__:  # where the worker's main process writes, as no producer can
                own[name] = request.__dict__.pop(name)
        request.headers = headers or None
        delivery = own[DELIVERY_ENTRY] if isinstance(own[DELIVERY_ENTRY], dict) else {}
        identity = cls(
            owner=delivery.get("owner") or new_owner(),
            key=own[KEY_HEADER] and read_key(own[KEY_HEADER]),
            place=delivery.get("place") or "",
            content_type=delivery.get("content_type"),
            compression=delivery.get("compression"),
            limit=delivery.get("limit"),
            exchange_type=delivery.get("exchange_type") or "",
        )
        message = own[META_HEADER]
        if message and isinstance(message, dict):  # a message of a producer alone has none
            identity._read(message)
            # A copy carries them out of Celery's sight; to the body they are the same, the expiry to a retry too.
            if _is_date(message.get("expires")):
                request.expires = message["expires"]
            if identity.copy:
                request.eta = message.get("eta")
        return identity

    def _read(self, message: dict[str, Any]) -> None:
        self.copy, self.nesting = (
            min(max(message[name], 0), MOST) if type(message.get(name)) is int else 0 for name in ("copy", "nesting")
        )
        for name in ("token", "sending", "fingerprint", "fingerprint_of", "retried", "operation", "part"):
            setattr(self, name, _word(message.get(name)))
        self.sender = _word(message.get("from"))
        within = message.get("within")
        self.within = tuple(map(_word, within)) if isinstance(within, (list, tuple)) else ()
        self.meant_for = _word(message.get("place"))
        self.place = self.place or self.meant_for
        self.reservation = Token.read(message.get(RESERVATION))

    @property
    def is_anothers(self) -> bool:
        """Whether another worker's delivery goes on with this message, which all of them get."""
        return self.meant_for not in ("", self.place) and SEVERAL not in self.place

    def headers(self, **message: Any) -> dict[str, Any]:
        """Return the headers of a message that continues this operation."""
        kept = {
            "sending": self.sending,
            "fingerprint": self.fingerprint,
            "fingerprint_of": self.fingerprint_of,
            "retried": self.retried,
            "nesting": self.nesting,
            "operation": self.operation,
            "part": self.part,
            "place": "" if SEVERAL in self.place else self.place,
            RESERVATION: self.reservation and self.reservation.header(),
        }
        message = {**{name: value or None for name, value in kept.items()}, **self.parts(), **message}
        headers: dict[str, Any] = {META_HEADER: {name: value for name, value in message.items() if value is not None}}
        if self.key is not None:
            headers[KEY_HEADER] = write_key(self.key)  # what traces copies headers deeper, as they are here
        return headers

    def parts(self, *keys: str) -> dict[str, list[str]]:
        """Return the header with the operations that a message is a part of: those of this one, and ``keys``."""
        within = list(dict.fromkeys([*self.within, *keys]))
        return {"within": within} if within else {}


def headers_beside(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's header ``headers`` with its producer's headers that stand beside it.

    What traces, as ddtrace, puts its own in there; and Celery then takes none of the others for the request's.
    """
    return {**(Context({**message, "headers": None}).headers or {}), **message["headers"]}


def _word(written: object) -> str:
    """Return a text of that header; "" for one that not every store can keep, which this library has not written."""
    text = str(written or "")
    return text if text.isprintable() else ""


def _is_date(written: object) -> bool:
    """Return whether that header has a date here; no other expiry was written by this library."""
    try:
        return isinstance(written, str) and bool(maybe_iso8601(written))
    except ValueError:
        return False


class DeliveryState:
    """The one mutable thing about a delivery, kept on its request.

    Arguments:
        identity: Its headers.
    """

    #: what the body holds while it runs
    holding: HeldLease | None = None
    #: gives the lease up for the retry that it is called with, while the body runs
    give_up: Callable[[Retry], None] | None = None
    #: whether a delivery answers the request: its state alone may be read before, as by ``before_start``
    delivered = False
    #: what the body raised when it published its retry, or what replaces it
    left_by: Retry | Ignore | None = None
    #: the headers of the retry that it publishes
    retry_headers: Mapping[str, Any] | None = None
    #: whether the body was run
    begun = False
    #: whether the body has begun, so that further calls are plain calls
    entered = False
    #: whether Celery has callbacks or a chain to dispatch, set before it does: Celery before 5.5 takes them away
    fans_out = False
    #: whether the message came with callbacks or the rest of a chain
    continues = False
    #: whether it failed for good, and Celery has errbacks to dispatch
    fans_out_failed = False
    #: the store key, once known
    key = ""
    #: the store key that its own arguments name; the operation has another one where it is a part of that one
    named = ""
    #: what the continuation raised that ran in the body's place, in a call of ``apply()``
    failed: Exception | None = None
    #: whether the body was replaced
    replaced = False
    #: whether what replaces it ends in its own task, as which the operation goes on
    continued = False
    #: whether another copy of the message will be answered
    stood_aside = False
    #: what the message holds until its body starts, or its operation has ended
    reservation: Any = None

    def __init__(self, identity: MessageHeaders) -> None:
        self.identity = identity
        #: how often its task has been replaced, as Celery counts or we do
        self.nesting = identity.nesting

    @classmethod
    def is_known(cls, request: Any) -> bool:
        """Return whether the request is one of a delivery: read before, or made by the worker's main process."""
        return STATE_ATTRIBUTE in request.__dict__ or DELIVERY_ENTRY in request.__dict__

    @classmethod
    def of(cls, request: Any) -> DeliveryState:
        """Return the state of a request, reading its identity the first time."""
        state: DeliveryState | None = request.__dict__.get(STATE_ATTRIBUTE)
        if state is None:
            state = cls(MessageHeaders.take(request))
            state.nesting = max(state.nesting, request.get("replaced_task_nesting") or 0)
            setattr(request, STATE_ATTRIBUTE, state)
        return state


# Defer: publish the same message again with a delay, so that this delivery of it can be acked.
#
# A copy keeps everything its consumers can see of a message (id, canvas, properties, limits, stamps, encoding, the
# shortened argument texts that may hide secrets). It is counted and carries a random token, so that the store can
# distinguish it from other copies of the same message, which would otherwise multiply.


FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
DEFAULT_VISIBILITY = {"redis": 3600.0, "sqs": 1800.0}


def copy_delay(app: Any, copy: int, remaining: float) -> float:
    """Return how long the next copy of a message waits, in seconds.

    Arguments:
        app: The Celery app; its broker bounds what an ETA may be.
        copy: How often the message has been deferred.
        remaining: Seconds until the lease in its way runs out, unless it is renewed; 0 where none does, as while an
            open transaction settles the operation for longer than its lease.
    """
    delay: float = FIRST_DELAY * 2 ** min(copy, 10) * random.uniform(0.75, 1.25)
    delay = min(delay, max(remaining, 0.1) if remaining else LONGEST_DELAY, LONGEST_DELAY)
    # An ETA sits unacked in a worker: longer than the visibility timeout, and the broker hands out another copy.
    transport = app.connection_for_write().get_transport_cls().driver_type
    visibility = (app.conf.broker_transport_options or {}).get("visibility_timeout") or DEFAULT_VISIBILITY.get(
        transport
    )
    if visibility:
        delay = min(delay, 0.45 * float(visibility))
    if delays_natively(app):
        delay = max(1, math.ceil(delay))
    return delay


def publish_copy(task: Any, request: Any, identity: MessageHeaders, delay: float) -> int:
    """Publish the next copy of the message that ``request`` came from, and return its number.

    It carries its expiry in a header of its own: a broker that drops what expired in a queue would silently drop the
    operation with it, if its holder died meanwhile. The ETA of the message is there too, since the copy has another.

    Arguments:
        task: The task.
        request: The request of this delivery.
        identity: The headers of this delivery.
        delay: Seconds until the copy may be tried.

    Raises:
        kombu.exceptions.OperationalError: the broker cannot be reached.
        kombu.exceptions.EncodeError: the arguments cannot be encoded.
    """
    signature = Task.signature_from_request(task, request, ignore_result=ignores_result(task, request))
    options = {**kept_properties(request), **signature.options}
    expires = _text(options.pop("expires", None))
    headers = without_deaths(options.pop("headers", None))
    copy = identity.copy + 1
    headers.update(
        identity.headers(
            copy=copy,
            token=new_token(),
            expires=expires,
            eta=_text(request.eta),
            **({"from": identity.sender} if identity.sender else {}),
        )
    )
    options.update(
        countdown=delay,
        headers=headers,
        add_to_parent=False,
        shadow=request.shadow,
        argsrepr=request.get("argsrepr"),
        kwargsrepr=request.get("kwargsrepr"),
        serializer=registry.type_to_name.get(identity.content_type) or options.get("serializer"),
        compression=identity.compression or options.get("compression"),
    )
    for name in ("redelivered", "is_eager"):  # parts of how it came, not of where it goes
        options.pop(name, None)
    app = task._get_app()
    options.update(destination(app, request.delivery_info, identity.exchange_type))
    deaths = _deaths(request.headers)
    if deaths and (not delays_natively(app) or _is_held(options.get("queue"))):
        headers.update(deaths)
    with publisher(app) as certain:
        options.update(certain)
        app.send_task(
            task.name,
            signature.args,
            signature.kwargs,
            task_type=task,
            **{n: v for n, v in options.items() if v is not None},
        )
    return copy


#: How the names of the headers begin in which RabbitMQ notes when it dead-lettered a message.
DEATHS = ("x-death", "x-first-death-", "x-last-death-")


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return headers for a message that goes on without those in which RabbitMQ notes what it dead-lettered.

    Celery's native delayed delivery has a message dead-lettered from queue to queue, and RabbitMQ before 4 drops one
    in whose headers it finds that queue already. Celery before 5.6.3 publishes them again.
    """
    return {name: value for name, value in (headers or {}).items() if not name.startswith(DEATHS)}


def _deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return those headers, which a body may read to give up after so many rejections."""
    return {name: value for name, value in (headers or {}).items() if name.startswith(DEATHS)}


def _is_held(queue: Any) -> bool:
    """Return whether a worker holds the copies for this queue for certain, since Celery cannot delay them elsewhere."""
    return isinstance(queue, entity.Queue) and queue.exchange.type == "direct"


def is_expired(app: Any, expires: str | datetime) -> bool:
    """Return whether the expiry of a message has passed, as the worker's main process would."""
    when: datetime = maybe_make_aware(maybe_iso8601(expires), app.conf.timezone)
    return datetime.now(timezone.utc) > when


def _text(when: Any) -> str | None:
    return when.isoformat() if isinstance(when, datetime) else when


#: Longest time in seconds that RabbitMQ may take to answer, or to confirm a copy.
ANSWER_TIMEOUT = 30.0
#: Where Celery's native delayed delivery hands messages out, under routing keys that begin with 28 bits of delay.
DELAYED = "celery_delayed_delivery"
#: What such a message has for its exchange: that, or a level of the delay, as where that is of even seconds.
DELAYING = re.compile(r"^(?P<prefix>.+_)?celery_delayed_(?:delivery|[0-9]+)$")
#: Between the queues of a worker that has several of one fanout exchange, where it is not known which one it was.
SEVERAL = ","
DELAY_BITS = re.compile(r"^(?:[01]\.){28}")


def delays_natively(app: Any) -> bool:
    """Return whether Celery lets the broker delay messages, which it does where an app has quorum queues."""
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:  # pragma: no cover - Celery < 5.5 has no native delayed delivery; `tox -e oldest` comes here
        return False
    # Of the class: an instance for Redis opens an epoll, which the garbage collector closes.
    return bool(detect_quorum_queues(app, app.connection_for_write().get_transport_cls().driver_type)[0])


def destination(app: Any, delivery_info: Mapping[str, Any] | None, exchange_type: str = "") -> dict[str, Any]:
    """Return the options that send a message back to where it came from, beside its exchange and routing key.

    With its native delayed delivery, Celery delays it on its way to the default queue without them. kombu's transports
    for Redis and the like take an exchange that this process has not declared for a direct one, and silently drop what
    no queue is bound for by that very key.

    Arguments:
        app: The Celery app.
        delivery_info: How the message came.
        exchange_type: Of its exchange, which this process may not know: ``add_consumer`` is of the main process alone.
    """
    exchange, key = ((delivery_info or {}).get(name) for name in ("exchange", "routing_key"))
    make: Any = entity  # whose constructors have no types
    from kombu.transport.virtual import Transport as VirtualTransport

    fanout = _fanout(app.amqp.queues, exchange)
    declared: list[Any] = [fanout[0].exchange] if fanout else []
    if exchange and not fanout and issubclass(app.connection_for_write().get_transport_cls(), VirtualTransport):
        unknown = [make.Exchange(exchange, type=exchange_type)] if exchange_type else []
        declared = queues_of(app.amqp.queues, exchange) or unknown
    if fanout or (exchange and exchange_type == "fanout"):
        queue = make.Queue(exchange, make.Exchange(exchange, type="direct"), routing_key=key)
        return {"queue": queue, "exchange": exchange, "routing_key": key or "", "declare": declared}
    if not exchange or not key or not delays_natively(app):
        return {"declare": declared} if declared else {}
    delaying, exchange, key = DELAYING.match(exchange), *without_delay(exchange, key)
    kinds = {queue.exchange.name: queue.exchange.type for queue in app.amqp.queues.values()}
    if delaying:
        kinds[exchange] = "topic"
    # What is not a topic exchange cannot be reached by way of the delaying ones; a worker holds such a message instead.
    kind = "topic" if kinds.get(exchange) == "topic" else "direct"
    queue = make.Queue(key, make.Exchange(exchange, type=kind), routing_key=key)
    return {"queue": queue, "exchange": exchange, "routing_key": key, "declare": []}  # it names a way; it is no queue


def without_delay(exchange: str, key: str) -> tuple[str, str]:
    """Return the exchange and the routing key by which a message comes that is not delayed on its way."""
    if delaying := DELAYING.match(exchange):
        exchange = f"{delaying['prefix'] or ''}{DELAYED}"  # a level hands out no key without its bits
    return exchange, DELAY_BITS.sub("", key)


def came_from(app: Any, delivery_info: Mapping[str, Any] | None, name: str) -> bool:
    """Return whether a message came from the queue of this name, as far as its exchange and routing key show that."""
    exchange, key = ((delivery_info or {}).get(each) or "" for each in ("exchange", "routing_key"))
    key = DELAY_BITS.sub("", key)
    queue = app.amqp.queues.get(name)
    if not exchange or queue is None:
        return not exchange and key == name
    ways = [(queue.exchange, queue.routing_key), *((bound.exchange, bound.routing_key) for bound in queue.bindings)]
    return any(by is not None and _leads(by, pattern or "", exchange, key) for by, pattern in ways)


def _leads(by: Any, pattern: str, exchange: str, key: str) -> bool:
    """Return whether a queue that is bound to an exchange by a pattern gets what comes by an exchange and a key."""
    if not (exchange == by.name or (DELAYING.match(exchange) and by.type != "fanout")):
        return False
    if by.type == "topic":
        from kombu.transport.virtual.exchange import TopicExchange

        return re.match(TopicExchange(None).key_to_pattern(pattern), key) is not None
    return by.type == "fanout" or pattern == key


def place_of(app: Any, exchange: str, hostname: str) -> str:
    """Return which of the consumers of a fanout exchange this worker is; "" for a message that one worker gets.

    That is the queue, which a `kombu.common.Broadcast` makes for each worker. A Redis broker keeps no such queues: each
    worker listens.
    """
    found = _fanout(app.amqp.queues.consume_from, exchange)
    if not found:
        return ""
    if app.connection_for_read().get_transport_cls().driver_type == "redis":
        return hostname
    return SEVERAL.join(sorted(queue.name for queue in found))


def type_of(app: Any, exchange: str) -> str:
    """Return of which type an exchange is; "" for one that this process does not know."""
    known = (by for queue in queues_of(app.amqp.queues, exchange) for by in _exchanges(queue))
    return next((str(by.type) for by in known if by.name == exchange), "")


def queues_of(queues: Mapping[str, Any], exchange: str | None) -> list[Any]:
    """Return the queues that are bound to an exchange, as far as this process knows them."""
    if not exchange:
        return []
    return [queue for queue in queues.values() if any(by.name == exchange for by in _exchanges(queue))]


def _exchanges(queue: Any) -> list[Any]:
    every = (queue.exchange, *(bound.exchange for bound in queue.bindings))
    return [exchange for exchange in every if exchange is not None]


def _fanout(queues: Mapping[str, Any], exchange: str | None) -> list[Any]:
    """Return the queues that get all that is published to an exchange."""
    of_it = [queue for queue in queues_of(queues, exchange) if queue.exchange and queue.exchange.name == exchange]
    return [queue for queue in of_it if queue.exchange.type == "fanout"]


#: Properties that publishing sets itself, or that belong to one delivery alone. RabbitMQ refuses a message of another
#: user than the worker's, SQS drops a copy that has the deduplication id of the message that it replaces, and a delay
#: or an expiry of the broker's is not that of the copy.
OWN_PROPERTIES = {
    *("application_headers", "content_type", "content_encoding", "body_encoding", "delivery_info", "delivery_tag"),
    *("user_id", "MessageDeduplicationId", "DelaySeconds", "delay_seconds"),
    *(MessageOptions.__annotations__.keys() - {"correlation_id", "delivery_mode"}),
}


def kept_properties(request: Any) -> dict[str, Any]:
    """Return the properties of a message that its copy must have too: those of its publisher."""
    properties = request.properties or {}
    return {name: value for name, value in properties.items() if name not in OWN_PROPERTIES}


@contextmanager
def publisher(app: Any) -> Iterator[dict[str, Any]]:
    """Yield the options of a publish that returns only once the broker has the message.

    What RabbitMQ has not confirmed may still sit in a socket, or was refused by a full queue; and it confirms, and
    drops, what no queue is bound for, unless that is published as mandatory. A message whose copy is lost like that
    must not be acked.

    Raises:
        OSError: the connection broke; whether the broker has the message is not known.
        amqp.exceptions.MessageNacked: the broker refused the message.
        amqp.exceptions.ChannelError: no queue takes it.
    """
    if app.connection_for_write().get_transport_cls().driver_name != "py-amqp":
        yield {}
        return
    with app.producer_or_acquire() as pooled:
        connection = pooled.connection
        channel = _channel(connection)
        channel.basic_publish = channel.basic_publish_confirm
        with _within(connection.connection):
            # Celery's own second try would go through a channel that confirms nothing.
            yield {"producer": app.amqp.Producer(channel, auto_declare=False), "retry": False, "mandatory": True}
            channel.close()


def reuse_client(channel: Any) -> None:
    """Have a channel of kombu's Redis transport send all its commands by one client.

    kombu (5.7) makes a client of redis-py for each command, which takes 0.1 ms of processor time: as much as the rest
    of what this library does for a call. A client keeps nothing but its pool of connections, and threads may share it.
    """
    if "_create_client" in vars(channel):
        return
    create: Callable[..., Any] = channel._create_client
    made: Any = None

    def client(asynchronous: bool = False) -> Any:
        nonlocal made
        if asynchronous:  # of the event loop, which has its own pool and keeps its clients
            return create(asynchronous=True)
        known = made
        if known is None or known.connection_pool is not channel.pool:  # after a lost connection it is another one
            known = made = create()
        return known

    channel._create_client = client


def _channel(connection: Any) -> Any:
    """Return a new channel: in one that confirms, answers that are not awaited pile up."""
    # Its property `connection` is None where the last publish was refused: the pool has closed it, and lends it again.
    try:
        with _within(connection.connect()):
            return connection.channel()
    except connection.connection_errors:  # it was lost while it was idle
        with _within(connection.connect()):
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


def sent_arguments(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of a call as its message has them: without models of Pydantic, which Celery (>= 5.7) dumps.

    Arguments:
        task: The task.
        args: The positional arguments.
        kwargs: The keyword arguments.
        options: The options of the call, with those that the task is published with in any case.
    """
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None or options.get("serializer") == "pickle" else dump(args, kwargs)


def ignores_result(task: Any, request: Any) -> bool:
    """Return whether the value is stored nowhere, by the caller's option, else the task's."""
    option = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if option is None else option)
