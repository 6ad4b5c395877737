"""The rules at their bounds: to the microsecond and the last mark, where no server's clock lets the contract look."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict, rules
from celery_idempotent.stores.records import attempt_number
from celery_idempotent.stores.rules import SECOND, Row

NOW = 1_000 * SECOND
LEASE, KEEP = 1.5, 10.25
ENDS = NOW + 1_500_000
CLAIM = Claim("k", "owner", LEASE, KEEP, task_id="a", holder="host:1", fingerprint="f", max_crashes=3)
FULL = 1000


def taken(at: int = NOW, **changes: Any) -> tuple[Lease, Row]:
    """Return a lease that was taken at this time, and its row."""
    lease, row = rules.acquire("k", None, replace(CLAIM, **changes), at)
    assert isinstance(lease, Lease)
    return lease, row


def asked(row: Row, at: int = NOW, **changes: Any) -> Lease | Verdict:
    """Return the answer to another claim: the lease, or why there is none."""
    answer, _ = rules.acquire("k", row, replace(CLAIM, owner="other", **changes), at)
    return answer.verdict if isinstance(answer, Refusal) else answer


def anew(text: str) -> str:
    """Return the same text as another object, as it comes from another message."""
    return "".join(list(text))


def resent(claim: Claim, **changes: Any) -> Claim:
    """Return a claim as it comes from another message: its texts and numbers are other objects."""
    claim = replace(claim, **changes)
    return replace(claim, **{name: anew(text) for name, text in asdict(claim).items() if isinstance(text, str)})


def marks(number: int, of: str = "waits") -> dict[str, Any]:
    return {f"{of}-{each}": (0, 0, "") for each in range(number)}


def test_a_new_row_knows_nothing() -> None:
    assert not hasattr(Row(State.RELEASED), "__dict__"), "a store in memory keeps many"
    row = asdict(Row(State.RELEASED))
    assert row.pop("state") is State.RELEASED
    assert row == dict.fromkeys(("fence", "lease_end", "not_before", "crashes", "ended", "expires"), 0) | dict.fromkeys(
        ("owner", "task_id", "holder", "reason", "fingerprint"), ""
    ) | {"payload": b"", "waiting": {}, "attempts": {}, "dispatched": []}


# -- what a record shows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [100_000, NOW], ids=["the clock has just begun", "it began long ago"])
def test_the_times_of_a_holder_are_seconds_and_their_fractions(start: int) -> None:
    row = Row(State.IN_PROGRESS, start, lease_end=start + 2_000_000, not_before=7, expires=start + 3_500_000)
    record = rules.view("k", row, start + 250_000)
    assert (record.remaining, record.held_for, record.age, record.retention) == (1.75, 0.25, 0.0, 3.25)


@pytest.mark.parametrize("start", [100_000, NOW], ids=["the clock has just begun", "it began long ago"])
@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.RELEASED])
def test_the_times_of_what_is_not_held_are_seconds_and_their_fractions(state: State, start: int) -> None:
    row = Row(state, 5, lease_end=7, not_before=start + 2_000_000, ended=start, expires=start + 3_500_000)
    record = rules.view("k", row, start + 250_000)
    assert (record.remaining, record.held_for, record.age, record.retention) == (1.75, 0.0, 0.25, 3.25)


@pytest.mark.parametrize("late", [0, 1, 5_000_000])
def test_what_is_over_has_no_time_left_and_a_clock_that_was_set_back_makes_nothing_younger_than_new(late: int) -> None:
    over = NOW - late
    row = Row(State.IN_PROGRESS, NOW + late, lease_end=over, ended=NOW + late, expires=over)
    record = rules.view("k", row, NOW)
    assert (record.remaining, record.held_for, record.age, record.retention) == (0.0, 0.0, 0.0, 0.0)


def test_a_record_tells_people_of_all_callbacks_and_a_claim_of_its_own() -> None:
    row = Row(State.COMPLETED, waiting=marks(3), dispatched=["a", "b"])
    assert rules.view("k", row, NOW).dispatched == {"a", "b"}
    assert rules.view("k", row, NOW, CLAIM).dispatched == {"a"}
    assert rules.view("k", row, NOW, replace(CLAIM, task_id="c")).dispatched == frozenset()
    assert rules.view("k", row, NOW).waiting == 3


# -- when a lease, and a wait, is over ---------------------------------------------------------------------------------


def test_a_lease_is_as_long_as_it_was_asked_for_and_its_row_is_kept_on() -> None:
    lease, row = taken()
    assert lease == Lease(CLAIM, NOW)
    expected = Row(State.IN_PROGRESS, NOW, "owner", "a", "host:1", ENDS, fingerprint="f", expires=ENDS + 10_250_000)
    assert row == expected


def test_a_lease_is_over_at_its_last_microsecond() -> None:
    assert asked(taken()[1], ENDS - 1) is Verdict.CONFLICT
    lease = asked(taken()[1], ENDS)
    assert isinstance(lease, Lease)
    assert (lease.fence, lease.taken_over, lease.crashes) == (ENDS, True, 1)


def test_a_wait_for_a_retry_is_over_at_its_last_microsecond() -> None:
    def waits(at: int) -> Lease | Verdict:
        lease, row = taken()
        assert rules.release(row, lease, Release(Reason.RETRY, 2.5, 1), NOW)
        return asked(row, at, task_id="b")

    assert waits(NOW + 2_499_999) is Verdict.CONFLICT
    assert isinstance(waits(NOW + 2_500_000), Lease)


@pytest.mark.parametrize("at", [NOW - 5 * SECOND, NOW - 1, NOW, NOW + 1])
def test_a_fence_is_the_time_or_one_more_than_the_fence_before(at: int) -> None:
    lease, row = taken()
    for expected in (NOW + 1, NOW + 2, NOW + 3):
        assert rules.release(row, lease, Release(Reason.FAILED), NOW)
        answer, row = rules.acquire("k", row, CLAIM, at)
        assert isinstance(answer, Lease)
        lease = answer
        assert lease.fence == row.fence == expected
        assert (row.not_before, row.reason) == (0, "")


def test_who_released_and_claims_again_gets_a_lease_of_its_own() -> None:
    lease, row = taken()
    assert rules.release(row, lease, Release(Reason.FAILED), NOW)
    answer, row = rules.acquire("k", row, lease.claim, NOW)
    assert answer == Lease(lease.claim, NOW + 1)
    assert row.state is State.IN_PROGRESS


def test_a_lease_that_is_claimed_again_and_one_that_is_renewed_last_from_then_on() -> None:
    lease, row = taken()
    row.crashes = 1
    answer, row = rules.acquire("k", row, lease.claim, NOW + 700_000)
    assert answer == Lease(lease.claim, NOW, crashes=1)
    assert (row.lease_end, row.expires) == (ENDS + 700_000, ENDS + 700_000 + 10_250_000)
    assert rules.renew(row, lease, NOW + 900_000) is row
    assert (row.lease_end, row.expires) == (ENDS + 900_000, ENDS + 900_000 + 10_250_000)


@pytest.mark.parametrize("start", [100_000, NOW], ids=["the clock has just begun", "it began long ago"])
def test_ten_renewals_of_three_to_a_lease_and_no_fewer_forget_the_crashes(start: int) -> None:
    for held, crashes in {0: 1, 5_000_000: 1, 5_000_001: 0, 9_000_000: 0}.items():
        lease, row = taken(start)
        row.crashes = 1
        renewed = rules.renew(row, lease, start + held)
        assert renewed is not None
        assert renewed.crashes == crashes


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
def test_a_settled_row_has_what_a_duplicate_is_compared_with_and_nothing_of_its_holder(state: State) -> None:
    lease, row = taken(retries=1)
    row.waiting, row.crashes, row.reason = marks(2), 1, Reason.SHUTDOWN.value
    settled = rules.settle(row, lease, Outcome(state, b"x"), 2.75, NOW + 5)
    expected = Row(state, NOW, task_id="a", fingerprint="f", payload=b"x", ended=NOW + 5, expires=NOW + 5 + 2_750_000)
    assert settled == expected


def test_a_released_row_is_kept_from_its_release_on() -> None:
    for reason in set(Reason) - {Reason.RETRY}:
        lease, row = taken()
        assert rules.release(row, lease, Release(reason, 2.5, 1), NOW + 5)
        assert (row.state, row.reason, row.holder, row.owner) == (State.RELEASED, reason.value, "", "owner")
        assert (row.not_before, row.expires) == (0, NOW + 5 + 10_250_000)


def test_what_a_holder_ends_by_counts_its_crashes_on_or_leaves_or_forgets_them() -> None:
    for reason in Reason:
        lease, row = taken()
        row.crashes = 2
        assert rules.release(row, lease, Release(reason), NOW)
        assert row.crashes == {Reason.CRASHED: 3, Reason.SHUTDOWN: 2, Reason.REVOKED: 2}.get(reason, 0), reason


def test_a_row_that_waits_for_its_retry_is_kept_from_the_retry_on() -> None:
    lease, row = taken()
    assert rules.release(row, lease, Release(Reason.RETRY, 2.5, 1), NOW + 5)
    assert (row.not_before, row.expires) == (NOW + 5 + 2_500_000, NOW + 5 + 2_500_000 + 10_250_000)
    assert row.attempts == {"a": 1}


# -- a server that lost what it had granted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fence", "at", "outdated"),
    [(NOW, ENDS, True), (NOW, ENDS - 1, False), (NOW + 1, ENDS, False), (NOW + 2, ENDS, False)],
)
def test_a_row_is_outdated_once_its_lease_is_over_and_only_beside_a_later_fence(
    fence: int, at: int, outdated: bool
) -> None:
    _, row = taken()
    row.fence = fence
    later = Lease(replace(CLAIM, owner="later"), NOW + 1)
    assert rules.outdated(row, later, at) is outdated
    renewed = rules.renew(row, later, at)
    assert (renewed is not None) is outdated


def test_a_holder_of_which_an_earlier_grant_is_known_goes_on_with_that() -> None:
    lease, row = taken()
    row.crashes = 1
    renewed = rules.renew(row, Lease(lease.claim, NOW + 1), ENDS)
    assert renewed is row
    assert (row.fence, row.crashes, row.lease_end > ENDS) == (NOW, 1, True)


@pytest.mark.parametrize("attempt", [{}, {"retries": 1}, {"nesting": 1}])
def test_a_lease_without_a_row_is_restored_as_it_was_granted(attempt: dict[str, Any]) -> None:
    lease, row = taken(**attempt)
    assert rules.renew(None, lease, NOW) == row
    assert rules.renew(None, Lease(replace(lease.claim, revive=False), NOW), NOW) is None


# -- how much is remembered --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waiting", "retried"), [(FULL, 0), (FULL - 1, 1), (0, FULL)])
def test_of_tasks_that_wait_and_of_those_that_retry_a_thousand_are_marked(waiting: int, retried: int) -> None:
    _, row = taken()
    row.waiting, row.attempts = marks(waiting), dict.fromkeys(marks(retried, "retries"), 1)
    assert asked(row, task_id="b") is Verdict.CONFLICT
    assert "b" not in row.waiting
    row.attempts["a"] = 1
    assert asked(row, task_id="b") is Verdict.CONFLICT
    assert "b" not in row.waiting
    del row.attempts["a"]
    (row.waiting or row.attempts).popitem()
    assert asked(row, task_id="b", copy=2, token="x", retries=3) is Verdict.CONFLICT
    assert row.waiting["b"] == (3, 2, "x")
    assert asked(row, task_id="b", copy=3, token="y", retries=3) is Verdict.CONFLICT  # it had its mark
    assert row.waiting["b"] == (3, 3, "y")


def test_retries_are_marked_until_there_are_a_hundred_marks_more() -> None:
    for marked, expected in {1099: {"a": 4}, 1100: {}, 1101: {}}.items():
        lease, row = taken()
        row.waiting = marks(marked)
        assert rules.release(row, lease, Release(Reason.RETRY, 1.0, 4), NOW)
        assert row.attempts == expected
    lease, row = taken(retries=1)
    row.waiting = marks(1099)
    assert rules.release(row, lease, Release(Reason.RETRY, 1.0, 4), NOW)
    assert row.attempts == {"a": 4}, "it had its mark"


def test_the_callbacks_of_the_first_and_of_the_newest_249_tasks_are_remembered() -> None:
    row = Row(State.COMPLETED)
    names = [str(number) for number in range(252)]
    for name in names:
        assert rules.mark_dispatched(row, name)
        assert len(row.dispatched) <= 250
        assert row.dispatched[-1] == name
        if name == "249":
            assert row.dispatched == names[:250]
    assert row.dispatched == ["0", *names[3:]]


# -- copies, and the attempts of a task --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "superseded"),
    [
        ({"copy": 2, "token": "x"}, False),
        ({"copy": 2, "token": "y"}, True),
        ({"copy": 2}, True),
        ({"copy": 1, "token": "x"}, True),
        ({"copy": 3, "token": "y"}, False),
        ({"copy": 1, "token": "x", "retries": 4}, False),
        ({"copy": 3, "token": "x", "retries": 2}, True),
        ({"redelivered": True}, True),
        ({}, False),
        ({"copy": 1, "task_id": "b"}, False),
    ],
)
def test_a_copy_is_superseded_by_one_that_came_later(changes: dict[str, Any], superseded: bool) -> None:
    row = Row(State.IN_PROGRESS, waiting={"a": (3, 2, "x")})
    assert rules.superseded(row, replace(CLAIM, **{"retries": 3, **changes})) is superseded


@pytest.mark.parametrize(
    ("changes", "superseded"),
    [({}, False), ({"token": "y"}, True), ({"copy": 9_999}, True), ({"retries": 9_999}, True)],
)
def test_copies_are_told_apart_by_what_their_marks_say(changes: dict[str, Any], superseded: bool) -> None:
    mark = (int("10000"), int("10000"), anew("token"))
    row = Row(State.IN_PROGRESS, waiting={"a": mark})
    claim = resent(replace(CLAIM, retries=10_000, copy=10_000, token="token"), **changes)
    assert rules.superseded(row, claim) is superseded


def test_a_message_that_was_never_copied_is_not_superseded_by_itself() -> None:
    row = Row(State.IN_PROGRESS, waiting={"a": (0, 0, "x")})
    assert not rules.superseded(row, replace(CLAIM, redelivered=True, token="y"))


@pytest.mark.parametrize(("retries", "superseded"), [(3, True), (4, False), (5, False)])
def test_a_copy_is_superseded_below_the_attempt_of_its_task(retries: int, superseded: bool) -> None:
    row = Row(State.IN_PROGRESS, attempts={"a": 4, "b": 9})
    assert rules.superseded(row, replace(CLAIM, retries=retries, redelivered=True)) is superseded
    assert not rules.superseded(row, replace(CLAIM, retries=retries))


@pytest.mark.parametrize(("nesting", "answer"), [(0, Verdict.CONFLICT), (1, Lease), (2, Lease)])
def test_what_was_replaced_by_itself_goes_on_at_that_nesting_or_deeper(nesting: int, answer: Any) -> None:
    row = Row(State.RELEASED, task_id="a", not_before=NOW + 1, attempts={"a": attempt_number(1, 0)})
    found = asked(row, nesting=nesting)
    assert found is answer or isinstance(found, Lease) is (answer is Lease)


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crashes", "changes", "answer"),
    [
        (1, {}, 2),
        (2, {}, Verdict.CRASH_LOOP),
        (3, {}, Verdict.CRASH_LOOP),
        (2, {"task_id": "b"}, 3),
        (4, {"task_id": "b"}, 5),
        (5, {"task_id": "b"}, Verdict.CRASH_LOOP),
        (6, {"task_id": "b"}, Verdict.CRASH_LOOP),
    ],
)
def test_as_many_crashes_as_are_allowed_stop_their_task_and_twice_as_many_any(
    crashes: int, changes: dict[str, Any], answer: Verdict | int
) -> None:
    _, row = taken()
    row.crashes, row.waiting, row.attempts = crashes, {"a": (0, 0, ""), "z": (0, 0, "")}, {"z": 1}
    found = asked(row, ENDS, **changes)
    assert (found.crashes if isinstance(found, Lease) else found) == answer
    if found is Verdict.CRASH_LOOP:
        task_id = changes.get("task_id", "a")
        left = {"a", "z"} - {task_id}
        assert (row.state, row.owner, row.reason, row.not_before) == (State.RELEASED, "", "crash_loop", 0)
        assert (set(row.waiting), set(row.attempts), row.crashes) == (left, {"z"}, crashes + 1)


@pytest.mark.parametrize("reason", [Reason.SHUTDOWN, Reason.REVOKED, Reason.CRASH_LOOP])
@pytest.mark.parametrize("crashes", [3, 6])
def test_crashes_before_an_end_on_purpose_stop_a_copy_alone(reason: Reason, crashes: int) -> None:
    def met(**changes: Any) -> Lease | Verdict:
        row = Row(State.RELEASED, NOW, task_id="a", crashes=crashes, reason=reason.value)
        return asked(row, **changes)

    assert isinstance(met(), Lease)
    assert isinstance(met(task_id="b", redelivered=True), Lease)
    assert met(redelivered=True) is met(copy=1, token="x") is Verdict.CRASH_LOOP


# -- names are compared by their letters -------------------------------------------------------------------------------


def test_who_comes_in_another_message_is_known_by_its_letters() -> None:
    lease, row = taken()
    again = Lease(resent(CLAIM), int(str(NOW)))
    assert rules.acquire("k", row, again.claim, NOW)[0] == lease
    assert rules.renew(row, again, NOW) is row
    assert rules.mark_shutdown(row, again)
    assert rules.renew(row, again, NOW) is row
    assert row.reason == Reason.SHUTDOWN
    assert asked(row, task_id=anew("b"), fingerprint=anew("f")) is Verdict.CONFLICT
    settled = rules.settle(row, again, Outcome(State.COMPLETED, b"x"), 9.0, NOW)
    assert settled is not None
    once_more = Lease(resent(CLAIM), int(str(NOW)))
    assert rules.settle(settled, once_more, Outcome(State.COMPLETED, b"y"), 9.0, NOW) is settled
    assert rules.mark_dispatched(settled, anew("task-1"))
    assert rules.mark_dispatched(settled, anew("task-1"))
    assert settled.dispatched == ["task-1"]
    assert rules.view("k", settled, NOW, resent(CLAIM, task_id=anew("task-1"))).dispatched == {"task-1"}


def test_who_gives_back_in_another_message_is_known_by_its_letters() -> None:
    _, row = taken()
    again = Lease(resent(CLAIM), int(str(NOW)))
    assert rules.release(row, again, Release(Reason.CRASHED), NOW)
    assert rules.release(row, again, Release(Reason.CRASHED), NOW)
    assert row.crashes == 1
    for crashes in (2, 3):
        row.reason = anew(row.reason)
        found = asked(row, task_id=anew("a"), max_crashes=2 if crashes == 3 else 9)
        if crashes == 2:
            assert isinstance(found, Lease)
            assert rules.release(row, found, Release(Reason.CRASHED), NOW)
    assert found is Verdict.CRASH_LOOP


def test_only_what_the_holder_published_takes_over_from_it() -> None:
    for sender in ("an owner", "owners", ""):
        assert asked(taken()[1], retries=1, sender=sender) is Verdict.CONFLICT
    found = asked(taken()[1], retries=1, sender=anew("owner"))
    assert found == Lease(replace(CLAIM, owner="other", retries=1, sender="owner"), NOW + 1)


@pytest.mark.parametrize("owner", ["an owner", "owners", "other"])
def test_what_another_holds_or_has_settled_is_not_changed(owner: str) -> None:
    stranger = Lease(replace(CLAIM, owner=owner), NOW + 1)
    _, row = taken()
    before = replace(row)
    for state in (State.COMPLETED, State.FAILED):
        assert rules.settle(row, stranger, Outcome(state, b"x"), 9.0, NOW) is None
    assert rules.renew(row, stranger, NOW) is None
    assert not rules.mark_shutdown(row, stranger)
    assert not rules.release(row, stranger, Release(Reason.FAILED), NOW)
    assert row == before
    settled = rules.settle(row, Lease(CLAIM, NOW), Outcome(State.COMPLETED, b"x"), 9.0, NOW)
    before = replace(settled)  # type: ignore[type-var]
    assert rules.settle(settled, stranger, Outcome(State.COMPLETED, b"y"), 9.0, ENDS) is None
    assert rules.settle(settled, Lease(CLAIM, NOW), Outcome(State.FAILED, b"y"), 9.0, ENDS) is None
    assert rules.renew(settled, stranger, ENDS) is None
    assert not rules.release(settled, stranger, Release(Reason.FAILED), ENDS)
    assert settled == before


def test_a_refusal_shows_the_row_as_it_was_met() -> None:
    _, row = taken()
    answer, after = rules.acquire("k", row, replace(CLAIM, owner="other", task_id="b"), NOW)
    assert after is row
    assert isinstance(answer, Refusal)
    expected = Record("k", State.IN_PROGRESS, NOW, "owner", "a", "host:1", fingerprint="f", remaining=1.5)
    assert answer == Refusal(Verdict.CONFLICT, expected)
