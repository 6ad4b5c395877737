"""Plain functions, called by whomever: one run per key, and what every other call is answered."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent import (
    Conflict,
    CrashLoop,
    KeyReused,
    MissingKey,
    PreviouslyFailed,
    ResultUnavailable,
    StoreUnreachable,
    current_lease,
    events,
    functions,
    idempotent,
)
from celery_idempotent.errors import LeaseLost
from celery_idempotent.events import Event
from celery_idempotent.stores import State, Store
from celery_idempotent.stores.memory import MemoryStore
from tests.support.docs.pages import ROOT
from tests.support.functions.calls import PROMPTLY, Held, counted, names, told_in_pairs
from tests.support.servers import RedisServer
from tests.support.stores.benches import age, known, take
from tests.support.stores.sqlite_children import Child
from tests.support.waiting import wait_until

KEY = "idem:shop.charge::ORD-1"


class Declined(Exception):
    """What is final."""


class Color(str, Enum):
    RED = "red"


@dataclass
class Receipt:
    order: str


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


# -- one run per key ---------------------------------------------------------------------------------------------------


def test_a_key_runs_once_and_every_call_gets_its_result(store: Store, heard: list[Event]) -> None:
    charge, runs = counted(store)
    assert [charge("ORD-1"), charge(order="ORD-1"), charge("ORD-1", cents=999)] == [1, 1, 1]
    assert charge("ORD-2") == 2
    assert runs == ["ORD-1", "ORD-2"]
    assert known(store, KEY).state is State.COMPLETED
    assert names(heard) == ["Acquired", "Completed", "Replayed", "Replayed", "Acquired", "Completed"]
    assert told_in_pairs(heard)


def test_a_store_may_be_named_by_its_url(store_url: str) -> None:
    charge, runs = counted(store_url)
    assert [charge("ORD-1"), charge("ORD-1")] == [1, 1]
    assert runs == ["ORD-1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_body_that_is_called_at_the_limit_of_recursion_is_recorded_as_any_other(
    tmp_path: Path, *, fails: bool
) -> None:
    """Its end may need more of Python's stack than its beginning did."""
    charge, runs = counted(f"sqlite:///{tmp_path}/store.db", ValueError("no") if fails else None, lease_ttl=0.5)
    ends: tuple[type[Exception], ...] = (RecursionError, ValueError)

    def call(order: str, depth: int = 0) -> None:
        if depth:
            call(order, depth - 1)
        else:
            charge(order)

    with suppress(ValueError):
        charge("ORD-0")
    limit, used = sys.getrecursionlimit(), len(inspect.stack(0))
    for left in range(10, 50):
        with suppress(*ends):
            call(f"ORD-{left}", limit - used - left)
        began = runs.count(f"ORD-{left}")
        with suppress(ValueError):
            charge(f"ORD-{left}")  # at once: nothing of it is left in the store, or its result
        assert runs.count(f"ORD-{left}") == (began + 1 if fails or not began else 1)


def test_functions_that_name_the_same_url_share_its_store(redis_url: str) -> None:
    for name in ("shop.charge", "shop.refund"):
        counted(redis_url, name=name)[0]("ORD-1")
    assert list(functions._stores) == [redis_url]


def test_functions_of_other_names_do_not_share_keys(memory: MemoryStore) -> None:
    charge, refund = (counted(memory, name=name)[0] for name in ("shop.charge", "shop.refund"))
    assert [charge("ORD-1"), refund("ORD-1")] == [1, 1]
    assert len(list(memory.scan())) == 2


@pytest.mark.nightly
def test_the_first_calls_of_many_threads_run_the_body_once() -> None:
    """The store is opened by the first call, and it is one store for all who come at once."""
    for turn in range(50):
        functions._stores.clear()
        barrier = threading.Barrier(8)
        charge, runs = counted("memory://", on_conflict="wait", name=f"shop.{turn}")

        def call(charge: Callable[..., Any] = charge, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait(PROMPTLY)
            return charge("ORD-1")

        with ThreadPoolExecutor(8) as threads:
            assert {result.result() for result in [threads.submit(call) for _ in range(8)]} == {1}
        assert len(runs) == 1


def test_a_hundred_threads_with_one_key_are_one_run(store: Store) -> None:
    charge, runs = counted(store, on_conflict="wait", wait_timeout=PROMPTLY)
    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(charge, ["ORD-1"] * 100)) == {1}
    assert runs == ["ORD-1"]


