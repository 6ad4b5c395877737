"""Workers whose clocks are wrong, and machines that share none: nothing is taken early, nothing forgotten early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_idempotent.stores import Lease, Reason, Refusal, Release, State, Verdict
from celery_idempotent.stores.dynamodb import DynamoDBStore, records
from celery_idempotent.stores.dynamodb.records import Clock
from celery_idempotent.stores.rules import SECOND
from tests.support.stores.benches import DONE, KEY, age, claim, known, take

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow

Machine = Callable[..., DynamoDBStore]
TEN_MINUTES = 600
wrong = pytest.mark.parametrize("by", [TEN_MINUTES, -TEN_MINUTES], ids=["ahead", "behind"])


@pytest.fixture
def machine(dynamodb_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A function that opens the store as another machine does, which was booted so many seconds later or earlier."""
    stores: list[DynamoDBStore] = []
    monotonic = time.monotonic

    def open_one(name: str, booted: float = 0.0) -> DynamoDBStore:
        store = DynamoDBStore.from_url(dynamodb_url)
        clock = store._records.clock
        clock.machine = name
        shift = [booted]
        monkeypatch.setattr(clock, "ticks", lambda: int((monotonic() + shift[0]) * SECOND))
        monkeypatch.setattr(store, "wait", lambda seconds: shift.__setitem__(0, shift[0] + seconds), raising=False)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def turn_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets this process's wall clock wrong; the server's is another process's."""
    now, now_ns = time.time, time.time_ns

    def turn(by: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + by)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(by * 10**9))

    return turn


class TestWrongWallClocks:
    @wrong
    def test_a_live_lease_is_not_taken(
        self, dynamodb_url: str, machine: Machine, turn_clock: Callable[[float], None], by: float
    ) -> None:
        lease = take(machine("a"), lease_ttl=60, keep_ttl=60)
        turn_clock(by)
        other = machine("b")  # which has never heard the server before
        answer = other.acquire(claim(task_id="b"))
        assert isinstance(answer, Refusal)
        assert (answer.verdict, answer.record.owner) == (Verdict.CONFLICT, lease.owner)
        assert other.get("nothing") is None

    @wrong
    def test_what_is_settled_is_not_forgotten_early_and_not_kept_much_longer(
        self, machine: Machine, turn_clock: Callable[[float], None], by: float
    ) -> None:
        one = machine("a")
        one.settle(take(one), DONE, ttl=300)
        turn_clock(by)
        other = machine("b")
        age(other, KEY, 240)
        assert known(other).state is State.COMPLETED
        age(other, KEY, 65)
        assert other.get(KEY) is None
        assert isinstance(other.acquire(claim()), Lease)

    @wrong
    def test_what_such_a_worker_settles_is_kept_as_long_as_it_should(
        self, machine: Machine, turn_clock: Callable[[float], None], by: float
    ) -> None:
        one, other = machine("a"), machine("b")
        turn_clock(by)
        one.settle(take(one), DONE, ttl=300)
        turn_clock(0)
        assert 240 < known(other).retention <= 301
        assert known(other).age < 60
        assert take(other, "another").fence - known(other).fence < TEN_MINUTES / 2 * SECOND

    @wrong
    def test_a_retry_is_waited_for_as_long_as_it_should(
        self, machine: Machine, turn_clock: Callable[[float], None], by: float
    ) -> None:
        one = machine("a")
        assert one.release(take(one), Release(Reason.RETRY, retry_in=300, next_attempt=1))
        turn_clock(by)
        other = machine("b")
        answer = other.acquire(claim(task_id="b"))
        assert isinstance(answer, Refusal)
        assert 240 < answer.record.remaining <= 301
        age(other, KEY, 302)
        assert isinstance(other.acquire(claim(task_id="b")), Lease)


