"""A consumer group on a Redis stream, without Celery: deliveries at least once, charges once.

With a Redis on localhost, start it twice, in two terminals:

    python -m examples.consumer work

and in another, as often as you like:

    python -m examples.consumer order ORD-1 999

While an order is being charged, kill the process that says so with `kill -9`. What it had not acknowledged stays
pending, the other consumer claims it, and every order in ledger.txt is charged once.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import redis

from celery_idempotent import Conflict, CrashLoop, KeyReused, MissingKey, idempotent

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))
#: Seconds that a charge takes here.
SECONDS = float(os.environ.get("SECONDS", "5"))
#: Seconds after which a message that nobody acknowledged is handed to whoever asks.
IDLE = 2 * SECONDS

STREAM, GROUP, DEAD = "orders", "payments", "orders:dead"
ME = f"consumer-{os.getpid()}"

broker = redis.Redis.from_url(os.environ.get("BROKER_URL", "redis://localhost/0"), decode_responses=True)


@idempotent(
    name="payments.charge",  # a script's own module is called __main__ here, and otherwise elsewhere
    store=os.environ.get("STORE_URL", "redis://localhost/1"),
    key="order_id",
    lease_ttl=max(SECONDS, 1),  # renewed while the charge takes; a dead consumer's order is free after it
    result_ttl="7d",
)
def charge(order_id: str, cents: int) -> str:
    """Charge an order once, however often it is published or delivered within a week."""
    print(f"{ME} charges {order_id}", flush=True)
    time.sleep(SECONDS)
    with LEDGER.open("a") as ledger:
        ledger.write(f"charged {order_id} {cents}\n")
    return f"receipt for {order_id}"


def handle(entry: str, fields: dict[str, str]) -> None:
    """Answer one message: acknowledge it, leave it for later, or put it aside."""
    try:
        receipt = charge(fields.get("order_id", ""), int(fields.get("cents", "0")))
    except Conflict as busy:
        # Somebody charges it. Unacknowledged it stays pending: should that one die, it is there.
        print(f"{ME} leaves {entry} for later: {busy.remaining:.1f} s", flush=True)
        return
    except (KeyReused, MissingKey, CrashLoop, ValueError) as error:
        # It would be refused as often as it came.
        broker.xadd(DEAD, {**fields, "error": str(error)})
        print(f"{ME} puts {entry} aside: {error}", flush=True)
    except Exception:
        logging.exception("%s could not be done, and comes again", entry)
        return
    else:
        print(f"{ME} has the {receipt}", flush=True)
    broker.xack(STREAM, GROUP, entry)


def work() -> None:
    """Handle what is new and what others left, until the process is told to end."""
    try:
        broker.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    print(f"{ME} is ready", flush=True)
    while True:
        left = broker.xautoclaim(STREAM, GROUP, ME, min_idle_time=int(IDLE * 1000), count=10)[1]
        new = broker.xreadgroup(GROUP, ME, {STREAM: ">"}, count=1, block=200) or [(STREAM, [])]
        for entry, fields in [*left, *new[0][1]]:
            handle(entry, fields)


def main(verb: str = "work", order_id: str = "", cents: str = "0") -> None:
    """Publish an order, or work."""
    if verb == "order":
        print(broker.xadd(STREAM, {"order_id": order_id, "cents": cents}))
        return
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that a charge that is broken off gives its lease back
    work()


if __name__ == "__main__":
    main(*sys.argv[1:])