@pytest.mark.parametrize("how", ["exits", "raises", "returns"])
def test_a_child_that_a_body_forks_ends_nothing_of_its_parent(store: Store, how: str) -> None:
    seen: list[Event] = []

    @idempotent(store=store, key="order", lease_ttl=30)
    def charge(order: str) -> str:
        child = os.fork()
        if not child:
            if how == "exits":
                sys.exit(0)
            if how == "raises":
                raise ValueError
            return "the child's"
        os.waitpid(child, 0)
        seen.append(known(store, current_lease().key).state)  # type: ignore[arg-type,union-attr]
        return "the parent's"

    pid = os.getpid()
    try:
        value = charge("ORD-1")
    finally:
        if os.getpid() != pid:
            os._exit(0)
    assert (value, charge("ORD-1"), seen) == ("the parent's", "the parent's", [State.IN_PROGRESS])


def test_a_function_is_served_after_a_fork(store_url: str, forked: Callable[..., Child]) -> None:
    charge, _ = counted(store_url)
    assert charge("ORD-1") == 1
    child = forked(lambda: charge("ORD-1"), lambda: charge("ORD-2"))
    assert [child.said(), child.said()] == ["1", "2"]
    child.end()
    assert charge("ORD-2") == 2


# -- results -----------------------------------------------------------------------------------------------------------

KEPT = [
    *(False, 0, 0.5, "", "text", [], {}, True, -1, 2**70, b"\x00\xff", Decimal("1.10")),
    *(datetime(2031, 1, 2, 3, 4, 5, tzinfo=timezone.utc), UUID(int=7), {"a": [1, {"b": None}]}, [[], [{}]]),
]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_what_json_keeps_is_replayed_as_it_was(memory: MemoryStore, value: Any) -> None:
    charge, runs = counted(memory, lambda order: value)
    assert same(charge("ORD-1"), value)
    assert same(charge("ORD-1"), value)
    assert len(runs) == 1


def test_none_is_replayed_as_none(memory: MemoryStore) -> None:
    charge, runs = counted(memory, lambda order: None)
    assert charge("ORD-1") is None
    assert charge("ORD-1") is None
    assert len(runs) == 1


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, [(1,)], Color.RED, {"c": Color.RED}], ids=repr)
@pytest.mark.parametrize("above", [0, 1 << 20], ids=["compressed", "plain"])
def test_what_json_changes_is_the_same_for_the_first_call_and_for_duplicates(
    memory: MemoryStore, value: Any, above: int
) -> None:
    charge, _ = counted(memory, lambda order: value, compress_above=above)
    first, second = charge("ORD-1"), charge("ORD-1")
    assert same(first, second)
    assert repr(first) == repr(second)


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {1, 2}, Receipt("ORD-1"), Color.RED], ids=repr)
def test_with_pickle_values_of_any_type_are_replayed_as_they_were(redis_url: str, value: Any) -> None:
    charge, _ = counted(redis_url, lambda order: value, serializer="pickle")
    assert same(charge("ORD-1"), value)
    assert same(charge("ORD-1"), value)


@pytest.mark.parametrize(
    ("value", "options"),
    [(Receipt("ORD-1"), {}), ("text", {"store_result": False}), ("x" * 5000, {"result_max_bytes": 10})],
    ids=["of no type that JSON knows", "not wanted", "too large"],
)
def test_a_value_that_is_not_kept_is_returned_once_and_never_made_up(
    memory: MemoryStore, value: Any, options: dict[str, Any]
) -> None:
    charge, runs = counted(memory, lambda order: value, **options)
    assert charge("ORD-1") == value
    with pytest.raises(ResultUnavailable, match="ORD-1"):
        charge("ORD-1")
    assert len(runs) == 1