class TestMachinesThatShareNoClock:
    """The monotonic clock of one machine says nothing about that of another, not even which is ahead."""

    @pytest.mark.parametrize("booted", [-(10**6), 0, 10**6])
    def test_a_machine_watches_a_lease_for_all_of_its_length_before_it_takes_over(
        self, machine: Machine, booted: float
    ) -> None:
        take(machine("a"), lease_ttl=60)
        other = machine("b", booted)
        age(other, KEY, 50)  # of this, the other machine has seen nothing
        for _ in range(2):
            answer = other.acquire(claim(task_id="b"))
            assert isinstance(answer, Refusal)
            assert answer.verdict is Verdict.CONFLICT
            assert 30 < answer.record.remaining <= 60
        other.wait(30)  # type: ignore[attr-defined]
        assert not isinstance(other.acquire(claim(task_id="b")), Lease)
        other.wait(31)  # type: ignore[attr-defined]
        lease = other.acquire(claim(task_id="b"))
        assert isinstance(lease, Lease)
        assert lease.taken_over

    def test_a_machine_that_sees_a_lease_for_the_first_time_does_not_take_it_though_the_record_has_expired(
        self, machine: Machine
    ) -> None:
        """The date by which records are forgotten is the server's; whether a holder lives, it cannot know."""
        holder = machine("a")
        lease = take(holder, lease_ttl=60, keep_ttl=1)
        other = machine("b")
        item = holder._table.read(KEY)
        assert item is not None
        holder._table.call("put_item", Item={**item, "expires": {"N": "1"}})
        assert not isinstance(other.acquire(claim(task_id="b")), Lease)
        assert list(holder.renew([lease])) == []
        assert known(other).retention > 20

    def test_processes_of_one_machine_watch_together(self, machine: Machine) -> None:
        take(machine("a"), lease_ttl=60)
        first, second = machine("b"), machine("b")
        assert not isinstance(first.acquire(claim(task_id="b")), Lease)
        second.wait(61)  # type: ignore[attr-defined]
        assert isinstance(second.acquire(claim(task_id="b")), Lease)

    def test_the_machine_of_the_holder_has_seen_the_lease_begin(self, machine: Machine) -> None:
        take(machine("a"), lease_ttl=60)
        other = machine("a")
        other.wait(61)  # type: ignore[attr-defined]
        assert isinstance(other.acquire(claim(task_id="b")), Lease)

    def test_a_renewal_begins_the_watch_anew(self, machine: Machine) -> None:
        holder, other = machine("a"), machine("b")
        lease = take(holder, lease_ttl=60)
        assert not isinstance(other.acquire(claim(task_id="b")), Lease)
        other.wait(40)  # type: ignore[attr-defined]
        assert list(holder.renew([lease])) == []
        for seconds in (0, 40):
            other.wait(seconds)  # type: ignore[attr-defined]
            assert not isinstance(other.acquire(claim(task_id="b")), Lease)
        other.wait(21)  # type: ignore[attr-defined]
        assert isinstance(other.acquire(claim(task_id="b")), Lease)

    def test_a_watch_that_a_renewal_overtook_does_not_begin_before_the_renewal(self, machine: Machine) -> None:
        """Who read the lease, and then stood still while it was renewed, must not write when it was read."""
        holder, other = machine("a"), machine("b")
        lease = take(holder, lease_ttl=60)
        update = other._table.update

        def stall(key: str, *args: object, **options: object) -> object:
            other._table.update = update  # type: ignore[method-assign]
            assert list(holder.renew([lease])) == []
            other.wait(61)  # type: ignore[attr-defined]
            return update(key, *args, **options)  # type: ignore[arg-type]

        other._table.update = stall  # type: ignore[assignment, method-assign]
        for _ in range(2):
            answer = other.acquire(claim(task_id="b"))
            assert isinstance(answer, Refusal)
            assert 30 < answer.record.remaining <= 60

    def test_a_time_from_after_now_was_not_this_machines(self, machine: Machine) -> None:
        """As of a machine that was copied while it ran: it begins to watch, and does not wait for ever."""
        take(machine("b", 10**6))
        other = machine("b")
        assert not isinstance(other.acquire(claim(task_id="b")), Lease)
        other.wait(61)  # type: ignore[attr-defined]
        assert isinstance(other.acquire(claim(task_id="b")), Lease)


class TestTheClock:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_it_is_never_more_than_a_second_late_and_not_early(self, clock: Clock) -> None:
        for late in (0.0, 0.3, 0.9):
            real = 1_700_000_000 + late
            clock._ahead = None
            clock.receive(dated(real), time.monotonic())
            assert -1.1 < clock.now() / SECOND - real < 0.2

    def test_it_gets_better_and_does_not_jump(self, clock: Clock) -> None:
        began, real = time.monotonic(), 1_700_000_000.0
        told = []
        for late in (0.1, 0.95, 0.5, 0.2):  # of each second, the date shows none of this
            clock.receive(dated(real + late), began + late)
            told.append(clock._ahead)
        assert told == sorted(told)  # type: ignore[type-var]

    def test_it_follows_a_server_whose_clock_was_put_right(self, clock: Clock) -> None:
        for real in (1_700_000_000.0, 1_700_000_500.0, 1_699_999_000.0):
            clock.receive(dated(real), time.monotonic())
            assert clock.now() / SECOND == pytest.approx(real, abs=1.5)

    @pytest.mark.parametrize("date", [None, "", "yesterday"])
    def test_where_a_reply_has_no_date_this_machines_clock_is_believed(self, clock: Clock, date: str | None) -> None:
        clock.receive(date, time.monotonic())
        assert clock.now() / SECOND == pytest.approx(time.time(), abs=2)

    def test_two_processes_of_one_boot_have_one_clock(self, clock: Clock) -> None:
        assert clock.machine == Clock().machine

    def test_a_machine_that_has_no_boot_id_shares_its_clock_with_nobody(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(records, "_BOOT_ID", tmp_path / "none")
        assert Clock().machine != Clock().machine

    def test_processes_of_aws_lambda_share_no_clock_whatever_their_machines_are_called(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "charge")
        assert Clock().machine != Clock().machine

    def test_containers_another_boot_and_another_time_namespace_are_other_clocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        boot, space = tmp_path / "boot_id", tmp_path / "time"
        monkeypatch.setattr(records, "_BOOT_ID", boot)
        monkeypatch.setattr(records, "_TIME_NAMESPACE", space)
        boot.write_text("one\n")
        seen = {Clock().machine}
        space.symlink_to("time:[1]")
        seen.add(Clock().machine)
        boot.write_text("two\n")
        seen.add(Clock().machine)
        monkeypatch.setattr("platform.node", lambda: "another")
        seen.add(Clock().machine)
        assert len(seen) == 4


def dated(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(int(seconds)))
