"""Who is lent which connection, and when one more is opened."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import ref

import pytest

from celery_idempotent.stores import pool as module
from celery_idempotent.stores.pool import GONE, HOPELESS, LATE, LONGEST, PATIENCE, STANDSTILLS, Pool, _Turn
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick
#: Looks of those that wait, after which all have seen what there is to see.
LOOKS = 4


class Clock:
    """The pool's clock, which also counts how often it is looked at: a call that waits does at each look."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self.ended = threading.Event()

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def pass_by(self, seconds: float, waiting: int) -> None:
        """Let time pass, and those that wait notice it, in steps that none of them takes for a standstill."""
        end = self.now + seconds
        while True:
            self.now = min(end, self.now + LATE / 2)
            seen = self.looks
            wait_until(lambda: self.looks > seen + LOOKS * waiting)  # noqa: B023 - it is called at once
            if self.now == end:
                break

    def run(self) -> None:
        """Let time pass until the test ends."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.ended.wait(0.01):
            self.now += LATE / 4


class Connection:
    """What is lent."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(module, "monotonic", found)
    monkeypatch.setattr(module, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(module, "LOOK_BEHIND", 0.001)
    yield found
    found.ended.set()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as found:
        yield found
        monkeypatch.setattr(module, "PATIENCE", -1.0)
        monkeypatch.setattr(module, "LONGEST", -1.0)  # those that still wait end, where a test has failed


def done(futures: list[Future[Connection]]) -> list[Connection]:
    return [each.result() for each in futures if each.done()]


def test_what_was_given_back_is_lent_before_another_is_opened() -> None:
    pool = Pool(Connection, 8)
    first = pool.take()
    pool.give_back(first)
    assert pool.take() is first
    assert pool.take() is not first


def test_those_that_wait_are_served_in_the_order_in_which_they_came(clock: Clock, calls: ThreadPoolExecutor) -> None:
    """Else threads that take what they have just given back keep a heartbeat from its lease."""
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = []
    for number in range(5):
        waiting.append(calls.submit(pool.take))
        wait_until(lambda: len(pool.line) == number + 1)  # noqa: B023 - it is called at once
    for each in waiting:
        pool.give_back(lent)
        assert each.result(15) is lent
        assert len(done(waiting)) == waiting.index(each) + 1


def test_an_urgent_call_comes_before_those_that_wait(clock: Clock, calls: ThreadPoolExecutor) -> None:
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    urgent = calls.submit(pool.take, urgent=True)
    wait_until(lambda: len(pool.line) == 2)
    pool.give_back(lent)
    assert urgent.result(15) is lent
    assert not waiting.done()
    pool.give_back(lent)
    assert waiting.result(15) is lent


def test_a_call_that_waits_is_told_when_its_turn_comes(
    calls: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not look for it: of a hundred greenlets that did, each look would be work."""
    monkeypatch.setattr(module, "LOOK_EVERY", 3600.0)
    monkeypatch.setattr(module, "LOOK_BEHIND", 3600.0)
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = []
    for number in range(3):
        waiting.append(calls.submit(pool.take))
        wait_until(lambda: len(pool.line) == number + 1)  # noqa: B023 - it is called at once
    for each in waiting:
        pool.give_back(lent)
        assert each.result(15) is lent


class Making:
    """Opens connections while its gate is open; it may also fail."""

    def __init__(self) -> None:
        self.begun = 0
        self.gate = threading.Event()
        self.fails: Callable[[], bool] = lambda: False

    def __call__(self) -> Connection:
        self.begun += 1
        assert self.gate.wait(15)
        if self.fails():
            raise ConnectionError
        return Connection()


def test_one_is_opened_at_a_time_and_those_that_wait_take_what_comes_back(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    making = Making()
    making.gate.set()
    pool = Pool(making, 8)
    lent = pool.take()
    making.gate.clear()
    waiting = [calls.submit(pool.take) for _ in range(5)]
    wait_until(lambda: making.begun == 2)
    clock.pass_by(PATIENCE / 2, waiting=4)
    assert making.begun == 2
    pool.give_back(lent)
    wait_until(lambda: len(done(waiting)) == 1)
    assert done(waiting) == [lent]
    making.gate.set()
    assert len({id(each.result(15)) for each in waiting}) == 5


def test_an_opening_that_hangs_keeps_nobody_who_has_waited_but_no_more_are_opened_than_may_be(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    making = Making()
    pool = Pool(making, 3)
    waiting = [calls.submit(pool.take) for _ in range(12)]
    wait_until(lambda: len(pool.line) == 11)
    assert making.begun == 1
    clock.pass_by(PATIENCE, waiting=6)
    wait_until(lambda: making.begun == 6)
    clock.pass_by(0.8 * (LONGEST - PATIENCE), waiting=6)
    assert making.begun == 6
    clock.run()
    wait_until(lambda: making.begun == 12)
    making.gate.set()
    assert len({id(each.result(15)) for each in waiting}) == 12


def test_a_limit_is_kept_until_nothing_was_served_for_long(clock: Clock, calls: ThreadPoolExecutor) -> None:
    """redis-py's pool gives out no more: a renewal that asked it would hang there, blind to what is given back."""
    pool = Pool(Connection, 2, limit=2)
    lent = [pool.take(), pool.take()]
    waiting = calls.submit(pool.take, urgent=True)
    wait_until(lambda: len(pool.line) == 1)
    clock.pass_by(0.9 * LONGEST, waiting=1)
    assert not waiting.done()
    pool.give_back(lent[0])
    assert waiting.result(15) is lent[0]
    last = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    clock.pass_by(0.9 * LONGEST, waiting=1)
    assert not last.done()
    clock.run()
    assert last.result(15) not in lent


def test_time_in_which_the_process_stood_still_is_nobodys_waiting(clock: Clock, calls: ThreadPoolExecutor) -> None:
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = [calls.submit(pool.take) for _ in range(3)]
    wait_until(lambda: len(pool.line) == 3)
    for _ in range(3):
        clock.pass_by(PATIENCE / 4, waiting=3)
        clock.now += 2 * LONGEST
        clock.pass_by(PATIENCE / 20, waiting=3)
    assert not done(waiting)
    for each in waiting:
        pool.give_back(lent)
        wait_until(lambda: len(done(waiting)) > waiting.index(each))  # noqa: B023 - it is called at once
    assert len(pool.made) == 1


def test_a_process_that_always_stands_still_does_not_wait_for_ever(clock: Clock, calls: ThreadPoolExecutor) -> None:
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    steps = 0
    while not waiting.done():
        clock.now += 1.5 * LATE
        steps += 1
        seen = clock.looks
        wait_until(lambda: clock.looks > seen + LOOKS or waiting.done())  # noqa: B023 - it is called at once
    assert waiting.result() is not lent
    assert steps * 1.5 * LATE < PATIENCE + 1.5 * LATE * (STANDSTILLS + 1)


class Unanswered(Exception):
    """The server is away."""


def test_what_others_failed_with_ends_the_waiting_of_those_that_hope_in_vain(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    """Else of a thousand that wait for a server that hangs, the last learns it after minutes."""
    pool = Pool(Connection, 2, unanswered=(Unanswered,))
    lent = [pool.take(), pool.take()]
    waiting = [calls.submit(pool.take) for _ in range(6)]
    wait_until(lambda: len(pool.line) == 6)
    for number, each in enumerate(lent):
        pool.give_back(each, Unanswered("the first" if number == 0 else "another"))
        wait_until(lambda: len(done(waiting)) == number + 1)  # noqa: B023 - it is called at once
    clock.pass_by(HOPELESS * 0.9, waiting=4)
    assert len(pool.line) == 4
    clock.pass_by(HOPELESS * 0.05, waiting=4)
    late = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 5)
    clock.pass_by(HOPELESS * 0.1, waiting=1)
    wait_until(lambda: len(pool.line) == 1)
    errors = [str(each.exception()) for each in waiting if each.done() and each.exception()]
    assert errors == ["the first"] * 4
    pool.give_back(lent[0])
    assert late.result(15) is lent[0]


def test_nobody_gives_up_before_all_connections_were_tried(clock: Clock, calls: ThreadPoolExecutor) -> None:
    """Where calls take longer than a second, one that failed tells nothing of the others."""
    pool = Pool(Connection, 2, unanswered=(Unanswered,))
    lent = [pool.take(), pool.take()]
    waiting = [calls.submit(pool.take) for _ in range(3)]
    wait_until(lambda: len(pool.line) == 3)
    pool.give_back(lent[0], Unanswered())
    wait_until(lambda: len(done(waiting)) == 1)
    clock.pass_by(HOPELESS * 1.5, waiting=2)
    for number in range(2):
        pool.give_back(lent[number])
        wait_until(lambda: len(done(waiting)) == number + 2)  # noqa: B023 - it is called at once
    assert [each.exception() for each in waiting] == [None] * 3


def test_a_failure_is_its_own_calls_alone_while_others_are_served(clock: Clock, calls: ThreadPoolExecutor) -> None:
    pool = Pool(Connection, 2, unanswered=(Unanswered,))
    lent = [pool.take(), pool.take()]
    waiting = [calls.submit(pool.take) for _ in range(3)]
    wait_until(lambda: len(pool.line) == 3)
    clock.pass_by(HOPELESS * 1.1, waiting=3)
    pool.give_back(lent[0])
    wait_until(lambda: len(done(waiting)) == 1)
    pool.give_back(lent[1], Unanswered())
    wait_until(lambda: len(done(waiting)) == 2)
    clock.pass_by(HOPELESS / 2, waiting=1)
    pool.give_back(lent[0])
    assert [each.exception(15) for each in waiting] == [None] * 3


@pytest.mark.parametrize("opening", [True, False])
def test_what_interrupts_one_call_is_no_failure_of_the_server(
    clock: Clock, calls: ThreadPoolExecutor, opening: bool
) -> None:
    """As a soft time limit, which must not come out of a renewal."""

    class SoftTimeLimit(Exception):
        pass

    def interrupted() -> Connection:
        assert gate.wait(15)
        raise SoftTimeLimit

    gate = threading.Event()
    pool: Pool[Connection] = Pool(Connection, 1, unanswered=(Unanswered,))
    if opening:
        pool._make = interrupted
        first = calls.submit(pool.take)
        wait_until(lambda: len(pool._making) == 1)
    else:
        lent = pool.take()
    waiting = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    clock.pass_by(HOPELESS * 1.1, waiting=1)
    if opening:
        pool._make = Connection
        gate.set()
        assert isinstance(first.exception(15), SoftTimeLimit)
    else:
        pool.give_back(lent, SoftTimeLimit())
    assert isinstance(waiting.result(15), Connection)


def test_an_error_that_is_kept_keeps_nothing_of_its_call_alive() -> None:
    class Local:
        pass

    def fail() -> None:
        held = Local()
        locals_.append(ref(held))
        raise Unanswered

    locals_: list[ref[Local]] = []
    pool = Pool(Connection, 1, unanswered=(Unanswered,))
    lent = pool.take()
    try:
        fail()
    except Unanswered as error:
        pool.give_back(lent, error)
    assert locals_[0]() is None


def test_a_signal_handler_may_call_while_the_same_thread_is_about_to_open_one(
    calls: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there was a lock, the thread waited for itself for ever, and all others behind it."""
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    pool = Pool(Connection, 8)
    within: list[Connection] = []

    class Handled(Pool[Connection]):
        def _is_allowed(self, turn: _Turn, marks: list[ref[_Turn]]) -> bool:
            if not within:
                within.append(Connection())
                within[0] = self.take()
            return super()._is_allowed(turn, marks)

    pool = Handled(Connection, 8)
    outer = calls.submit(pool.take)
    assert isinstance(outer.result(15), Connection)
    assert outer.result() is not within[0]
    assert isinstance(calls.submit(pool.take).result(15), Connection)


def test_one_that_cannot_be_opened_is_an_error_of_its_call_and_the_next_may_try(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    making = Making()
    pool = Pool(making, 1)
    making.fails = lambda: making.begun == 1
    first = calls.submit(pool.take)
    wait_until(lambda: making.begun == 1)
    second = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    making.gate.set()
    assert isinstance(first.exception(15), ConnectionError)
    assert isinstance(second.result(15), Connection)


def test_while_calls_are_served_none_opens_more_however_long_the_line_is(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    """On a busy machine a hundred greenlets that settle together take seconds, and had opened one each."""
    pool = Pool(Connection, 1)
    lent = pool.take()
    waiting = [calls.submit(pool.take) for _ in range(8)]
    wait_until(lambda: len(pool.line) == 8)
    for number in range(4):
        clock.pass_by(PATIENCE * 0.9, waiting=7 - number)
        pool.give_back(lent)
        wait_until(lambda: len(done(waiting)) == number + 1)  # noqa: B023 - it is called at once
    assert set(done(waiting)) == {lent}
    clock.pass_by(0.5 * PATIENCE, waiting=4)
    pool.give_back(lent)
    wait_until(lambda: len(done(waiting)) == 5)
    assert len(pool.made) == 1  # after more than LONGEST
    clock.pass_by(1.1 * PATIENCE, waiting=1)  # nobody is served
    wait_until(lambda: len(done(waiting)) == 6)
    assert len(pool.made) == 2
    clock.run()
    assert {each.result(15) for each in waiting} == set(pool.made)
    assert len(pool.made) == 4


def test_an_interruption_while_one_is_opened_leaves_its_place_to_another() -> None:
    pool = Pool(Connection, 1)

    def interrupted() -> None:
        turn = _Turn(0.0)
        assert pool._may_make(turn)

    interrupted()
    gc.collect()
    assert isinstance(pool.take(), Connection)


def test_a_call_that_an_interruption_left_in_the_line_stands_in_nobodys_way(
    clock: Clock, calls: ThreadPoolExecutor
) -> None:
    pool = Pool(Connection, 1)
    lent = pool.take()
    gone = _Turn(clock.now)
    pool.line.append(gone)
    waiting = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 2)
    pool.give_back(lent)
    clock.pass_by(GONE / 2, waiting=1)
    assert not waiting.done()
    clock.pass_by(0.4, waiting=1)
    clock.run()
    assert waiting.result(15) is lent
    wait_until(lambda: not pool.line)


def test_a_call_that_was_taken_for_gone_and_is_not_comes_next(clock: Clock, calls: ThreadPoolExecutor) -> None:
    pool = Pool(Connection, 1)
    lent = pool.take()
    slow = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 1)
    behind = calls.submit(pool.take)
    wait_until(lambda: len(pool.line) == 2)
    other = _Turn(clock.now)
    other.looked += 2 * GONE
    pool._pass_who_is_gone(other)
    wait_until(lambda: len(pool.line) == 2)
    pool.give_back(lent)
    assert slow.result(15) is lent
    assert not behind.done()
    pool.give_back(lent)
    assert behind.result(15) is lent
    assert not pool.line