def test_duplicates_may_be_told_so_instead(memory: MemoryStore) -> None:
    charge, runs = counted(memory, on_duplicate="raise")
    assert charge("ORD-1") == 1
    with pytest.raises(Conflict, match="was done"):
        charge("ORD-1")
    assert len(runs) == 1


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__
)
def test_what_raises_gives_its_lease_back(store: Store, heard: list[Event], error: BaseException) -> None:
    charge, runs = counted(store, error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            charge("ORD-1")
        assert caught.value is error
    assert len(runs) == 2
    assert known(store, KEY).state is State.RELEASED
    assert names(heard) == ["Acquired", "Released"] * 2


def test_a_corrected_call_may_follow_a_failure(store: Store) -> None:
    charge, _ = counted(store, lambda order: order, key=lambda: "one")
    failing, _ = counted(store, ValueError("no"), key=lambda: "one")
    with pytest.raises(ValueError, match="no"):
        failing("wrong")
    assert charge("right") == "right"


def test_a_final_failure_is_raised_again_without_a_run(store: Store, heard: list[Event]) -> None:
    charge, runs = counted(store, Declined("no funds", 7), remember_failures=Declined)
    for _ in range(3):
        with pytest.raises(Declined) as caught:
            charge("ORD-1")
        assert caught.value.args == ("no funds", 7)
    assert len(runs) == 1
    assert names(heard) == ["Acquired", "Failed", "Replayed", "Replayed"]


def test_a_final_failure_that_cannot_be_made_again_keeps_its_text(memory: MemoryStore) -> None:
    counted(memory, Declined("no funds"), remember_failures=Declined)
    charge, _ = counted(memory, Declined("no funds"), remember_failures=Exception)
    with pytest.raises(Declined):
        charge("ORD-1")
    with pytest.raises(PreviouslyFailed, match="no funds"):
        charge("ORD-1")


# -- keys --------------------------------------------------------------------------------------------------------------


@dataclass
class Cart:
    number: str
    cents: int


def test_an_argument_that_json_cannot_carry_is_compared_by_value(store: Store) -> None:
    charge, runs = counted(store)
    assert [charge("ORD-1", Cart("A", 1)), charge("ORD-1", Cart("A", 1))] == [1, 1]
    for other in (Cart("A", 99999), [Cart("A", 1)], None):
        with pytest.raises(KeyReused, match="other arguments"):
            charge("ORD-1", other)
    assert runs == ["ORD-1"]


def test_an_argument_without_a_value_is_an_error_where_it_is_compared_and_only_there(store: Store) -> None:
    charge, runs = counted(store)
    with pytest.raises(MissingKey, match=r"argument 'cents'.*Pass an id or plain data"):
        charge("ORD-1", lambda: 1)
    assert runs == []
    for named, left_out in (("some", ["cents"]), ("all", False)):
        call, _ = counted(store, name=named, fingerprint=left_out)
        assert [call("ORD-1", lambda: 1), call("ORD-1", lambda: 2)] == [1, 1]


def test_a_key_with_other_arguments_is_refused(store: Store, heard: list[Event]) -> None:
    charge, runs = counted(store)
    charge("ORD-1", cents=999)
    with pytest.raises(KeyReused, match="other arguments"):
        charge("ORD-1", cents=1)
    assert runs == ["ORD-1"]
    assert names(heard)[-1] == "KeyReused"


def test_arguments_may_be_left_out_of_the_comparison(memory: MemoryStore) -> None:
    charge, runs = counted(memory, fingerprint=["cents"])
    assert charge("ORD-1", cents=999) == charge("ORD-1", cents=1) == 1
    assert len(runs) == 1


def test_a_scope_is_a_part_of_the_key(memory: MemoryStore) -> None:
    @idempotent(store=memory, key="order", scope=lambda tenant: tenant)
    def charge(tenant: str, order: str) -> str:
        return tenant

    assert [charge("acme", "1"), charge("bolt", "1"), charge("acme", "1")] == ["acme", "bolt", "acme"]
    with pytest.raises(MissingKey, match="to name the operation, got ''"):
        charge("", "1")


@pytest.mark.parametrize("order", ["", None, [], {}], ids=repr)
def test_without_a_key_nothing_runs_and_nothing_is_remembered(memory: MemoryStore, order: Any) -> None:
    charge, runs = counted(memory)
    with pytest.raises(MissingKey):
        charge(order)
    assert runs == []
    assert list(memory.scan()) == []


def test_a_call_that_does_not_fit_the_function_is_its_callers_error(memory: MemoryStore) -> None:
    charge, runs = counted(memory)
    for call in (lambda: charge(), lambda: charge("ORD-1", crates=1), lambda: charge(1, 2, 3)):
        with pytest.raises(TypeError):
            call()
    assert runs == []
    assert list(memory.scan()) == []


# -- conflicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", ["defer", "raise"])
def test_a_duplicate_of_a_run_is_told_at_once_how_long_its_lease_lasts(
    store: Store, heard: list[Event], on_conflict: str
) -> None:
    held = Held(store, on_conflict=on_conflict, wait_timeout=3600)
    with held.running() as result:
        for _ in range(2):
            with pytest.raises(Conflict, match="is being done") as caught:
                held.call("ORD-1")
            assert 0 < caught.value.remaining <= 60
        assert held.call.__wrapped__.__name__ == "charge"
        held.go_on.set()
        assert result.result(PROMPTLY) == "held ORD-1"
    assert held.call("ORD-1") == "held ORD-1"
    assert names(heard) == ["Acquired", "Conflicted", "Conflicted", "Completed", "Replayed"]


def test_a_duplicate_that_may_wait_gets_the_result(store: Store, heard: list[Event]) -> None:
    held = Held(store, on_conflict="wait", wait_timeout=PROMPTLY)
    with held.running(), ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(held.call, "ORD-1") for _ in range(2)]
        wait_until(lambda: names(heard).count("Conflicted") == 2)
        assert not any(result.done() for result in waiting)
        held.go_on.set()
        assert [result.result(PROMPTLY) for result in waiting] == ["held ORD-1"] * 2
    assert held.runs == ["ORD-1"]
    assert names(heard).count("Conflicted") == 2, "told once each, however long it waited"


