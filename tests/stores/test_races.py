"""Many at once: one gets the lease, and an operation has one outcome."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from celery_idempotent.errors import LeaseLost, StoreUnreachable
from celery_idempotent.stores import Lease, Outcome, Reason, Refusal, Release, State, Store, Verdict
from tests.support import processes
from tests.support.stores.benches import age, claim, known, take
from tests.support.stores.kinds import Kind

T = TypeVar("T")
Race = Callable[[str], list[str]]
THREADS, PROCESSES = 50, 8


@pytest.fixture
def store(any_store: Store) -> Store:
    """A store whose callers ask again, as deliveries do: of fifty at one row, some wait longer than it lets them."""

    def patient(verb: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            patience = time.monotonic() + 60
            while True:
                try:
                    return verb(*args, **options)
                except StoreUnreachable:
                    if time.monotonic() > patience:
                        raise

        return ask

    for name in ("acquire", "renew", "settle", "release"):
        setattr(any_store, name, patient(getattr(any_store, name)))
    return any_store


@pytest.fixture(autouse=True)
def hasty_threads() -> Iterator[None]:
    """Threads that take turns every microsecond, not every 5 ms: a store in this process is raced for as others are."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def crowd() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as threads:
        yield threads


def together(crowd: ThreadPoolExecutor, *work: Callable[[], T]) -> list[T]:
    """Do all this at the same time, and return the results in order."""
    barrier = threading.Barrier(len(work))

    def start(one: Callable[[], T]) -> T:
        barrier.wait(30)
        return one()

    return list(crowd.map(start, work))


def asks(store: Store, key: str) -> list[Callable[[], Lease | Refusal]]:
    """Return that many deliveries of different tasks."""
    return [
        lambda name=f"t{number}": store.acquire(claim(key, task_id=name, max_crashes=1000)) for number in range(THREADS)
    ]  # type: ignore[misc]


def test_of_fifty_threads_one_gets_the_lease(store: Store, kind: Kind, crowd: ThreadPoolExecutor) -> None:
    for number in range(kind.rounds):
        answers = together(crowd, *asks(store, f"key-{number}"))
        (lease,) = [answer for answer in answers if isinstance(answer, Lease)]
        others = [answer for answer in answers if isinstance(answer, Refusal)]
        assert {(other.verdict, other.record.owner) for other in others} == {(Verdict.CONFLICT, lease.owner)}
        assert known(store, f"key-{number}").owner == lease.owner


def test_of_fifty_threads_one_takes_over_a_lease_that_ran_out(
    store: Store, kind: Kind, crowd: ThreadPoolExecutor
) -> None:
    fences = [take(store).fence]
    for turn in range(kind.rounds):
        age(store, known(store).key, 61)
        answers = together(crowd, *asks(store, known(store).key))
        (lease,) = [answer for answer in answers if isinstance(answer, Lease)]
        assert (lease.taken_over, lease.crashes) == (True, turn + 1)
        fences.append(lease.fence)
    assert fences == sorted(set(fences))


def test_leases_that_follow_each_other_never_overlap(store: Store, kind: Kind, crowd: ThreadPoolExecutor) -> None:
    """Many threads take one key in turn; a counter that only holders touch loses no step."""
    steps: list[int] = []

    def work() -> list[int]:
        fences: list[int] = []
        patience = time.monotonic() + 60
        while len(fences) < 2 and time.monotonic() < patience:
            answer = store.acquire(claim(task_id=threading.current_thread().name))
            if isinstance(answer, Lease):
                before = len(steps)
                fences.append(answer.fence)
                steps.append(answer.fence)
                assert len(steps) == before + 1
                assert store.release(answer, Release(Reason.FAILED))
        return fences

    runners = min(THREADS, 5 * kind.rounds)
    taken = together(crowd, *[work] * runners)
    assert sorted(fence for fences in taken for fence in fences) == steps == sorted(set(steps))
    assert len(steps) == 2 * runners


