"""What several clients do to a store at the same time, and what they see of it, with the faults of a network between.

A history is made from a seed: what is asked is the same every time, in which order it happens is not. `record` returns
for each key what was asked of it; `linearizability.linearization` says whether that can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

from celery_idempotent.errors import LeaseLost, StoreError
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Release, State, Store, open_store
from tests.support.proxy import Proxy
from tests.support.stores import benches
from tests.support.stores.kinds import Kind, port_of
from tests.support.stores.linearizability import LOST, UNKNOWN, Operation, explanation, linearization

__all__ = ["CLIENTS", "Place", "Seat", "check", "placed", "record"]

LEASE, KEEP, RESULT = 60.0, 3600.0, 500.0
#: Fewest and most clients; what each asks between two barriers; how often all wait while time passes.
CLIENTS, STEPS, PHASES = (3, 5), (2, 5), (1, 3)
#: Longer than a lease, shorter than a retention.
PASSES = 61.0

VERBS = {"acquire": 9, "again": 3, "renew": 3, "settle": 4, "release": 4, "get": 3, "delete": 1}
REASONS = [Reason.FAILED, Reason.RETRY, Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED]


@dataclass
class Seat:
    """Where one client sits: a store, and what lies between the two, if there is a server; it alone goes that way."""

    store: Store
    proxy: Proxy | None = None
    begun: int = 0
    done: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)

    def faults(self, resets: int) -> int:
        """Return how much has gone wrong here so far, given how many resets to count: those begun, or those done."""
        return resets + (self.proxy.swallowed if self.proxy else 0)

    def disturb(self, random: Random) -> None:
        """Lose the reply to what is asked next, or reset what is open, perhaps in the middle of a question."""
        if self.proxy is None:
            return
        if random.random() < 0.7:
            self.proxy.swallow_reply(random.choice((1, 1, 2)))
            return
        with self.turn:
            self.begun += 1
            self.proxy.reset()
            self.done += 1

    def heal(self) -> None:
        """What has hit nobody hits nobody any more."""
        if self.proxy is not None:
            self.proxy.swallow_reply(0)


@dataclass(frozen=True)
class Place:
    """Where histories happen.

    Arguments:
        seats: One for each client.
        direct: Leads to the same records without a proxy; ages them.
        age: Lets time pass for a key.
    """

    seats: Sequence[Seat]
    direct: Store
    age: Callable[[Store, str, float], None]


@contextmanager
def placed(kind: Kind, url: str) -> Iterator[Place]:
    """Open a place for a kind of store, with fault proxies before its server if it has one."""
    with ExitStack() as open_things:

        def opened(url: str) -> Store:
            store = open_store(url)
            open_things.callback(store.close)
            return store

        def seat() -> Seat:
            if not kind.shared:
                return Seat(direct)
            if kind.through is None:
                return Seat(opened(url))
            proxy = open_things.enter_context(Proxy(port_of(url)))
            return Seat(opened(kind.through(url, proxy.port)), proxy)

        direct = opened(url)
        yield Place([seat() for _ in range(CLIENTS[1])], direct, benches.age)


@dataclass
class Client:
    """One who asks, and notes what it was told."""

    name: str
    seat: Seat
    keys: Sequence[str]
    random: Random
    disturb: Callable[[Random], None]
    claims: list[Claim] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    notes: list[tuple[str, Operation]] = field(default_factory=list)

    def work(self, steps: int) -> None:
        """Ask so many times."""
        for _ in range(steps):
            verb = self.random.choices(list(VERBS), list(VERBS.values()))[0]
            self.disturb(self.random)
            if verb in ("renew", "settle", "release") and self.leases:
                lease = self.random.choice(self.leases[-3:])
                for _ in range(self.random.choice((1, 1, 2))):  # whoever heard nothing does it again
                    self.hold(verb, lease)
            elif verb in ("get", "delete"):
                key = self.random.choice(self.keys)
                self.note(key, verb, None, None, lambda: getattr(self.seat.store, verb)(key))  # noqa: B023 - called at once
            else:
                again = verb == "again" and self.claims
                self.ask(self.random.choice(self.claims[-3:]) if again else self.claim())

    def claim(self) -> Claim:
        """Return what a new delivery asks."""
        random = self.random
        copy = random.choice((0, 0, 0, 1, 2))
        claim = Claim(
            key=random.choice(self.keys),
            owner=f"{random.getrandbits(64):016x}",
            lease_ttl=LEASE,
            keep_ttl=KEEP,
            task_id=random.choice("abc"),
            retries=random.choice((0, 0, 0, 1)),
            copy=copy,
            token=random.choice("xy") if copy else "",
            redelivered=random.random() < 0.3,
            sender=self.leases[-1].owner if self.leases and random.random() < 0.2 else "",
            fingerprint=random.choice(("", "f", "f", "g")),
            max_crashes=random.choice((1, 2, 5)),
            holder=self.name,
        )
        self.claims.append(claim)
        return claim

    def ask(self, claim: Claim) -> None:
        answer = self.note(claim.key, "acquire", claim, None, lambda: self.seat.store.acquire(claim))
        if isinstance(answer, Lease):
            # One owner is one delivery: it asks again for what it did not hear of, and never holds two leases.
            self.claims.remove(claim)
            self.leases.append(answer)

    def hold(self, verb: str, lease: Lease) -> None:
        random, store, details = self.random, self.seat.store, None
        call: Callable[[], Any] = lambda: bool(store.renew([lease]))  # noqa: E731
        if verb == "settle":
            # One holder settles what it settles, however often it must ask.
            outcome = details = Outcome(State.COMPLETED, lease.owner.encode())
            call = lambda: store.settle(lease, outcome, ttl=RESULT)  # noqa: E731
        elif verb == "release":
            # A retry that is due at once is due sooner or later by whose clock one looks: time stands still here.
            release = details = Release(random.choice(REASONS), retry_in=300.0, next_attempt=1)
            call = lambda: store.release(lease, release)  # noqa: E731
        self.note(lease.key, verb, lease, details, call)

    def note(self, key: str, verb: str, subject: Any, details: Any, call: Callable[[], Any]) -> Any:
        """Ask, and write down what was asked and answered, and when."""
        faults, began = self.seat.faults(self.seat.done), perf_counter()
        try:
            answer = call()
        except LeaseLost:
            answer = LOST
        except StoreError:
            answer = UNKNOWN
        ended = perf_counter()
        # For each reply that may have been lost meanwhile, the store may have asked once more by itself.
        echoes = self.seat.faults(self.seat.begun) - faults
        if answer is UNKNOWN:
            echoes = max(0, echoes - 1)
        self.notes.append((key, Operation(self.name, verb, subject, details, answer, began, ended, min(2, echoes))))
        return answer


def record(place: Place, seed: int, threads: ThreadPoolExecutor, *, chance: float = 0.15) -> dict[str, list[Operation]]:
    """Let clients loose on keys of their own, and return by key what was asked and answered.

    Arguments:
        place: Where.
        seed: Decides what is asked; every third history has no faults.
        threads: As many as `CLIENTS` at least.
        chance: How often something goes wrong, per question.
    """
    random = Random(seed)
    keys = [f"history-{seed}-{number}" for number in range(random.choice((1, 1, 2)))]
    seats = place.seats[: random.randint(*CLIENTS)]

    def disturb(dice: Random) -> None:
        if seed % 3 and dice.random() < chance:
            dice.choice(seats).disturb(dice)

    clients = [
        Client(f"{number}", seat, keys, Random(f"{seed}-{number}"), disturb) for number, seat in enumerate(seats)
    ]
    history: dict[str, list[Operation]] = {key: [] for key in keys}
    for phase in range(random.randint(*PHASES)):
        if phase:
            for key in keys:
                began = perf_counter()
                place.age(place.direct, key, PASSES)
                history[key].append(Operation("time", "age", None, PASSES, None, began, perf_counter()))
        barrier = threading.Barrier(len(clients))

        def start(client: Client, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(60)
            client.work(client.random.randint(*STEPS))

        list(threads.map(start, clients))
        for seat in seats:
            seat.heal()
    for client in clients:
        for key, operation in client.notes:
            history[key].append(operation)
    return history


def check(history: dict[str, list[Operation]], seed: int, *, fences_fall: bool = False) -> str:
    """Return for people what cannot have happened in any order; "" if all can."""
    for key, operations in history.items():
        order, longest = linearization(key, operations, fences_fall=fences_fall)
        if order is None:
            return explanation(operations, longest, lambda: f"of {key} (seed {seed})")  # noqa: B023 - called at once
    return ""