def test_a_duplicate_that_may_wait_runs_if_the_run_fails(memory: MemoryStore, heard: list[Event]) -> None:
    entered, fail = threading.Event(), threading.Event()

    def fails_first(order: str) -> str:
        if entered.is_set():
            return "second"
        entered.set()
        assert fail.wait(PROMPTLY)
        raise ValueError("first")

    charge, runs = counted(memory, fails_first, on_conflict="wait", wait_timeout=PROMPTLY)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(charge, "ORD-1")
        assert entered.wait(PROMPTLY)
        second = threads.submit(charge, "ORD-1")
        wait_until(lambda: "Conflicted" in names(heard))
        fail.set()
        assert second.result(PROMPTLY) == "second"
        assert isinstance(first.exception(), ValueError)
    assert len(runs) == 2


def test_a_duplicate_waits_no_longer_than_it_may(memory: MemoryStore, heard: list[Event]) -> None:
    held = Held(memory, on_conflict="wait", wait_timeout=0.2)
    with held.running():
        since = monotonic()
        with pytest.raises(Conflict) as caught:
            held.call("ORD-1")
        assert monotonic() - since >= 0.2
        assert caught.value.remaining > 0
        assert names(heard) == ["Acquired", "Conflicted"], "told once, however often it looked"


# -- a store that cannot serve -----------------------------------------------------------------------------------------


@pytest.fixture
def lost_store(own_redis: Callable[..., RedisServer]) -> str:
    """The URL of a server that has died."""
    server = own_redis()
    url = server.url(0)
    server.kill()
    return url


