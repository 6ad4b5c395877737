"""Reservations on every store: what a publisher, a later publisher and a worker make of one another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic, sleep, time

import pytest

from celery_idempotent.core import reservations
from celery_idempotent.core.breaker import Breaker
from celery_idempotent.core.reservations import BESIDE, BUDGET, Confirmations, Reserved, Token, WaitingMessage
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Lease, Reason, Record, State, Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner
from tests.support.waiting import wait_until

SLOT = 'idem:~unique:shop.index::~7:~["queue=celery"]'


def reserve(store: Store, task_id: str, doubt: str = "", **token: object) -> tuple[Token, Reserved | Record | None]:
    """Reserve the slot, and return what the message would carry, and what the store said."""
    wanted = Token(SLOT, new_owner(), **token)  # type: ignore[arg-type]
    found = reservations.reserve(store, wanted, WaitingMessage(task_id), lambda *_: doubt, monotonic() + 60 + BUDGET)
    if isinstance(found, Reserved):
        wanted = Token(SLOT, wanted.owner, found.lease.fence, **token)  # type: ignore[arg-type]
    return wanted, found


def publish(store: Store, task_id: str, **token: object) -> Token:
    """Reserve the slot for a message, and confirm it."""
    wanted, found = reserve(store, task_id, **token)
    assert isinstance(found, Reserved)
    assert reservations.confirm(store, wanted, 30.0)
    return wanted


def waiting(found: Reserved | Record | None) -> str:
    """Return the id of the message that waits."""
    assert isinstance(found, Record)
    met = WaitingMessage.read(found.holder)
    assert met is not None
    return met.task_id


def test_a_confirmed_message_stands_for_later_calls_until_it_begins(any_store: Store) -> None:
    first = publish(any_store, "first")
    record = any_store.get(SLOT)
    assert record is not None
    assert 3630 < record.remaining <= 3640  # the wait, an hour, and 10 s
    assert waiting(reserve(any_store, "second")[1]) == "first"
    assert reservations.release(any_store, first, Reason.STARTED)
    third = publish(any_store, "third")
    assert third.fence > first.fence
    assert not reservations.release(any_store, first, Reason.STARTED)  # delivered again
    assert waiting(reserve(any_store, "fourth")[1]) == "third"


def test_an_unconfirmed_message_stands_for_none_and_is_not_confirmed_when_it_has_begun(any_store: Store) -> None:
    first, _ = reserve(any_store, "first")
    second, found = reserve(any_store, "second")
    assert isinstance(found, Reserved)
    assert found.reason == reservations.IS_UNCONFIRMED
    assert found.instead is not None  # it took its place, and did not wait until it had lapsed
    assert not reservations.confirm(any_store, first, 0.0)
    assert reservations.release(any_store, second, Reason.STARTED)
    assert not reservations.confirm(any_store, second, 0.0)
    record = any_store.get(SLOT)
    assert record is not None
    assert (record.state, record.reason) == (State.RELEASED, Reason.STARTED)


def test_a_publisher_that_confirms_after_its_record_is_gone_revives_nothing(any_store: Store) -> None:
    """Its message has long begun: a reservation would have calls skipped for nothing."""
    first, _ = reserve(any_store, "first")
    assert reservations.release(any_store, first, Reason.STARTED)
    any_store.delete(SLOT)  # as in a minute
    assert not reservations.confirm(any_store, first, 30.0)
    assert any_store.get(SLOT) is None
    assert isinstance(reserve(any_store, "second")[1], Reserved)


def test_a_call_for_which_the_message_does_not_do_takes_its_place(any_store: Store) -> None:
    publish(any_store, "late")
    sooner, found = reserve(any_store, "sooner", "due later")
    assert isinstance(found, Reserved)
    assert found.instead is not None
    assert (found.reason, waiting(found.instead)) == ("due later", "late")
    reservations.confirm(any_store, sooner, 0.0)
    assert waiting(reserve(any_store, "third")[1]) == "sooner"


def test_a_later_message_does_the_work_of_an_earlier_once_it_is_confirmed_or_has_begun(any_store: Store) -> None:
    first = publish(any_store, "first", newest=True)
    second, _ = reserve(any_store, "second", newest=True)
    assert reservations.replaced_by(any_store, first) is None
    reservations.confirm(any_store, second, 0.0)
    assert reservations.replaced_by(any_store, first) == "second"
    assert reservations.replaced_by(any_store, second) is None
    for task_id in ("never published", "nor this"):
        reserve(any_store, task_id, newest=True)
        assert reservations.replaced_by(any_store, first) == "second"
        assert reservations.replaced_by(any_store, second) is None  # it does the work of all before it
    second = publish(any_store, "again", newest=True)
    reservations.release(any_store, second, Reason.STARTED)
    assert reservations.replaced_by(any_store, first) == ""
    third = publish(any_store, "third", newest=True)
    reservations.release(any_store, third, Reason.REVOKED)
    assert reservations.replaced_by(any_store, first) is None


def test_a_message_that_was_replaced_by_one_that_has_begun_does_not_run_while_a_third_waits(any_store: Store) -> None:
    first = publish(any_store, "first", newest=True)
    second = publish(any_store, "second", newest=True)
    assert reservations.release(any_store, second, Reason.STARTED)
    third = publish(any_store, "third", newest=True)
    assert reservations.replaced_by(any_store, first) == ""
    assert reservations.replaced_by(any_store, second) is None  # its worker was killed, and it is delivered again
    assert reservations.replaced_by(any_store, third) is None
    for _ in range(2):
        reserve(any_store, "never published", newest=True)
        assert reservations.replaced_by(any_store, first) == ""
        assert reservations.replaced_by(any_store, second) is None


def test_a_record_is_kept_for_as_long_as_what_it_replaced_may_come() -> None:
    kept = {late: Token(SLOT, "a", newest=True, hold=600.0, late=late).claim(10).keep_ttl for late in (0.0, 5000.0)}
    assert kept == {0.0: 600.0, 5000.0: 5600.0}


def test_a_record_that_a_message_leaves_has_the_next_one_keep_it_as_long(any_store: Store) -> None:
    """Messages that it replaced may yet come."""
    for hold in (600.0, 60.0, 1.0):
        first = Token(SLOT, new_owner(), newest=True, hold=hold, late=5000.0)
        first = replace(first, fence=reserved(any_store, first).lease.fence)
        assert reservations.release(any_store, first, Reason.STARTED)
        second = Token(SLOT, new_owner(), newest=True, hold=hold)
        found = reserved(any_store, second)
        assert 4990 < found.late <= 5002
        assert reservations.release(any_store, replace(second, fence=found.lease.fence), Reason.STARTED)
        assert reserved(any_store, Token(SLOT, new_owner(), newest=True, hold=hold)).late == 0.0
        any_store.delete(SLOT)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_how_long_a_record_is_kept_does_not_change_with_clocks_that_differ(
    monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Of the publisher, who reserves, and of the worker, who gives the slot back."""
    store, late = MemoryStore(), 5000.0
    for _ in range(5):
        token = Token(SLOT, new_owner(), newest=True, hold=600.0, late=late)
        with monkeypatch.context() as publisher:
            publisher.setattr(reservations, "time", lambda: time() + ahead)
            found = reserved(store, token)
            late = max(late, found.late) if late == 5000.0 else found.late
        assert reservations.release(store, replace(token, fence=found.lease.fence), Reason.STARTED)
        assert 4990 < late <= 5002


