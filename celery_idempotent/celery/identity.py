"""Who a delivery is: read once from a request, and stripped from it, so that nothing the body publishes inherits it.

Unknown keys of a Celery request become attributes of the request and entries of its ``headers``, and those are copied
into every retry. What is ours is therefore taken out before the body runs, and put back on purpose where a message
continues this operation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry

from ..holding import Holding
from ..records import new_owner
from .brokers import SEVERAL

__all__ = ["DELIVERY", "KEY", "MESSAGE", "PLAIN", "STATE", "DeliveryState", "Identity", "new_token"]

#: Header with the key that the producer gave; part of the public interface.
KEY = "idempotency_key"
#: Header with what this library writes about a message for itself: the fields of `Identity` but for the key.
MESSAGE = "idempotency"
#: Entry of the request, set by the worker's main process for one delivery and never published.
DELIVERY = "idempotency_delivery"
#: Attribute of the request under which the read identity is kept.
STATE = "_idempotency"
#: How the names of tasks begin that are never guarded, whatever an app's task class is: Celery's own, and ours.
PLAIN = ("celery.", "celery_idempotent.")


def new_token() -> str:
    """Return a random id for one copy of a message."""
    return secrets.token_urlsafe(9)


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells this delivery from every other.

    Arguments:
        owner: Random id of this delivery.
        key: The key that the producer gave, or None.
        copy, token: Which copy of the message this is; 0 and empty as its producer sent it.
        sender: Owner of the delivery that published this message under its lease.
        sending: Random id of one sending of the message, the same in its redeliveries, copies and retries; empty where
            it has no errbacks, or was published by its task's name alone.
        fingerprint: The digest of the arguments of the first attempt. A retry may have other ones, and duplicates are
            compared with the first.
        fingerprint_of: The store key to which that digest belongs: a retry's arguments may name another one.
        nesting: How often the message's task had been replaced when it was published to continue; Celery says so too,
            but not to the body of a chord.
        operation: Store key of the operation that the message was published to continue, or empty.
        within: Store keys of the operations that were replaced by signatures of which the message is a part.
        part: Which part it is, where Celery gives every part the same task id: in a call of ``apply()``.
        place: Which of the workers that all get the message this is, see `brokers.place_of`; empty where one gets it.
        meant_for: Of which of them it continues the delivery, or empty.
        content_type, compression: How the message was encoded, so that a copy can be encoded alike.
    """

    owner: str
    key: object = None
    copy: int = 0
    token: str = ""
    sender: str = ""
    sending: str = ""
    fingerprint: str = ""
    fingerprint_of: str = ""
    nesting: int = 0
    operation: str = ""
    within: tuple[str, ...] = ()
    part: str = ""
    place: str = ""
    meant_for: str = ""
    content_type: str | None = None
    compression: str | None = None

    @classmethod
    def take(cls, request: Any) -> Identity:
        """Read the identity from a request and remove every trace of it there."""
        headers = dict(request.headers or {})
        own: dict[str, Any] = {}
        for name in (KEY, MESSAGE, DELIVERY):
            own[name] = request.__dict__.pop(name, None)
            own[name] = headers.pop(name, own[name])
        request.headers = headers or None
        message = own[MESSAGE] if isinstance(own[MESSAGE], dict) else {}
        if message.get(
            "expires"
        ):  # a copy carries it out of Celery's sight; to the body, and to a retry, it is the same
            request.expires = message["expires"]
        delivery = own[DELIVERY] if isinstance(own[DELIVERY], dict) else {}
        meant_for = str(message.get("place") or "")
        return cls(
            owner=delivery.get("owner") or new_owner(),
            key=own[KEY],
            copy=message["copy"] if isinstance(message.get("copy"), int) else 0,
            token=str(message.get("token") or ""),
            sender=str(message.get("from") or ""),
            sending=str(message.get("sending") or ""),
            fingerprint=str(message.get("fingerprint") or ""),
            fingerprint_of=str(message.get("fingerprint_of") or ""),
            nesting=message["nesting"] if isinstance(message.get("nesting"), int) else 0,
            operation=str(message.get("operation") or ""),
            within=tuple(map(str, message["within"])) if isinstance(message.get("within"), (list, tuple)) else (),
            part=str(message.get("part") or ""),
            place=delivery.get("place") or meant_for,
            meant_for=meant_for,
            content_type=delivery.get("content_type"),
            compression=delivery.get("compression"),
        )

    @property
    def is_anothers(self) -> bool:
        """Whether another worker's delivery goes on with this message, which all of them get."""
        return bool(self.meant_for) and self.meant_for != self.place and SEVERAL not in self.place

    def headers(self, **message: Any) -> dict[str, Any]:
        """Return the headers of a message that continues this operation."""
        kept = {
            "sending": self.sending,
            "fingerprint": self.fingerprint,
            "fingerprint_of": self.fingerprint_of,
            "nesting": self.nesting,
            "operation": self.operation,
            "part": self.part,
            "place": "" if SEVERAL in self.place else self.place,
        }
        message = {**{name: value or None for name, value in kept.items()}, **self.parts(), **message}
        headers: dict[str, Any] = {MESSAGE: {name: value for name, value in message.items() if value is not None}}
        if self.key is not None:
            headers[KEY] = self.key
        return headers

    def parts(self, *keys: str) -> dict[str, list[str]]:
        """Return what a message says of the operations that it is a part of: those of this one, and ``keys``."""
        within = list(dict.fromkeys([*self.within, *keys]))
        return {"within": within} if within else {}


class DeliveryState:
    """The one mutable thing about a delivery, kept on its request.

    Arguments:
        identity: Who it is.
    """

    __slots__ = (
        "begun",
        "continued",
        "entered",
        "failed",
        "fans_out",
        "fans_out_failed",
        "give_up",
        "holding",
        "identity",
        "key",
        "named",
        "nesting",
        "replaced",
    )

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        #: what the body holds while it runs
        self.holding: Holding | None = None
        #: gives the lease up for the retry that it is called with, while the body runs
        self.give_up: Callable[[Retry], None] | None = None
        #: whether the body was run
        self.begun = False
        #: whether the body has begun, so that further calls are plain calls
        self.entered = False
        #: whether Celery has callbacks or a chain to dispatch, told before it does: Celery before 5.5 takes them away
        self.fans_out = False
        #: whether it failed for good, and Celery has errbacks to dispatch
        self.fans_out_failed = False
        #: the store key, once known
        self.key = ""
        #: the store key that its own arguments name; the operation has another one where it is a part of that one
        self.named = ""
        #: how often its task has been replaced, as Celery counts or we do
        self.nesting = identity.nesting
        #: what the continuation raised that ran in the body's place, in a call of ``apply()``
        self.failed: Exception | None = None
        #: whether the body was replaced
        self.replaced = False
        #: whether what replaces it ends in its own task, as which the operation goes on
        self.continued = False

    @classmethod
    def is_known(cls, request: Any) -> bool:
        """Tell whether the request is one of a delivery: read before, or made by the worker's main process."""
        return STATE in request.__dict__ or DELIVERY in request.__dict__

    @classmethod
    def of(cls, request: Any) -> DeliveryState:
        """Return the state of a request, reading its identity the first time."""
        state: DeliveryState | None = request.__dict__.get(STATE)
        if state is None:
            state = cls(Identity.take(request))
            state.nesting = max(state.nesting, request.get("replaced_task_nesting") or 0)
            setattr(request, STATE, state)
        return state
