"""Facts: how long a record is kept, its history, and one store used from threads and after a fork."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import pytest

from ..stores.base import Store
from ..stores.history import text_of_operator
from ..stores.maintenance import Trace, erase, erase_leftovers
from ..stores.records import HISTORY_LIMIT, HistoryEntry, Lease, Outcome, Reason, Release, State, Verdict
from ..stores.rules import MOST_DISPATCHED
from ._facts import (
    DONE,
    KEEP,
    KEY,
    LEASE,
    OUTCOMES,
    RESULT,
    Ages,
    claim,
    copy,
    free,
    known,
    refused,
    retry,
    take,
    verdict,
)


class KeepingFacts(Ages):
    """Promise 5, and the verbs for operators."""

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_what_was_settled_is_kept_for_its_ttl_and_not_longer(self, store: Store, outcome: Outcome) -> None:
        store.settle(take(store), outcome, ttl=RESULT)
        self.age(store, KEY, RESULT - 10)
        record = known(store)
        assert record.payload == outcome.payload
        assert RESULT - 20 < record.age < RESULT
        assert verdict(store) == outcome.state.value
        self.age(store, KEY, 11)
        assert store.get(KEY) is None
        assert not take(store).taken_over

    def test_a_record_is_kept_longer_than_its_lease_lasted(self, store: Store) -> None:
        """One ttl for lease and retention would forget a result as fast as it replaces a dead holder."""
        store.settle(take(store, lease_ttl=1, keep_ttl=1), DONE, ttl=RESULT)
        self.age(store, KEY, RESULT - 10)
        assert verdict(store) is not None

    def test_a_lease_that_ran_out_is_remembered(self, store: Store) -> None:
        """A broker may redeliver an hour later, and the crash must still be known."""
        take(store)
        self.age(store, KEY, LEASE + KEEP - 10)
        lease = take(store, redelivered=True)
        assert (lease.taken_over, lease.crashes) == (True, 1)

    def test_a_lease_that_ran_out_is_not_remembered_for_ever(self, store: Store) -> None:
        take(store)
        self.age(store, KEY, LEASE + KEEP + 1)
        assert store.get(KEY) is None
        lease = take(store, redelivered=True)
        assert (lease.taken_over, lease.crashes) == (False, 0)

    @pytest.mark.parametrize("end", ["lapsed", "handed over", "released"])
    def test_a_lease_over_an_older_record_is_remembered_for_its_full_time(self, store: Store, end: str) -> None:
        before = take(store)
        if end == "released":
            free(store, before, Reason.FAILED)
        self.age(store, KEY, KEEP - 10 if end == "released" else LEASE + KEEP - 10)
        lease = take(store, retries=1, sender=before.owner if end == "handed over" else "")
        self.age(store, KEY, LEASE + KEEP - 10)
        assert known(store).owner == lease.owner
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    def test_what_was_released_is_remembered_and_not_for_ever(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        self.age(store, KEY, KEEP - 10)
        assert known(store).crashes == 1
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    def test_what_waits_for_a_retry_is_remembered_until_long_after_it(self, store: Store) -> None:
        retry(store, take(store), 2 * KEEP)
        self.age(store, KEY, 3 * KEEP - 10)
        assert known(store).state is State.RELEASED
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    def test_of_a_settled_operation_that_was_forgotten_no_verb_knows(self, store: Store) -> None:
        """Its row may be there until it is purged."""
        for key in ("announced", "deleted", KEY):
            store.settle(take(store, key, fingerprint="f"), DONE, ttl=RESULT)
            self.age(store, key, RESULT + 1)
        assert not store.mark_dispatched("announced", "a")
        assert not store.delete("deleted")
        take(store, task_id="b", fingerprint="g")
        assert known(store).fingerprint == "g"

    def test_of_a_lease_that_was_forgotten_no_verb_knows(self, store: Store) -> None:
        leases = {key: take(store, key, retries=1, revive=key != "lost") for key in ("deleted", "lost", KEY)}
        for key in leases:
            verdict(store, key, task_id="b", **copy(2, "x"))
            self.age(store, key, LEASE + KEEP + 1)
        assert not store.delete("deleted")
        assert store.renew([leases["lost"]]) == [leases["lost"]]
        take(store, redelivered=True)
        assert verdict(store, task_id="b", **copy(1, "y")) is Verdict.CONFLICT

    def test_to_release_what_was_forgotten_frees_the_key_and_leaves_nothing(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE + KEEP + 1)
        assert store.release(lease, Release(Reason.RETRY, retry_in=300, next_attempt=1))
        assert store.get(KEY) is None
        assert not take(store, task_id="b", redelivered=True).taken_over

    def test_a_refusal_keeps_no_record_longer(self, store: Store) -> None:
        take(store)
        self.age(store, KEY, LEASE - 10)
        assert verdict(store, task_id="b", **copy(1, "x")) is not None
        self.age(store, KEY, KEEP + 11)
        assert store.get(KEY) is None

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_the_callbacks_of_a_task_are_announced_once(self, store: Store, outcome: Outcome) -> None:
        store.settle(take(store), outcome, ttl=RESULT)
        assert known(store).dispatched == frozenset()
        for task_id in ("a", "b b", "a"):
            assert store.mark_dispatched(KEY, task_id)
        record = known(store)
        assert record.dispatched == {"a", "b b"}
        assert (record.payload, verdict(store)) == (outcome.payload, outcome.state.value)
        self.age(store, KEY, RESULT + 1)
        assert store.get(KEY) is None

    def test_a_duplicate_gets_its_own_callbacks_alone(self, store: Store) -> None:
        """The answer to a claim must not grow with the number of duplicates that its key has had."""
        store.settle(take(store), DONE, ttl=RESULT)
        for task_id in ("a", "b b", "c"):
            assert store.mark_dispatched(KEY, task_id)
        for task_id, callbacks in {"a": {"a"}, "b b": {"b b"}, "b": set(), "": set()}.items():
            assert refused(store, task_id=task_id)[1].dispatched == callbacks
        # Where the key is the task id, a claim has no task id, and the message has one all the same.
        assert refused(store, task_id="", message_id="c")[1].dispatched == {"c"}

    def test_of_many_that_announced_the_first_and_the_newest_are_remembered(self, store: Store) -> None:
        store.settle(take(store), DONE, ttl=RESULT)
        names = [f"{9999 - number:036d}" for number in range(MOST_DISPATCHED + 20)]  # not in the order of the alphabet
        for name in names:
            assert store.mark_dispatched(KEY, name)
        assert store.mark_dispatched(KEY, names[-5])  # again, for want of a reply
        kept = {names[0], *names[1 - MOST_DISPATCHED :]}
        assert known(store).dispatched == kept
        remembered = {name for name in names[:40] + names[-40:] if refused(store, task_id=name)[1].dispatched}
        assert remembered == kept & {*names[:40], *names[-40:]}
        assert refused(store, task_id="new")[1].payload == DONE.payload

    def test_only_what_is_settled_is_announced(self, store: Store) -> None:
        assert not store.mark_dispatched(KEY, "a")
        assert store.get(KEY) is None
        lease = take(store)
        assert not store.mark_dispatched(KEY, "a")
        free(store, lease, Reason.FAILED)
        assert not store.mark_dispatched(KEY, "a")
        assert known(store).dispatched == frozenset()

    def test_a_record_has_its_retention_where_the_store_knows_it(self, store: Store) -> None:
        lease = take(store)
        kept = [(known(store).retention, LEASE + KEEP)]
        free(store, lease, Reason.FAILED)
        kept.append((known(store).retention, KEEP))
        store.settle(take(store), DONE, ttl=RESULT)
        kept += [(record.retention, RESULT) for record in (known(store), refused(store)[1], *store.scan())]
        self.age(store, KEY, RESULT - 100)
        kept.append((known(store).retention, 100))
        for left, expected in kept:
            assert left == 0 or expected - 30 < left <= expected + 1

    def test_a_record_may_be_kept_for_years(self, store: Store) -> None:
        years = 10 * 365 * 86400
        store.settle(take(store, lease_ttl=0.5, keep_ttl=years), DONE, ttl=years)
        self.age(store, KEY, years - 100)
        assert known(store).payload == DONE.payload
        self.age(store, KEY, 101)
        assert store.get(KEY) is None

    def test_to_look_at_a_record_keeps_it_no_longer(self, store: Store) -> None:
        store.settle(take(store), DONE, ttl=RESULT)
        self.age(store, KEY, RESULT - 10)
        assert known(store) is not None
        assert len(list(store.scan())) == 1
        store.mark_dispatched(KEY, "a")
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    def test_a_key_that_was_never_claimed_has_no_record(self, store: Store) -> None:
        assert store.get(KEY) is None

    def test_a_deleted_key_starts_again(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        assert store.delete(KEY)
        assert not store.delete(KEY)
        assert store.get(KEY) is None
        lease = take(store, redelivered=True)
        assert (lease.taken_over, lease.crashes) == (False, 0)

    def test_the_records_are_found_by_prefix_and_state(self, store: Store) -> None:
        leases = {key: take(store, key) for key in ("a:1", "a:2", "a:3", "b:1")}
        store.settle(leases["a:2"], DONE, ttl=RESULT)
        store.settle(leases["b:1"], DONE, ttl=RESULT)
        free(store, leases["a:3"], Reason.FAILED)

        def keys(prefix: str, state: State | None = None) -> list[str]:
            return sorted({record.key for record in store.scan(prefix=prefix, state=state)})

        assert keys("a:") == ["a:1", "a:2", "a:3"]
        assert keys("") == ["a:1", "a:2", "a:3", "b:1"]
        assert keys("", State.COMPLETED) == ["a:2", "b:1"]
        assert keys("a:", State.RELEASED) == ["a:3"]
        assert keys("a:", State.FAILED) == []
        assert {record.fence for record in store.scan(prefix="a:2")} == {leases["a:2"].fence}

    @pytest.mark.parametrize("prefix", ["*", "?", "[a]", "\\", "%", "_", "a^b", "{"])
    def test_a_prefix_means_its_letters(self, store: Store, prefix: str) -> None:
        take(store, "a-stranger")
        take(store, "xyz")
        take(store, f"{prefix}1")
        assert [record.key for record in store.scan(prefix=prefix)] == [f"{prefix}1"]

    def test_more_records_are_found_than_fit_one_answer(self, store: Store) -> None:
        expected = {f"many:{number}" for number in range(self.many + 100)}
        for key in expected:
            take(store, key)
        assert {record.key for record in store.scan(prefix="many:")} == expected

    def test_a_record_that_is_found_is_the_one_that_is_looked_up(self, store: Store) -> None:
        store.settle(take(store, "a:1", fingerprint="f"), DONE, ttl=RESULT)
        store.mark_dispatched("a:1", "b b")
        retry(store, take(store, "a:2"))
        take(store, "a:3", holder="host:1", task_id="☃ b")
        for found in store.scan(prefix="a:"):
            assert replace(found, age=0, remaining=0) == replace(known(store, found.key), age=0, remaining=0)

    def test_who_looks_for_records_may_stop_looking(self, store: Store) -> None:
        """As often as a store has connections, and more."""
        for number in range(3):
            take(store, f"{KEY}-{number}")
        for _ in range(50):
            looking = iter(store.scan())
            next(looking)
            del looking
        assert len(list(store.scan())) == 3

    def test_what_was_forgotten_is_not_found(self, store: Store) -> None:
        take(store)
        self.age(store, KEY, LEASE + KEEP + 1)
        assert list(store.scan()) == []

    def test_purging_removes_what_has_expired_and_nothing_else(self, store: Store) -> None:
        store.settle(take(store, "old"), DONE, ttl=RESULT)
        self.age(store, "old", RESULT + 1)
        take(store, "new")
        assert store.purge() in (0, 1)
        assert store.purge() == 0
        assert [record.key for record in store.scan()] == ["new"]

    def test_purging_may_be_limited(self, store: Store) -> None:
        for number in range(5):
            take(store, f"old-{number}")
            self.age(store, f"old-{number}", LEASE + KEEP + 1)
        take(store, "new")
        assert 0 <= store.purge(2) <= 2
        assert store.purge(0) == 0
        assert store.purge() <= 5
        assert store.purge() == 0
        assert [record.key for record in store.scan()] == ["new"]

    def test_a_schema_that_was_applied_is_complete_and_may_be_applied_again(self, store: Store) -> None:
        lease = take(store)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: store.apply_schema(), range(4)))
        assert store.pending_schema() == ""
        assert known(store).owner == lease.owner


def note(*texts: str, key: str = KEY, ago: float = 0.0, keep: float = KEEP) -> list[HistoryEntry]:
    """Return notes of a key."""
    return [HistoryEntry(key, text, ago, keep) for text in texts]


def history_of(store: Store, key: str = KEY) -> list[str]:
    """Return what was noted of a key."""
    return [noted.text for noted in store.history(key)]


class NotingFacts(Ages):
    """A history is for people: no promise hangs on it, and it touches no record."""

    @pytest.fixture
    def keeping(self, store: Store) -> Store:
        """The store, if it keeps what is noted; else the facts about that have nothing to show."""
        if not store.keeps_history:
            pytest.skip("this store keeps no history")
        return store

    def test_a_store_that_keeps_no_history_takes_notes_and_returns_none(self, store: Store) -> None:
        store.append_history(note("begun"))
        assert bool(history_of(store)) is store.keeps_history

    def test_what_was_noted_comes_back_in_its_order(self, keeping: Store) -> None:
        keeping.append_history([])
        assert history_of(keeping) == []
        keeping.append_history(note("one", "two"))
        keeping.append_history(note("three"))
        assert history_of(keeping) == ["one", "two", "three"]

    def test_what_is_noted_late_stands_where_it_happened(self, keeping: Store) -> None:
        """Two processes write down what they saw each in its own time."""
        keeping.append_history(note("taken over", ago=10))
        keeping.append_history(note("its child died", ago=20))
        assert history_of(keeping) == ["its child died", "taken over"]

    def test_the_age_of_a_note_is_by_the_clock_of_the_store(self, keeping: Store) -> None:
        keeping.append_history([*note("old", ago=100), *note("new", ago=0.5)])
        old, new = keeping.history(KEY)
        assert 100 <= old.age < 130
        assert 0.4 <= new.age < 30
        assert 99 < old.age - new.age < 100

    def test_each_key_has_a_history_of_its_own(self, keeping: Store) -> None:
        other = f"{KEY}-2"
        keeping.append_history([*note("one"), *note("other", key=other), *note("two")])
        assert (history_of(keeping), history_of(keeping, other)) == (["one", "two"], ["other"])
        assert history_of(keeping, KEY[:-1]) == []

    def test_the_newest_notes_of_a_key_are_kept(self, keeping: Store) -> None:
        for start in range(0, 120, 40):
            keeping.append_history(note(*(str(number) for number in range(start, start + 40))))
        assert history_of(keeping) == [str(number) for number in range(120 - HISTORY_LIMIT, 120)]
        keeping.append_history(note(*(str(number) for number in range(120, 320))))
        assert history_of(keeping) == [str(number) for number in range(320 - HISTORY_LIMIT, 320)]

    @pytest.mark.parametrize(
        "text", ["", " ", "a\nb", "☃ 🎉", '{"a":"\\u0000"}', "\\0 \\", "'; --", "1 2 3", "x" * 5000]
    )
    def test_any_text_may_be_noted(self, keeping: Store, text: str) -> None:
        keeping.append_history(note(text, "next"))
        assert history_of(keeping) == [text, "next"]

    @pytest.mark.parametrize("key", ["☃ b", "a\nb", "%", "{a}", "a\\b"])
    def test_the_key_may_be_any_text(self, keeping: Store, key: str) -> None:
        keeping.append_history(note("one", key=key))
        assert history_of(keeping, key) == ["one"]

    def test_what_was_noted_is_kept_for_its_time_and_not_longer(self, keeping: Store) -> None:
        keeping.append_history(note("over", ago=100, keep=90))
        assert history_of(keeping) == []
        keeping.append_history(note("kept", ago=100, keep=200))
        keeping.append_history(note("late", ago=100, keep=90))
        assert history_of(keeping) == ["kept"]

    def test_a_history_outlives_its_record_and_needs_none(self, keeping: Store) -> None:
        keeping.settle(take(keeping), DONE, ttl=RESULT)
        keeping.append_history(note("replayed", keep=10 * RESULT))
        self.age(keeping, KEY, RESULT + 1)
        keeping.purge()
        assert keeping.get(KEY) is None
        assert history_of(keeping) == ["replayed"]

    def test_a_history_changes_no_record(self, keeping: Store) -> None:
        lease = take(keeping)
        keeping.append_history(note("begun"))
        assert known(keeping).owner == lease.owner
        keeping.settle(lease, DONE, ttl=RESULT)
        keeping.append_history(note("replayed"))
        assert known(keeping).payload == DONE.payload

    def test_a_history_is_not_taken_for_a_record(self, keeping: Store) -> None:
        keeping.append_history(note("one"))
        assert keeping.get(KEY) is None
        assert list(keeping.scan()) == []
        take(keeping)
        assert [record.key for record in keeping.scan(prefix=KEY)] == [KEY]
        assert keeping.purge() == 0

    def test_a_key_that_is_forgotten_has_no_history_any_more(self, keeping: Store) -> None:
        take(keeping)
        keeping.append_history([*note("one"), *note("other", key="other")])
        assert keeping.delete(KEY)
        assert (history_of(keeping), history_of(keeping, "other")) == ([], ["other"])
        assert not keeping.delete("other")
        assert history_of(keeping, "other") == []

    def test_what_operators_did_outlives_the_record_that_they_deleted(self, keeping: Store) -> None:
        """An operator who wonders why an operation ran again must see that it was forgotten."""
        keeping.settle(take(keeping), DONE, ttl=RESULT)
        released, forgotten = (
            text_of_operator(event, "ada@desk-7") for event in ("ReleasedByOperator", "ForgottenByOperator")
        )
        keeping.append_history([*note("taken over", ago=20), *note(released, ago=10)])
        assert erase(keeping, KEY, Trace(note(forgotten)[0], failed=repr))
        erase_leftovers(keeping, KEY, KEEP)  # as another operator does who forgets it once more
        assert (keeping.get(KEY), history_of(keeping)) == (None, [released, forgotten])
        take(keeping)
        assert history_of(keeping) == [released, forgotten]


CHILD_SECONDS = 30


class SharingFacts(Ages):
    """Promise 7."""

    def test_threads_share_a_store(self, store: Store) -> None:
        def work(number: int) -> bytes:
            payloads = b""
            for turn in range(10):
                key = f"{KEY}-{number}-{turn}"
                lease = take(store, key)
                assert store.renew([lease]) == []
                store.settle(lease, Outcome(State.COMPLETED, key.encode()), ttl=RESULT)
                _, record = refused(store, key)
                assert record.payload == key.encode()
                payloads += known(store, key).payload
            return payloads

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(work, range(8)))
        assert answers == [b"".join(f"{KEY}-{number}-{turn}".encode() for turn in range(10)) for number in range(8)]

    def test_threads_come_and_go(self, store: Store) -> None:
        """More than a store has connections; each gives back what it had."""
        for number in range(40):
            with ThreadPoolExecutor(1) as thread:
                assert isinstance(thread.submit(store.acquire, claim(f"{KEY}-{number}")).result(), Lease)
        assert known(store, f"{KEY}-39").task_id == "a"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    def test_a_store_is_used_on_both_sides_of_a_fork(self, store: Store) -> None:
        """What the parent opened must not be written to by the child: their bytes would mix."""
        lease = take(store)
        with self._forked(lambda: self._fifty_leases(store)) as pipe:
            for _ in range(50):
                assert store.renew([lease]) == []
                assert known(store).owner == lease.owner
            assert pipe.read() == b"50 leases"
        store.settle(lease, DONE, ttl=RESULT)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    def test_a_child_that_closes_its_store_leaves_its_parents_open(self, store: Store) -> None:
        lease = take(store)

        def close() -> bytes:
            store.close()
            owner = known(store).owner.encode()
            store.close()
            return owner

        with self._forked(close) as pipe:
            assert pipe.read() == lease.owner.encode()
        assert store.renew([lease]) == []
        store.settle(lease, DONE, ttl=RESULT)
        assert known(store).payload == DONE.payload

    def _fifty_leases(self, store: Store) -> bytes:
        answers = [store.acquire(claim(f"{KEY}-{number}")) for number in range(50)]
        return b"%d leases" % sum(isinstance(answer, Lease) for answer in answers)

    @contextmanager
    def _forked(self, work: Callable[[], bytes]) -> Iterator[BinaryIO]:
        """Do the work in a child, and let what it returns be read."""
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
            child = os.fork()
        if child == 0:
            self._in_child(work, writing)
        os.close(writing)
        try:
            with open(reading, "rb") as pipe:
                yield pipe
        finally:
            os.waitpid(child, 0)

    def _in_child(self, work: Callable[[], bytes], writing: int) -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)  # a child that hangs is a fact too
            os.write(writing, work())
        except BaseException as error:  # noqa: BLE001 - it must not reach pytest, of which this is a copy
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)

    def test_a_closed_store_opens_again_when_it_is_used(self, store: Store) -> None:
        lease = take(store)
        store.close()
        assert known(store).owner == lease.owner
        store.close()
        store.close()
        store.settle(lease, DONE, ttl=RESULT)

    def test_a_store_that_can_serve_answers_a_ping(self, store: Store) -> None:
        store.ping()