def test_a_settle_and_a_take_over_never_make_two_outcomes(store: Store, kind: Kind, crowd: ThreadPoolExecutor) -> None:
    for number in range(kind.rounds * 5):
        key = f"key-{number}"
        slow = take(store, key)
        age(store, key, 61)

        def settles(lease: Lease, text: bytes) -> bytes | None:
            try:
                store.settle(lease, Outcome(State.COMPLETED, text), ttl=60)
            except LeaseLost:
                return None
            return text

        def takes_over(key: str = key) -> bytes | None:
            answer = store.acquire(claim(key, task_id="b"))
            return settles(answer, b"taken over") if isinstance(answer, Lease) else answer.record.payload

        def looks(key: str = key) -> set[bytes]:
            return {known(store, key).payload for _ in range(5)}

        def is_late(lease: Lease = slow) -> bytes | None:
            return settles(lease, b"slow")

        late, new, *seen = together(crowd, is_late, takes_over, is_late, looks, looks)
        outcome = known(store, key).payload
        assert (late, new) in {(b"slow", b"slow"), (None, b"taken over")}
        assert new == outcome
        assert seen.pop(0) in {late, None if late is None else b"slow"}
        assert all(payloads <= {b"", outcome} for payloads in seen)  # type: ignore[operator]


def test_a_release_and_a_take_over_leave_one_holder(store: Store, kind: Kind, crowd: ThreadPoolExecutor) -> None:
    for number in range(kind.rounds):
        key = f"key-{number}"
        slow = take(store, key)
        age(store, key, 61)
        release = Release(Reason.RETRY, retry_in=30, next_attempt=1)
        released, new = together(
            crowd,
            lambda lease=slow, release=release: store.release(lease, release),  # type: ignore[misc]
            lambda key=key: store.acquire(claim(key, task_id="b")),  # type: ignore[misc]
        )
        if released:
            assert isinstance(new, Refusal)
            assert (new.verdict, known(store, key).state) == (Verdict.CONFLICT, State.RELEASED)
        else:
            assert isinstance(new, Lease)
            assert known(store, key).owner == new.owner


def test_a_renewal_and_a_take_over_leave_one_holder(store: Store, kind: Kind, crowd: ThreadPoolExecutor) -> None:
    for number in range(kind.rounds):
        key = f"key-{number}"
        slow = take(store, key)
        age(store, key, 61)
        lost, new = together(
            crowd,
            lambda lease=slow: list(store.renew([lease])),  # type: ignore[misc]
            lambda key=key: store.acquire(claim(key, task_id="b")),  # type: ignore[misc]
        )
        assert isinstance(new, Lease) == (lost == [slow])
        assert known(store, key).owner == (new.owner if isinstance(new, Lease) else slow.owner)


@pytest.fixture
def race(kind: Kind, kind_url: str) -> Iterator[Race]:
    """A function that lets every process ask for a key at the same moment, and returns what they were told."""
    if not kind.shared:
        pytest.skip("what other processes see is not this store")
    command = [sys.executable, "-m", "tests.support.stores.racer", kind_url, str(PROCESSES)]
    racers = processes.spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert racers.stdin is not None
    assert racers.stdout is not None

    def said() -> list[str]:
        return [racers.stdout.readline().decode().strip() for _ in range(PROCESSES)]

    def race(key: str) -> list[str]:
        racers.stdin.write(f"{key} {time.time() + 0.01}\n".encode())
        racers.stdin.flush()
        return said()

    try:
        assert said() == ["ready"] * PROCESSES
        yield race
    finally:
        racers.stdin.close()  # after which they end
        racers.stdout.close()
        racers.wait(30)
        processes.end(racers)


@pytest.mark.thorough
def test_of_eight_processes_one_gets_the_lease(race: Race, store: Store, kind: Kind) -> None:
    for number in range(kind.rounds * 2):
        answers = race(f"key-{number}")
        assert sorted(answers)[1:] == ["conflict"] * (PROCESSES - 1)
        assert f"{known(store, f'key-{number}').fence} False" in answers


@pytest.mark.thorough
def test_of_eight_processes_one_takes_over_a_lease_that_ran_out(race: Race, store: Store, kind: Kind) -> None:
    fences = [take(store, "key", task_id="a").fence]
    for _ in range(kind.rounds * 2):
        age(store, "key", 61)
        (lease,) = [answer for answer in race("key") if answer != "conflict"]
        fence, took_over = lease.split()
        assert took_over == "True"
        fences.append(int(fence))
    assert fences == sorted(set(fences))