def test_a_reservation_that_has_lapsed_has_the_next_one_keep_the_record_as_long(any_store: Store) -> None:
    note = WaitingMessage("lapsed", latest=time() + 5000.0)
    lapsed = Token(SLOT, new_owner(), newest=True)
    assert isinstance(any_store.acquire(lapsed.claim(0.5, note=note.write())), Lease)
    wait_until(lambda: (found := any_store.peek(SLOT)) is not None and not found.remaining)
    assert 4990 < reserved(any_store, Token(SLOT, new_owner(), newest=True)).late <= 5002


def reserved(store: Store, token: Token) -> Reserved:
    found = reservations.reserve(store, token, WaitingMessage("a"), lambda *_: "", monotonic() + 60)
    assert isinstance(found, Reserved)
    return found


def test_a_look_finds_a_confirmed_message_and_leaves_the_rest_to_a_claim(any_store: Store) -> None:
    """It never takes what remains of a lease for more than it is."""
    token, note = Token(SLOT, new_owner()), WaitingMessage("second")

    def look() -> Reserved | Record | None:
        return reservations.reserve(any_store, token, note, lambda *_: "", monotonic() + 60, look=True)

    assert any_store.peek(SLOT) is None
    first, _ = reserve(any_store, "first")
    record, peeked = any_store.get(SLOT), any_store.peek(SLOT)
    assert record is not None
    assert peeked is not None
    assert not reservations.is_confirmed(peeked)
    assert (peeked.state, peeked.owner, peeked.fence, peeked.holder) == (
        record.state,
        record.owner,
        record.fence,
        record.holder,
    )
    assert reservations.confirm(any_store, first, 30.0)
    assert waiting(look()) == "first"
    assert reservations.release(any_store, first, Reason.STARTED)
    assert isinstance(look(), Reserved)