def test_a_call_waits_for_its_store_as_long_as_it_may_and_then_says_so(lost_store: str) -> None:
    charge, runs = counted(lost_store, wait_timeout=0.3)
    since = monotonic()
    with pytest.raises(StoreUnreachable):
        charge("ORD-1")
    assert monotonic() - since >= 0.3
    assert runs == []


def test_a_call_that_may_not_wait_for_its_store_says_so_at_once(lost_store: str) -> None:
    charge, runs = counted(lost_store, on_store_error="raise", wait_timeout=3600)
    with pytest.raises(StoreUnreachable):
        charge("ORD-1")
    assert runs == []


def test_a_call_may_run_unprotected(lost_store: str, heard: list[Event]) -> None:
    leases = []

    def body(order: str) -> tuple[str, ...]:
        leases.append(current_lease())
        return (order,)

    charge, runs = counted(lost_store, body, on_store_error="run")
    assert charge("ORD-1") == charge("ORD-1") == ["ORD-1"], "of the type that it has under a lease"
    assert len(runs) == 2
    assert [lease.fence for lease in leases if lease] == [0, 0]
    assert current_lease() is None
    with pytest.raises(StoreUnreachable, match="unprotected"):
        leases[0].settle(1, using=None)  # type: ignore[union-attr]
    assert names(heard) == ["RanUnprotected"] * 2


def test_a_call_runs_once_its_store_is_back(own_redis: Callable[..., RedisServer], heard: list[Event]) -> None:
    server = own_redis()
    charge, runs = counted(server.url(0), wait_timeout=PROMPTLY)
    server.kill()
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(charge, "ORD-1")
        wait_until(lambda: [event for event in heard if isinstance(event, events.StoreFailed)])
        server.start()
        assert result.result(PROMPTLY) == 1
    assert runs == ["ORD-1"]


def test_an_error_of_the_body_is_raised_though_the_store_is_gone(
    own_redis: Callable[..., RedisServer], heard: list[Event]
) -> None:
    server = own_redis()

    def body(order: str) -> None:
        server.kill()
        raise Declined("no funds")

    charge, _ = counted(server.url(0), body)
    with pytest.raises(Declined):
        charge("ORD-1")
    assert names(heard) == ["Acquired", "ReleaseFailed"]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_is_kept_for_as_long_as_the_body_runs(store: Store) -> None:
    held = Held(store, lease_ttl=2)
    with held.running() as result:
        wait_until(lambda: held.lease.renewals >= 4, PROMPTLY, "renewals for longer than the lease lasts")
        with pytest.raises(Conflict):
            held.call("ORD-1")
        held.go_on.set()
        assert result.result(PROMPTLY) == "held ORD-1"
    assert held.runs == ["ORD-1"]


@pytest.mark.parametrize("raises", [None, ValueError("late")], ids=["returns", "raises"])
def test_a_run_that_lost_its_lease_answers_with_what_was_settled(
    store: Store, heard: list[Event], raises: Exception | None
) -> None:
    def body(order: str) -> str:
        if len(runs) == 2:
            return "theirs"
        age(store, KEY, 61)
        assert charge(order) == "theirs"
        if raises:
            raise raises
        return "mine"

    charge, runs = counted(store, body)
    assert charge("ORD-1") == "theirs"
    assert names(heard) == ["Acquired", "TakenOver", "Completed", "LeaseLost", "Replayed"]
    assert told_in_pairs(heard)


def test_a_run_that_lost_its_lease_to_one_that_still_runs_is_a_conflict(store: Store) -> None:
    def body(order: str) -> str:
        age(store, KEY, 61)
        take(store, KEY, task_id="another")
        return "mine"

    charge, _ = counted(store, body)
    with pytest.raises(Conflict) as caught:
        charge("ORD-1")
    assert caught.value.remaining > 0


def test_a_body_can_ask_whether_it_still_holds_its_lease(store: Store) -> None:
    def body(order: str) -> str:
        if len(runs) == 2:
            return "theirs"
        lease = current_lease()
        assert lease is not None
        lease.check()
        age(store, KEY, 61)
        charge(order)
        lease.deadline = 0.0
        with pytest.raises(LeaseLost):
            lease.check()
        lease.check()
        return "mine"

    charge, runs = counted(store, body)
    assert charge("ORD-1") == "theirs"


