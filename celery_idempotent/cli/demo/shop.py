"""The shop whose workers charge the orders: ``celery -A celery_idempotent.cli.demo.shop worker``.

Two apps that differ in what a user of the library changes, and in nothing else. Which one a process is, and where its
servers are, is in its environment.
"""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any
from urllib.error import HTTPError

#: Seconds after which the broker hands out again what was not acked.
VISIBILITY_TIMEOUT = 6
#: Seconds after which the lease of a dead process may be taken over.
LEASE_TTL = 2
TASK = "shop.charge"
_VARIABLE = "CELERY_IDEMPOTENT_DEMO"


class GatewayBusy(Exception):
    """The gateway is to be called again later."""


@dataclass(frozen=True)
class DemoAddress:
    """Where a shop finds its servers.

    Arguments:
        idempotent: Whether the task's base is `IdempotentTask`.
        broker, store: URLs of Redis.
        gateway: URL of the payment gateway.
        books: Path of the shop's own file: a line per order that is paid.
    """

    idempotent: bool
    broker: str
    store: str
    gateway: str
    books: str

    def environment(self) -> dict[str, str]:
        """Return the environment variable that gives a process its address."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_process(cls) -> DemoAddress:
        """Return this process's place."""
        return cls(**json.loads(os.environ[_VARIABLE]))


def make_app(place: DemoAddress) -> Any:
    """Return the Celery app of producers of orders; they need not know the task."""
    from celery import Celery

    app = Celery("shop", broker=place.broker, set_as_current=False)
    app.conf.update(
        broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
        broker_connection_retry_on_startup=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
    )
    return app


def make_worker_app(place: DemoAddress) -> Any:
    """Return the Celery app of the workers that charge orders."""
    app = make_app(place)
    if place.idempotent:
        _add_idempotent_task(app, place)
    else:
        _add_plain_task(app, place)
    _report_to_the_demo(place)
    return app


def _add_plain_task(app: Any, place: DemoAddress) -> None:
    @app.task(name=TASK, bind=True, max_retries=10, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
    def charge(self: Any, order_id: str, amount: int) -> str:
        return _charge(self, place, order_id, amount, key=None)


def _add_idempotent_task(app: Any, place: DemoAddress) -> None:
    from ...celery.task import IdempotentTask

    app.conf.idempotency_store = place.store

    @app.task(  # type: ignore[untyped-decorator]
        name=TASK,
        bind=True,
        max_retries=10,
        base=IdempotentTask,
        idempotency={"key": "order_id", "lease_ttl": LEASE_TTL},
    )
    def charge(self: Any, order_id: str, amount: int) -> str:
        return _charge(self, place, order_id, amount, key=self.lease.derived_key("gateway"))


def _charge(task: Any, place: DemoAddress, order_id: str, amount: int, key: str | None) -> str:
    """Charge an order and mark it paid."""
    order = {"order": order_id, "amount": amount, "pid": os.getpid()}
    try:
        receipt: str = _post(f"{place.gateway}/charges", order, {"Idempotency-Key": key} if key else {})["receipt"]
    except HTTPError as error:
        raise task.retry(exc=GatewayBusy(str(error)), countdown=0.5) from error
    books = os.open(place.books, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(books, f"{order_id} {receipt}\n".encode())
    os.close(books)
    return receipt


def _report_to_the_demo(place: DemoAddress) -> None:
    """Let the demo know when a worker is ready, and when a task has ended and its message is not acked yet."""
    from celery import signals

    def ready(**_: Any) -> None:
        _post(f"{place.gateway}/notes", {"event": "ready", "pid": os.getpid()})

    def ended(args: Any = (), state: str | None = None, **_: Any) -> None:
        _post(f"{place.gateway}/notes", {"event": "ended", "pid": os.getpid(), "order": args[0], "state": state or ""})

    signals.worker_ready.connect(ready, weak=False)
    signals.task_postrun.connect(ended, weak=False)


def _post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    call = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    # Not through a proxy that the environment names: the gateway is on loopback.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@cache
def _app_of_process() -> Any:
    return make_worker_app(DemoAddress.of_process())


def __getattr__(name: str) -> Any:
    # Made when `celery -A` reads it: to import a module of the library imports no framework.
    if name == "app":
        return _app_of_process()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