def test_a_throttle_holds_others_back_for_its_period(any_store: Store) -> None:
    token = Token(SLOT, new_owner(), throttle=60.0)
    assert reservations.throttle(any_store, token, "host:1") == 0
    assert 50 < reservations.throttle(any_store, Token(SLOT, new_owner(), throttle=60.0), "host:2") <= 60


def test_a_gathered_message_that_runs_holds_others_back_for_a_whole_period(any_store: Store) -> None:
    """Though a call which was skipped for it holds them back already, or the period is not quite over."""
    first, gathered, third = [Token(SLOT, new_owner(), throttle=60.0) for _ in range(3)]
    assert reservations.throttle(any_store, replace(first, throttle=5.0), "host:1") == 0
    assert 0 < reservations.throttle(any_store, gathered, "host:2") <= 5
    assert reservations.throttle(any_store, gathered, "host:2", runs=True) == 0
    assert 50 < reservations.throttle(any_store, third, "host:3") <= 60


def test_a_bounded_store_has_the_same_records(any_store: Store) -> None:
    bounded = any_store.bounded(0.25)
    publish(any_store, "first")
    if bounded is not None:
        assert waiting(reserve(bounded, "second")[1]) == "first"
        bounded.close()


def test_a_message_that_does_not_replace_another_one_begins_a_chain_of_its_own(any_store: Store) -> None:
    """As one that expires first: those that come after it replace it, and not what it left alone."""
    first = publish(any_store, "first", newest=True)
    note, token = WaitingMessage("second"), Token(SLOT, new_owner(), newest=True)
    found = reservations.reserve(
        any_store, token, note, lambda *_: "", monotonic() + 60, follow=lambda *_: (note, "expires sooner")
    )
    assert isinstance(found, Reserved)
    assert found.reason == "expires sooner"
    second = replace(token, fence=found.lease.fence)
    reservations.confirm(any_store, second, 0.0)
    assert reservations.replaced_by(any_store, first) is None
    publish(any_store, "third", newest=True)
    assert reservations.replaced_by(any_store, second) == "third"
    assert reservations.replaced_by(any_store, first) is None
    reserve(any_store, "never published", newest=True)
    assert reservations.replaced_by(any_store, second) == "third"
    assert reservations.replaced_by(any_store, first) is None


def test_messages_that_are_left_alone_run_however_many_there_are() -> None:
    """A record names the last of them; those before these are in doubt, and run as well."""
    store, alone = MemoryStore(), []
    for number in range(BESIDE + 5):
        note, token = WaitingMessage(str(number)), Token(SLOT, new_owner(), newest=True)
        found = reservations.reserve(
            store, token, note, lambda *_: "", monotonic() + 60, follow=lambda *_, note=note: (note, "expires sooner")
        )
        assert isinstance(found, Reserved)
        alone.append(replace(token, fence=found.lease.fence))
        assert reservations.confirm(store, alone[-1], 0.0)
        store.offset += 1
    assert {reservations.replaced_by(store, token) for token in alone} == {None}
    publish(store, "last", newest=True)
    assert [reservations.replaced_by(store, token) for token in alone] == [None] * (BESIDE + 4) + ["last"]
    record = store.get(SLOT)
    assert record is not None
    met = WaitingMessage.read(record.holder)
    assert met is not None
    assert len(met.beside) == BESIDE


def test_a_call_waits_a_moment_for_the_message_before_it_to_be_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first, _ = reserve(store, "first")
    monkeypatch.setattr(reservations, "sleep", lambda _: reservations.confirm(store, first, 0.0))
    assert waiting(reserve(store, "second")[1]) == "first"