def test_what_kills_every_process_that_does_it_is_not_done_for_ever(store: Store, heard: list[Event]) -> None:
    """No call comes twice under one id: whichever call finds the last of too many deaths is told."""
    charge, runs = counted(store, max_crashes=2)
    for caller in ("a", "b"):  # two that die in the body
        take(store, KEY, task_id=caller, max_crashes=2)
        age(store, KEY, 61)
    with pytest.raises(CrashLoop, match="2 times in a row"):
        charge("ORD-1")
    assert runs == []
    assert names(heard) == ["CrashLooped"]
    assert (known(store, KEY).state, known(store, KEY).reason) == (State.RELEASED, "crash_loop")
    assert charge("ORD-1") == 1, "mended meanwhile"
    assert names(heard) == ["CrashLooped", "Acquired", "Completed"]


def test_fewer_deaths_than_are_allowed_are_taken_over(store: Store, heard: list[Event]) -> None:
    charge, _ = counted(store, max_crashes=2)
    take(store, KEY, task_id="a", max_crashes=2)
    age(store, KEY, 61)
    assert charge("ORD-1") == 1
    assert names(heard) == ["TakenOver", "Completed"]


# -- the lease of the code that runs -----------------------------------------------------------------------------------


def test_code_outside_of_a_guarded_function_has_no_lease() -> None:
    assert current_lease() is None


def test_code_has_the_lease_of_the_innermost_guarded_function(memory: MemoryStore) -> None:
    def key() -> str | None:
        lease = current_lease()
        return lease.key if lease else None

    inner, _ = counted(memory, lambda order: key(), name="inner")

    def outer_body(order: str) -> list[str | None]:
        with pytest.raises(ValueError, match="no"):
            failing(order)
        return [key(), inner(order), key(), inner(order), key()]

    failing, _ = counted(memory, ValueError("no"), name="failing")
    outer, _ = counted(memory, outer_body, name="outer")
    mine, others = "idem:outer::1", "idem:inner::1"
    assert outer("1") == [mine, others, mine, others, mine]
    assert current_lease() is None


def test_a_thread_of_the_body_has_no_lease(memory: MemoryStore) -> None:
    def body(order: str) -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(current_lease).result() is None

    assert counted(memory, body)[0]("ORD-1") is True


def test_two_threads_have_two_leases(memory: MemoryStore) -> None:
    barrier = threading.Barrier(2)

    def body(order: str) -> str:
        barrier.wait(PROMPTLY)
        lease = current_lease()
        assert lease is not None
        barrier.wait(PROMPTLY)
        return lease.key

    charge, _ = counted(memory, body)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(charge, ["1", "2"])) == ["idem:shop.charge::1", "idem:shop.charge::2"]


SCRIPT = """
import dataclasses
import multiprocessing
import sys

from celery_idempotent import idempotent

class Refused(Exception):
    pass

@dataclasses.dataclass(frozen=True)
class Order:
    number: str

@idempotent(store=sys.argv[1], key=lambda order: order.number, remember_failures=[Refused])
def charge(order):
    print("charged", order.number, flush=True)
    if order.number == "ORD-2":
        raise Refused(order.number)

def try_to_charge(number):
    try:
        charge(Order(number))
    except Refused:
        print("refused", number, flush=True)

if __name__ == "__main__":
    for number in ("ORD-1", "ORD-2"):
        process = multiprocessing.get_context("spawn").Process(target=try_to_charge, args=(number,))
        process.start()
        process.join()
        try_to_charge(number)
"""


@pytest.mark.nightly
def test_a_script_and_the_processes_that_it_spawns_are_one(redis_url: str, tmp_path: Path) -> None:
    """Python calls the script's module by another name there."""
    script = tmp_path / "shop.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), redis_url]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines() == ["charged ORD-1", "charged ORD-2", "refused ORD-2", "refused ORD-2"]
