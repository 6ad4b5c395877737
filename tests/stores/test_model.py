"""Whatever is asked of it in whatever order, every store answers as the memory store does.

The memory store decides by `celery_idempotent.stores.rules`, in Python; the others mostly
on their servers. Both are asked the same
things, grow old by the same steps, and must agree on every verdict and every field.

Ages are multiples of 15 s, and no sum of the durations below is: so the milliseconds between the two answers cannot
put them on different sides of a limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from celery_idempotent.errors import LeaseLost
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Store, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner
from tests.support.stores import benches
from tests.support.stores.kinds import KINDS, Kind

LEASE, KEEP, RESULT, RETRY_IN = 65.0, 1010.0, 500.0, 35.0
STEPS = 50

KEYS = st.sampled_from(["one", "two"])
TASKS = st.sampled_from(["", "a", "b", "c"])
AGES = st.sampled_from([15, 30, 75, 225, 600, 1200])
ATTEMPTS = st.sampled_from([(0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
COPIES = st.sampled_from([(0, ""), (0, ""), (1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "z w")])
FLAGS = st.booleans()
FINGERPRINTS = st.sampled_from(["", "f", "f", "g"])
OUTCOMES = st.builds(
    Outcome, st.sampled_from([State.COMPLETED, State.FAILED]), st.sampled_from([b"", b"json:1", b"\0\xff"])
)
RELEASES = st.builds(
    Release,
    st.sampled_from([reason for reason in Reason if reason is not Reason.CRASH_LOOP]),
    retry_in=st.sampled_from([0.0, RETRY_IN]),
    next_attempt=st.sampled_from([0, 1, 2, 1_000_000]),
)


class Twins(RuleBasedStateMachine):
    """Ask both stores, and compare."""

    kind: Kind
    url = ""
    deliveries = Bundle("deliveries")  # claims that were made, whether they brought a lease or not

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.other = MemoryStore(), open_store(self.url)
        #: what each store leased to an owner last
        self.leases: dict[str, tuple[Lease, Lease]] = {}

    def teardown(self) -> None:
        self.kind.empty(self.other)
        self.other.close()

    def ask(self, claim: Claim) -> None:
        ours, theirs = self.memory.acquire(claim), self.other.acquire(claim)
        assert type(ours) is type(theirs), (ours, theirs)
        if isinstance(ours, Lease) and isinstance(theirs, Lease):
            assert (ours.taken_over, ours.crashes) == (theirs.taken_over, theirs.crashes)
            self.leases[claim.owner] = (ours, theirs)
        elif isinstance(ours, Refusal) and isinstance(theirs, Refusal):
            assert ours.verdict is theirs.verdict
            compare(replace(ours.record, waiting=0), replace(theirs.record, waiting=0))  # `get` tells that
        self.look(claim.key)

    def look(self, key: str) -> None:
        compare(self.memory.get(key), self.other.get(key))

    @rule(
        target=deliveries,
        key=KEYS,
        task=TASKS,
        attempt=ATTEMPTS,
        copy=COPIES,
        redelivered=FLAGS,
        fingerprint=FINGERPRINTS,
        max_crashes=st.integers(1, 3),
    )
    def deliver(self, key: str, task: str, attempt: tuple[int, int], copy: tuple[int, str], **details: Any) -> Claim:
        claim = Claim(
            key=key,
            owner=new_owner(),
            lease_ttl=LEASE,
            keep_ttl=KEEP,
            task_id=task,
            nesting=attempt[0],
            retries=attempt[1],
            copy=copy[0],
            token=copy[1],
            holder=f"host:{len(self.leases)}",
            **details,
        )
        self.ask(claim)
        return claim

    @rule(target=deliveries, by=deliveries, task=st.none() | TASKS, retries=st.integers(0, 2), redelivered=FLAGS)
    def deliver_what_somebody_published(self, by: Claim, task: str | None, retries: int, *, redelivered: bool) -> Claim:
        task_id = by.task_id if task is None else task
        claim = Claim(
            by.key, new_owner(), LEASE, KEEP, task_id, retries=retries, redelivered=redelivered, sender=by.owner
        )
        self.ask(claim)
        return claim

    @rule(claim=deliveries)
    def ask_again(self, claim: Claim) -> None:
        self.ask(claim)

    @rule(claims=st.lists(deliveries, max_size=4))
    def renew(self, claims: list[Claim]) -> None:
        pairs = [self.leases[claim.owner] for claim in claims if claim.owner in self.leases]
        ours = self.memory.renew([pair[0] for pair in pairs])
        theirs = self.other.renew([pair[1] for pair in pairs])
        assert sorted(lease.owner for lease in ours) == sorted(lease.owner for lease in theirs)
        for pair in pairs:
            self.look(pair[0].key)

    @rule(claim=deliveries, outcome=OUTCOMES)
    def settle(self, claim: Claim, outcome: Outcome) -> None:
        if claim.owner not in self.leases and self.memory.get(claim.key) is None:
            return  # nobody settles what was never leased to anybody
        pair = self.leases.get(claim.owner) or (Lease(claim, 0), Lease(claim, 0))
        lost = [settling_is_refused(store, lease, outcome) for store, lease in zip(self.stores, pair, strict=True)]
        assert lost[0] == lost[1]
        self.look(claim.key)

    @rule(claim=deliveries, release=RELEASES)
    def release(self, claim: Claim, release: Release) -> None:
        lease = Lease(claim, 0)
        assert self.memory.release(lease, release) == self.other.release(lease, release)
        self.look(claim.key)

    @rule(claim=deliveries)
    def mark_shutdown(self, claim: Claim) -> None:
        lease = Lease(claim, 0)
        assert self.memory.mark_shutdown(lease) == self.other.mark_shutdown(lease)
        self.look(claim.key)

    @rule(key=KEYS, task=TASKS)
    def mark_dispatched(self, key: str, task: str) -> None:
        assert self.memory.mark_dispatched(key, task) == self.other.mark_dispatched(key, task)
        self.look(key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.memory.delete(key) == self.other.delete(key)

    @rule(key=KEYS, seconds=AGES)
    def age(self, key: str, seconds: int) -> None:
        for store in self.stores:
            benches.age(store, key, seconds)
        self.look(key)

    @rule(key=KEYS)
    def hold_for_long(self, key: str) -> None:
        for store in self.stores:
            benches.age_fence(store, key, 225)

    @rule(state=st.none() | st.sampled_from(State))
    def scan(self, state: State | None) -> None:
        ours, theirs = ({record.key for record in store.scan(state=state)} for store in self.stores)
        assert ours == theirs

    @property
    def stores(self) -> tuple[MemoryStore, Store]:
        return self.memory, self.other


def settling_is_refused(store: Store, lease: Lease, outcome: Outcome) -> bool:
    try:
        store.settle(lease, outcome, ttl=RESULT)
    except LeaseLost:
        return True
    return False


def compare(ours: Record | None, theirs: Record | None) -> None:
    """See that two records say the same; of the times, that they are the same but for a second or two."""
    assert (ours is None) == (theirs is None), (ours, theirs)
    if ours is not None and theirs is not None:
        for name in Record.__dataclass_fields__:
            if name == "retention" and 0.0 in (ours.retention, theirs.retention):
                continue  # not every store tells
            if name == "held_for" and ours.held_for > 200:
                continue  # of a lease that was aged and then forgotten: some count it from when it was restored
            if name in {"remaining", "age", "held_for", "retention"}:
                assert abs(getattr(ours, name) - getattr(theirs, name)) < 3, (name, ours, theirs)
            elif name != "fence":  # one counts from its clock's start, the other from 1970
                assert getattr(ours, name) == getattr(theirs, name), (name, ours, theirs)


@pytest.fixture(params=[name for name in KINDS if name != "memory"])
def machine(request: pytest.FixtureRequest) -> type[Twins]:
    class Machine(Twins):
        kind = KINDS[request.param]
        url = request.getfixturevalue(KINDS[request.param].fixture)

    return Machine


def run(machine: type[Twins], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_a_store_answers_like_the_memory_store(machine: type[Twins]) -> None:
    run(machine, machine.kind.examples // 2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_store_answers_like_the_memory_store_for_long(machine: type[Twins]) -> None:
    run(machine, 10 * machine.kind.examples)


@pytest.mark.parametrize(("held", "crashes"), [(205, 1), (225, 0)])
def test_ten_renewals_and_no_fewer_make_a_holder_no_crash_loop(
    any_store: Store, kind: Kind, held: int, crashes: int
) -> None:
    benches.take(any_store, lease_ttl=LEASE)
    benches.age(any_store, benches.KEY, LEASE + 1)
    lease = benches.take(any_store, lease_ttl=LEASE)
    kind.age_fence(any_store, benches.KEY, held)
    assert any_store.renew([lease]) == []
    assert benches.known(any_store).crashes == crashes