def test_who_looks_claims_only_where_no_message_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store, claims = MemoryStore(), []
    acquire = store.acquire
    monkeypatch.setattr(store, "acquire", lambda claim: claims.append(claim) or acquire(claim))
    first = publish(store, "first")
    claims.clear()
    for doubt, claimed in (("", False), ("due later", True)):
        token, note = Token(SLOT, new_owner()), WaitingMessage("second")
        found = reservations.reserve(store, token, note, lambda *_, why=doubt: why, monotonic() + 60, look=True)
        assert (isinstance(found, Reserved), bool(claims)) == (claimed, claimed)
        assert not isinstance(found, Record) or found.owner == first.owner


def test_a_message_that_gave_its_slot_back_unrun_has_not_begun() -> None:
    store = MemoryStore()
    first, second = (publish(store, task_id, newest=True) for task_id in ("first", "second"))
    assert reservations.release(store, second, Reason.REVOKED)
    publish(store, "third", newest=True)
    assert reservations.replaced_by(store, first) is None


def test_that_a_message_has_begun_is_known_beyond_a_reservation_that_has_lapsed() -> None:
    store = MemoryStore()
    first, second = (publish(store, task_id, newest=True) for task_id in ("first", "second"))
    assert reservations.release(store, second, Reason.STARTED)
    third = publish(store, "third", newest=True)
    store.offset += 3700
    publish(store, "fourth", newest=True)
    assert reservations.replaced_by(store, first) == ""
    assert reservations.replaced_by(store, third) is None


def test_a_message_is_replaced_by_none_that_its_slot_does_not_name_as_later() -> None:
    store = MemoryStore()
    first = publish(store, "first", newest=True)
    second, _ = reserve(store, "second", newest=True)
    reserve(store, "never published", newest=True)
    assert [reservations.replaced_by(store, token) for token in (first, second)] == [None, None]
    publish(store, "last", newest=True)
    assert reservations.replaced_by(store, second) == "last"
    later = replace(second, fence=second.fence + 10**9)  # the store has lost the record of this one
    for token in (replace(second, newest=False), replace(second, fence=0), later):
        assert reservations.replaced_by(store, token) is None
    store.delete(SLOT)
    assert reservations.replaced_by(store, first) is None


def test_a_record_says_since_when_messages_have_replaced_one_another(any_store: Store) -> None:
    for task_id in ("first", "second", "third"):
        publish(any_store, task_id, newest=True)
        sleep(0.1)
    record = any_store.get(SLOT)
    assert record is not None
    met = WaitingMessage.read(record.holder)
    assert met is not None
    assert 0.3 <= reservations.waited(record, met) < 0.3 + 30


def test_a_publisher_that_has_no_time_left_gets_no_slot(any_store: Store) -> None:
    token, note = Token(SLOT, new_owner()), WaitingMessage("late")
    assert reservations.reserve(any_store, token, note, lambda *_: "", monotonic()) == reservations.LATE
    assert any_store.get(SLOT) is None


def test_what_waits_for_a_store_may_wait_for_something_else_meanwhile() -> None:
    """As for the result backend: as many at once as there are threads, each of which would wait for another."""
    together = threading.Barrier(reservations.THREADS)

    def call() -> str:
        together.wait(10)
        return reservations.within(10, lambda: "answer")

    with ThreadPoolExecutor(reservations.THREADS) as callers:
        futures = [callers.submit(reservations.within, 10, call) for _ in range(reservations.THREADS)]
        assert {future.result() for future in futures} == {"answer"}


def test_a_record_that_says_nothing_of_a_message_stands_for_none(any_store: Store) -> None:
    """As one that another version wrote."""
    other = Token(SLOT, new_owner(), newest=True)
    assert isinstance(any_store.acquire(other.claim(100.0, note="7")), Lease)
    older = Token(SLOT, new_owner(), fence=1, newest=True)
    assert reservations.replaced_by(any_store, older) is None
    found = reserve(any_store, "second")[1]
    assert isinstance(found, Reserved)
    assert found.reason == "unreadable"


@pytest.mark.parametrize(
    "header", [None, "slot", {}, {"slot": SLOT, "owner": "a", "until": "later"}, {"slot": SLOT, "owner": 3}]
)
def test_a_token_that_this_version_cannot_read_is_none(header: object) -> None:
    assert Token.read(header) is None
    whole = Token(SLOT, "a", 3, "done", 60.0, newest=True, throttle=2.0, late=70.0)
    assert Token.read({**whole.header(), "later": "unknown"}) == whole
    assert Token.read({"slot": SLOT, "owner": "a", "until": "start"}) == Token(SLOT, "a", hold=0.0)
    for number in ("3", -1, float("inf"), float("nan"), 2**63, 10**400):
        assert Token.read({**whole.header(), "late": number}) is None


