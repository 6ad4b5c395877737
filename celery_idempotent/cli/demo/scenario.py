"""The orders to be charged and what goes wrong with which: the same for both runs, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

ORDERS = 80
#: How often an order of `Fault.BURST` is published.
BURST = 8


class Fault(str, Enum):
    """What goes wrong with an order; always with the first call that the gateway gets about it."""

    KILL_BEFORE = "kill_before"
    KILL_AFTER = "kill_after"
    KILL_UNACKED = "kill_unacked"
    SLOW = "slow"
    BURST = "burst"
    FLAKY = "flaky"
    NONE = "none"

    @property
    def kills(self) -> bool:
        """Whether the process that charges the order is killed."""
        return self in (Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.KILL_UNACKED)

    @property
    def text(self) -> str:
        """What happened, in a person's words."""
        return _TEXTS[self]


_TEXTS = {
    Fault.KILL_BEFORE: "kill -9 in mid-charge, nothing charged yet",
    Fault.KILL_AFTER: "kill -9 after the charge, before the task ends",
    Fault.KILL_UNACKED: "kill -9 after the task ends, before its ack",
    Fault.SLOW: "visibility timeout passes during a slow charge",
    Fault.BURST: f"published {BURST} times at once",
    Fault.FLAKY: "gateway busy: the task fails and retries",
    Fault.NONE: "nothing went wrong",
}
_NUMBERS = {
    Fault.KILL_BEFORE: 3,
    Fault.KILL_AFTER: 3,
    Fault.KILL_UNACKED: 3,
    Fault.SLOW: 3,
    Fault.BURST: 4,
    Fault.FLAKY: 4,
}


@dataclass(frozen=True)
class Order:
    """One customer's order.

    Arguments:
        id: What the customer knows it by.
        amount: The price in cents.
        latency: Seconds that the gateway takes to charge it.
        fault: What goes wrong with it.
    """

    id: str
    amount: int
    latency: float
    fault: Fault

    @property
    def copies(self) -> int:
        """How often it is published."""
        return BURST if self.fault is Fault.BURST else 1


def draw_orders(seed: int) -> list[Order]:
    """Return the orders in the sequence in which they are published, the same for the same seed."""
    chance = random.Random(seed)
    faults = [fault for fault, number in _NUMBERS.items() for _ in range(number)]
    faults += [Fault.NONE] * (ORDERS - len(faults))
    chance.shuffle(faults)
    orders = [
        Order(f"ORD-{number:03}", chance.randrange(500, 50_000), chance.uniform(0.03, 0.12), fault)
        for number, fault in enumerate(faults, start=1)
    ]
    # The slow ones go first, as what takes longest; the demo is to end soon.
    return sorted(orders, key=lambda order: order.fault is not Fault.SLOW)


@dataclass(frozen=True)
class Counts:
    """What the customers of one run got, counted from the two files that the run wrote.

    Arguments:
        orders: Orders that were published.
        charges: Lines in the gateway's ledger.
        duplicates: Customers charged more than once.
        lost: Orders never charged, or charged and never marked paid.
        by_fault: Per fault: orders, and customers charged more than once.
    """

    orders: int
    charges: int
    duplicates: int
    lost: int
    by_fault: dict[Fault, tuple[int, int]]


def count(orders: list[Order], charged: Iterable[str], paid: Iterable[str]) -> Counts:
    """Count a run.

    Arguments:
        orders: What was to be charged.
        charged: The order of each charge.
        paid: The order of each line in the shop's books.
    """
    charges = list(charged)
    times = {order.id: charges.count(order.id) for order in orders}
    done = set(paid) & set(charges)
    by_fault = {}
    for fault in Fault:
        affected = [order.id for order in orders if order.fault is fault]
        by_fault[fault] = (len(affected), sum(times[order] > 1 for order in affected))
    return Counts(
        orders=len(orders),
        charges=len(charges),
        duplicates=sum(number > 1 for number in times.values()),
        lost=sum(order.id not in done for order in orders),
        by_fault=by_fault,
    )