class TestConfirmations:
    """What a process confirms later, in a thread."""

    @pytest.fixture
    def confirmations(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Confirmations]:
        monkeypatch.setattr(reservations, "GATHER", 60.0)  # none before the test closes them
        monkeypatch.setattr(reservations, "BUDGET", 60.0)
        confirmations = Confirmations(Breaker())
        yield confirmations
        confirmations.close()

    def reserved(self, store: Store, slot: str) -> Token:
        token = Token(slot, new_owner())
        found = reservations.reserve(store, token, WaitingMessage("first"), lambda *_: "", monotonic() + 60)
        assert isinstance(found, Reserved)
        return Token(slot, token.owner, found.lease.fence)

    def test_what_is_left_is_confirmed_when_the_process_ends(
        self, any_store: Store, confirmations: Confirmations
    ) -> None:
        tokens = [self.reserved(any_store, f"{SLOT}{number}") for number in range(3)]
        for number, token in enumerate(tokens):
            confirmations.add(any_store, token, 100.0 * number)
        confirmations.close()
        records = [any_store.get(token.slot) for token in tokens]
        assert [round(record.remaining, -2) for record in records if record is not None] == [3600, 3700, 3800]
        assert not any(token.owner in confirmations for token in tokens)

    def test_until_then_only_this_process_skips_a_call_for_it(self, confirmations: Confirmations) -> None:
        store = MemoryStore()
        first = self.reserved(store, SLOT)
        confirmations.add(store, first, 0.0)
        second, note, end = Token(SLOT, new_owner()), WaitingMessage("second"), monotonic() + 60
        found = reservations.reserve(store, second, note, lambda *_: "", end, confirmations)
        assert waiting(found) == "first"
        elsewhere = reservations.reserve(store, second, note, lambda *_: "", end)
        assert isinstance(elsewhere, Reserved)
        assert elsewhere.reason == reservations.IS_UNCONFIRMED

    def test_what_is_added_is_confirmed_soon_each_time(
        self, confirmations: Confirmations, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reservations, "GATHER", 0.001)
        store = MemoryStore()
        for slot in ("one", "two", "three"):
            token = self.reserved(store, slot)
            confirmations.add(store, token, 0.0)
            wait_until(lambda token=token: token.owner not in confirmations, message="the reservation to be confirmed")
            record = store.get(slot)
            assert record is not None
            assert reservations.is_confirmed(record)

    def test_a_message_that_began_meanwhile_is_not_reserved_again(
        self, any_store: Store, confirmations: Confirmations
    ) -> None:
        token = self.reserved(any_store, SLOT)
        confirmations.add(any_store, token, 0.0)
        assert reservations.release(any_store, token, Reason.STARTED)
        confirmations.close()
        record = any_store.get(SLOT)
        assert record is None or record.state is State.RELEASED

    def test_a_store_that_fails_keeps_no_other_from_being_told(
        self, confirmations: Confirmations, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken, store = MemoryStore(), MemoryStore()
        tokens = [self.reserved(each, SLOT) for each in (broken, store)]

        def fail(leases: object) -> object:
            raise StoreUnreachable("gone")

        monkeypatch.setattr(broken, "renew", fail)
        for each, token in zip((broken, store), tokens, strict=True):
            confirmations.add(each, token, 0.0)
        confirmations.close()
        record = store.get(SLOT)
        assert record is not None
        assert reservations.is_confirmed(record)
        assert not any(token.owner in confirmations for token in tokens)

    def test_threads_that_publish_first_at_once_have_all_they_publish_confirmed(
        self, confirmations: Confirmations, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reservations, "GATHER", 0.001)
        store, count = MemoryStore(), 8
        tokens = [[self.reserved(store, f"{SLOT}{one}-{other}") for other in range(50)] for one in range(count)]
        barrier = threading.Barrier(count)

        def publish_each(own: list[Token]) -> None:
            barrier.wait()
            for token in own:
                confirmations.add(store, token, 0.0)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(publish_each, tokens))
        confirmations.close()
        assert all(reservations.is_confirmed(record) for record in store.scan(prefix=SLOT))
