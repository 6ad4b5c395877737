"""What is peculiar to DynamoDB: what a task costs, how large an item may be, what is said of damaged ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError

from celery_idempotent.core.results import Codec, Kind
from celery_idempotent.errors import ConfigurationError, RecordUnreadable, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Outcome, Reason, Refusal, Release, State, Verdict, rules
from celery_idempotent.stores.base import unreadable_reported_to
from celery_idempotent.stores.dynamodb import DynamoDBStore, schema
from celery_idempotent.stores.dynamodb.connections import translate_error
from celery_idempotent.stores.dynamodb.records import LARGEST_PAYLOAD
from celery_idempotent.stores.rules import SECOND
from tests.support.dynamodb import DynamoServer
from tests.support.stores.benches import DONE, KEY, age, claim, known, take

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow


@contextmanager
def requests(store: DynamoDBStore) -> Iterator[Counter[str]]:
    """Count what is sent meanwhile."""
    sent: Counter[str] = Counter()
    events = store._table.client().meta.events

    def count(model: Any, **_: object) -> None:
        sent[model.name] += 1

    events.register("before-call.dynamodb", count)
    try:
        yield sent
    finally:
        events.unregister("before-call.dynamodb", count)


class TestWhatATaskCosts:
    @pytest.fixture
    def store(self, dynamodb_store: DynamoDBStore) -> DynamoDBStore:
        dynamodb_store.get(KEY)  # the first request of a process tells the time
        return dynamodb_store

    def test_a_first_run_is_two_writes(self, store: DynamoDBStore) -> None:
        with requests(store) as sent:
            store.settle(take(store), DONE, ttl=60)
        assert sent == {"PutItem": 2}

    def test_a_replay_is_one_request_and_for_what_was_delivered_before_a_read(self, store: DynamoDBStore) -> None:
        store.settle(take(store), DONE, ttl=60)
        with requests(store) as sent:
            assert isinstance(store.acquire(claim()), Refusal)
        assert sent == {"PutItem": 1}
        with requests(store) as sent:
            assert isinstance(store.acquire(claim(redelivered=True)), Refusal)
        assert sent == {"GetItem": 1}

    def test_a_conflict_is_two_requests_and_one_when_the_same_copy_comes_again(self, store: DynamoDBStore) -> None:
        take(store)
        waiting = {"task_id": "b", "copy": 1, "token": "x"}
        for expected in ({"GetItem": 1, "UpdateItem": 1}, {"GetItem": 1}):
            with requests(store) as sent:
                assert isinstance(store.acquire(claim(**waiting)), Refusal)
            assert sent == expected
        with requests(store) as sent:
            assert isinstance(store.acquire(claim(task_id="c")), Refusal)
        assert sent == {"PutItem": 1, "UpdateItem": 1}

    def test_a_take_over_is_a_read_and_a_write(self, store: DynamoDBStore) -> None:
        take(store)
        age(store, KEY, 61)
        with requests(store) as sent:
            take(store, redelivered=True)
        assert sent == {"GetItem": 1, "PutItem": 1}

    def test_a_renewal_is_one_write_and_so_is_an_announcement(self, store: DynamoDBStore) -> None:
        lease = take(store)
        with requests(store) as sent:
            assert store.renew([lease]) == []
        assert sent == {"UpdateItem": 1}
        store.settle(lease, DONE, ttl=60)
        with requests(store) as sent:
            assert store.mark_dispatched(KEY, "a")
        assert sent == {"UpdateItem": 1}

    def test_a_release_is_a_read_and_a_write(self, store: DynamoDBStore) -> None:
        lease = take(store)
        with requests(store) as sent:
            assert store.release(lease, Release(Reason.FAILED))
        assert sent == {"GetItem": 1, "UpdateItem": 1}

    def test_the_first_claim_of_a_process_asks_for_the_time(self, dynamodb_url: str) -> None:
        store = DynamoDBStore.from_url(dynamodb_url)
        with requests(store) as sent:
            take(store)
        assert sent == {"GetItem": 1, "PutItem": 1}
        store.close()


class TestWhatAnItemHolds:
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_a_result_that_is_too_large_is_settled_without_it(
        self, dynamodb_store: DynamoDBStore, caplog: pytest.LogCaptureFixture, state: State
    ) -> None:
        outcome = Outcome(state, b"json:" + b"1" * LARGEST_PAYLOAD)
        lease = take(dynamodb_store)
        for _ in range(2):
            dynamodb_store.settle(lease, outcome, ttl=60)
        payload = Codec(compress_above=1024, result_max_bytes=1024).decode(known(dynamodb_store).payload)
        assert (known(dynamodb_store).state, payload.kind) == (state, Kind.UNAVAILABLE)
        assert str(len(outcome.payload)) in payload.reason
        assert "result_max_bytes" in caplog.text

    @pytest.mark.nightly
    def test_the_largest_result_that_is_kept_fits(self, dynamodb_store: DynamoDBStore) -> None:
        outcome = Outcome(State.COMPLETED, b"json:".ljust(LARGEST_PAYLOAD, b"1"))
        key = "k" * 1000
        dynamodb_store.settle(take(dynamodb_store, key, task_id="t" * 200, fingerprint="f" * 64), outcome, ttl=60)
        for number in range(150):  # of 250; moto counts a list twice when one is added
            assert dynamodb_store.mark_dispatched(key, f"{number:036d}")
        assert known(dynamodb_store, key).payload == outcome.payload

    def test_an_item_that_becomes_too_large_is_refused_with_what_to_do(self, dynamodb_store: DynamoDBStore) -> None:
        outcome = Outcome(State.COMPLETED, b"json:".ljust(LARGEST_PAYLOAD, b"1"))
        dynamodb_store.settle(take(dynamodb_store), outcome, ttl=60)
        with pytest.raises(StoreRefused, match=r"Item size .* room for 400 KB, .* Lower result_max_bytes"):
            dynamodb_store.mark_dispatched(KEY, "t" * 20_000)
        assert known(dynamodb_store).payload == outcome.payload
        with pytest.raises(StoreRefused, match=r"Item size .* room for 400 KB, "):
            take(dynamodb_store, "large", task_id="t" * 410_000)

    def test_an_item_ends_however_many_duplicates_announce_their_callbacks(
        self, dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """DynamoDB sends the whole item with a write that is refused, and bills its size."""
        monkeypatch.setattr(rules, "MOST_DISPATCHED", 3)
        dynamodb_store.settle(take(dynamodb_store), DONE, ttl=60)
        sizes = []
        for name in "abcdefgh":
            with requests(dynamodb_store) as sent:
                for _ in range(2):  # again, for want of a reply
                    assert dynamodb_store.mark_dispatched(KEY, name)
            sizes.append((len(str(dynamodb_store._table.read(KEY))), sent["UpdateItem"]))
        assert known(dynamodb_store).dispatched == {"a", "g", "h"}
        assert sizes[3:] == [(sizes[2][0], 3)] * 5  # refused, done; and refused the second time
        assert [updates for _, updates in sizes[:3]] == [2] * 3

    def test_who_announced_by_the_first_version_is_known(self, dynamodb_store: DynamoDBStore) -> None:
        """It kept a set, which has no order."""
        dynamodb_store.settle(take(dynamodb_store), DONE, ttl=60)
        item = dynamodb_store._table.read(KEY) or {}
        dynamodb_store._table.call("put_item", Item={**item, "announced": {"SS": ["t:b", "t:a"]}})
        assert dynamodb_store.mark_dispatched(KEY, "c")
        assert known(dynamodb_store).dispatched == {"a", "b", "c"}
        answer = dynamodb_store.acquire(claim(task_id="b"))
        assert isinstance(answer, Refusal)
        assert answer.record.dispatched == {"b"}

    def test_two_that_announce_at_once_where_there_is_no_room_are_both_known(
        self, dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rules, "MOST_DISPATCHED", 3)
        dynamodb_store.settle(take(dynamodb_store), DONE, ttl=60)
        for name in "abc":
            assert dynamodb_store.mark_dispatched(KEY, name)
        update = dynamodb_store._table.update
        updates = []

        def stall(*args: Any, **options: Any) -> Any:
            updates.append(args)
            if len(updates) == 2:  # it has read the item, and is about to write it
                assert dynamodb_store.mark_dispatched(KEY, "d")
            return update(*args, **options)

        monkeypatch.setattr(dynamodb_store._table, "update", stall)
        assert dynamodb_store.mark_dispatched(KEY, "e")
        assert known(dynamodb_store).dispatched == {"a", "d", "e"}

    def test_a_crowd_that_waits_does_not_fill_the_item(
        self, dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rules, "MOST_WAITING", 2)
        take(dynamodb_store)

        def waits(task_id: str, copy: int, token: str = "x") -> Verdict:
            answer = dynamodb_store.acquire(claim(task_id=task_id, copy=copy, token=token))
            assert isinstance(answer, Refusal)
            return answer.verdict

        for name in ("a", "b", "c"):
            assert waits(name, 5) is Verdict.CONFLICT
        assert [waits(name, 4) for name in ("a", "b")] == [Verdict.SUPERSEDED] * 2
        assert waits("c", 4) is Verdict.CONFLICT  # nothing is known of it, and it waits all the same
        assert waits("a", 6) is Verdict.CONFLICT
        assert waits("a", 5) is Verdict.SUPERSEDED

    @pytest.mark.parametrize(
        "damage",
        [
            {"format": {"N": "2"}},
            {"state": {"S": "dancing"}},
            {"state": None},
            {"version": None},
            {"fence": {"S": "7"}},
            {"waiting": {"M": {"t:a": {"S": "1"}}}},
        ],
    )
    def test_an_item_that_is_no_record_of_ours_is_left_alone(
        self, dynamodb_store: DynamoDBStore, damage: dict[str, Any]
    ) -> None:
        lease = take(dynamodb_store)
        item = {**(dynamodb_store._table.read(KEY) or {}), **damage}
        item = {name: value for name, value in item.items() if value is not None}
        dynamodb_store._table.call("put_item", Item=item)
        stranger = Lease(claim(), 1)
        for ask in (
            lambda: dynamodb_store.acquire(claim()),
            lambda: dynamodb_store.get(KEY),
            lambda: dynamodb_store.release(lease, Release(Reason.FAILED)),
            lambda: dynamodb_store.renew([stranger]),
            lambda: dynamodb_store.settle(stranger, DONE, ttl=60),
        ):
            with pytest.raises(RecordUnreadable, match="damaged or was written by a newer version"):
                ask()
        dynamodb_store.append_history([HistoryEntry("other", "happened", 0.0, 60.0)])
        passed_by: list[str] = []
        with unreadable_reported_to(passed_by.append):
            assert list(dynamodb_store.scan()) == []
        assert passed_by == [KEY]
        assert dynamodb_store._table.read(KEY) == item
        assert dynamodb_store.delete(KEY)
        assert dynamodb_store.get(KEY) is None

    def test_an_item_that_is_no_record_of_ours_does_not_keep_other_leases_from_being_renewed(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        first, lease, last = (take(dynamodb_store, key) for key in ("first", KEY, "last"))
        item = {**(dynamodb_store._table.read(KEY) or {}), "state": {"S": "dancing"}}
        dynamodb_store._table.call("put_item", Item=item)
        for key in ("first", "last"):
            age(dynamodb_store, key, 50)
        with pytest.raises(RecordUnreadable):
            dynamodb_store.renew([first, lease, last])
        assert [known(dynamodb_store, key).remaining > 55 for key in ("first", "last")] == [True, True]

    def test_a_key_that_is_too_long_is_refused_with_what_to_do(self, dynamodb_store: DynamoDBStore) -> None:
        assert take(dynamodb_store, "k" * 2048)
        with pytest.raises(StoreRefused, match=r"refused a key .* 2,048 bytes.* shorter name"):
            dynamodb_store.acquire(claim("k" * 2049))

    def test_the_fence_of_a_record_that_expired_is_not_given_again(self, dynamodb_store: DynamoDBStore) -> None:
        """DynamoDB deletes what has expired when it comes to it, up to days later: till then the fence is known."""
        take(dynamodb_store)
        item = dynamodb_store._table.read(KEY) or {}
        ahead = int(item["fence"]["N"]) + 10**9
        dynamodb_store._table.call("put_item", Item={**item, "fence": {"N": str(ahead)}})
        age(dynamodb_store, KEY, 4000)
        assert dynamodb_store.get(KEY) is None
        lease = take(dynamodb_store)
        assert (lease.fence, lease.taken_over, lease.crashes) == (ahead + 1, False, 0)

    def test_a_renewal_of_what_has_expired_and_was_not_deleted_yet_restores_it_without_its_past(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        """As if it were gone: what is not looked at any more must not come back."""
        assert dynamodb_store.release(take(dynamodb_store), Release(Reason.CRASHED))
        lease = take(dynamodb_store)
        assert lease.crashes == 1
        age(dynamodb_store, KEY, 4000)
        assert dynamodb_store.get(KEY) is None
        assert dynamodb_store.renew([lease]) == []
        record = known(dynamodb_store)
        assert (record.owner, record.fence, record.crashes) == (lease.owner, lease.fence, 0)

    def test_what_is_settled_is_not_deleted_before_its_time(self, dynamodb_store: DynamoDBStore) -> None:
        """DynamoDB deletes by whole seconds: rounded up."""
        lease = take(dynamodb_store)
        began = dynamodb_store._records.now()
        dynamodb_store.settle(lease, DONE, ttl=60)
        item = dynamodb_store._table.read(KEY) or {}
        assert int(item["expires"]["N"]) * SECOND >= began + 60 * SECOND

    def test_what_has_expired_is_not_announced(self, dynamodb_store: DynamoDBStore) -> None:
        dynamodb_store.settle(take(dynamodb_store), DONE, ttl=60)
        age(dynamodb_store, KEY, 62)
        assert not dynamodb_store.mark_dispatched(KEY, "a")
        assert dynamodb_store.get(KEY) is None

    def test_who_never_saw_the_fence_settles_without_changing_it(self, dynamodb_store: DynamoDBStore) -> None:
        lease = take(dynamodb_store)
        dynamodb_store.settle(Lease(lease.claim, 0), DONE, ttl=60)
        assert (known(dynamodb_store).fence, known(dynamodb_store).payload) == (lease.fence, DONE.payload)

    def test_every_write_changes_the_version(self, dynamodb_store: DynamoDBStore) -> None:
        """Also one that changes marks alone: who decided without them must decide again."""
        versions = []

        def written() -> None:
            versions.append((dynamodb_store._table.read(KEY) or {})["version"]["S"])

        lease = take(dynamodb_store, task_id="a")
        written()
        for number in (1, 2):
            dynamodb_store.acquire(claim(task_id="b", copy=number, token="x"))
            written()
        assert dynamodb_store.renew([lease]) == []
        written()
        assert dynamodb_store.release(lease, Release(Reason.CRASHED))
        written()
        lease = take(dynamodb_store, redelivered=True)
        written()
        dynamodb_store.settle(lease, DONE, ttl=60)
        written()
        assert dynamodb_store.mark_dispatched(KEY, "a")
        written()
        assert len(set(versions)) == len(versions) == 8

    def test_a_copy_that_was_superseded_while_it_decided_does_not_take_over(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        """It saw the lease run out; before it could write, the copy after it was noted."""
        lease = take(dynamodb_store, task_id="a")
        age(dynamodb_store, KEY, 61)
        put = dynamodb_store._table.put

        def stall(item: Any, condition: Any) -> None:
            dynamodb_store._table.put = put  # type: ignore[method-assign]
            assert dynamodb_store.renew([lease]) == []
            dynamodb_store.acquire(claim(task_id="b", copy=2, token="x"))
            age(dynamodb_store, KEY, 61)
            put(item, condition)

        dynamodb_store._table.put = stall  # type: ignore[method-assign]
        answer = dynamodb_store.acquire(claim(task_id="b", copy=1, token="y"))
        assert isinstance(answer, Refusal)
        assert answer.verdict is Verdict.SUPERSEDED

    @pytest.mark.parametrize("noted", [True, False])
    def test_a_mark_that_was_overtaken_by_a_later_one_is_not_written(
        self, dynamodb_store: DynamoDBStore, *, noted: bool
    ) -> None:
        take(dynamodb_store, task_id="a")
        if noted:
            assert verdict(dynamodb_store, copy=1, token="x") is Verdict.CONFLICT
        update = dynamodb_store._table.update

        def stall(*args: Any, **options: Any) -> Any:
            dynamodb_store._table.update = update  # type: ignore[method-assign]
            assert verdict(dynamodb_store, copy=3, token="z") is Verdict.CONFLICT
            return update(*args, **options)

        dynamodb_store._table.update = stall  # type: ignore[method-assign]
        assert verdict(dynamodb_store, copy=2, token="y") is Verdict.SUPERSEDED
        assert verdict(dynamodb_store, copy=3, token="z") is Verdict.CONFLICT

    def test_a_lease_that_is_taken_over_while_it_is_renewed_or_released_is_lost(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        def overtaken(lease: Lease) -> Any:
            update = dynamodb_store._table.update

            def stall(*args: Any, **options: Any) -> Any:
                dynamodb_store._table.update = update  # type: ignore[method-assign]
                age(dynamodb_store, lease.key, 61)
                take(dynamodb_store, lease.key, redelivered=True)
                return update(*args, **options)

            return stall

        renewing, releasing = take(dynamodb_store, "renewing"), take(dynamodb_store, "releasing")
        dynamodb_store._table.update = overtaken(renewing)  # type: ignore[method-assign]
        assert list(dynamodb_store.renew([renewing])) == [renewing]
        dynamodb_store._table.update = overtaken(releasing)  # type: ignore[method-assign]
        assert not dynamodb_store.release(releasing, Release(Reason.FAILED))
        assert known(dynamodb_store, "releasing").state is State.IN_PROGRESS

    def test_a_record_that_was_lost_and_claimed_while_it_is_restored_is_lost(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        lease = take(dynamodb_store)
        dynamodb_store.delete(KEY)
        put = dynamodb_store._table.put

        def stall(item: Any, condition: Any) -> None:
            dynamodb_store._table.put = put  # type: ignore[method-assign]
            take(dynamodb_store)
            put(item, condition)

        dynamodb_store._table.put = stall  # type: ignore[method-assign]
        assert list(dynamodb_store.renew([lease])) == [lease]


class TestTheTable:
    @pytest.fixture
    def store(self, dynamodb_server: DynamoServer, fresh_table: str) -> Iterator[DynamoDBStore]:
        store = DynamoDBStore.from_url(dynamodb_server.url(f"{fresh_table}-new"))
        yield store
        store.close()

    def test_it_is_created_with_what_forgets(self, store: DynamoDBStore) -> None:
        assert store.pending_schema().startswith("create the table")
        assert "TTL" in store.pending_schema()
        store.apply_schema()
        store.apply_schema()
        assert store.pending_schema() == ""
        table = store._table.call("describe_table")["Table"]
        assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        take(store)

    def test_one_that_does_not_forget_is_taught_to(self, store: DynamoDBStore) -> None:
        store.apply_schema()
        off = {"Enabled": False, "AttributeName": "expires"}
        store._table.call("update_time_to_live", TimeToLiveSpecification=off)
        assert store.pending_schema().startswith("let DynamoDB delete")
        store.apply_schema()
        assert store.pending_schema() == ""

    def test_one_of_somebody_else_is_left_alone(self, store: DynamoDBStore) -> None:
        store._table.call(
            "create_table",
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        )
        for ask in (store.pending_schema, store.apply_schema):
            with pytest.raises(ConfigurationError, match="a table of its own"):
                ask()

    def test_somebody_who_creates_it_at_the_same_time_does_no_harm(
        self, store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.apply_schema()
        described = schema._described
        seen: list[Any] = [None, {"TableStatus": "CREATING"}]  # as it was when we looked, and a little later
        monkeypatch.setattr(schema, "_described", lambda table: seen.pop(0) if seen else described(table))
        monkeypatch.setattr(schema, "PAUSE", 0.0)
        store.apply_schema()
        assert not seen

    def test_one_that_is_never_ready_is_not_waited_for_for_ever(
        self, store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(schema, "_described", lambda table: {"TableStatus": "CREATING"})
        monkeypatch.setattr(schema, "PAUSE", 0.0)
        monkeypatch.setattr(schema, "PATIENCE", 0.0)
        with pytest.raises(StoreUnreachable, match="not ready"):
            store.apply_schema()

    @pytest.mark.parametrize("operation", ["describe_table", "create_table"])
    def test_what_may_not_be_done_is_said(
        self, store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch, operation: str
    ) -> None:
        call = store._table.call
        denied = ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, operation)

        def deny(asked: str, **request: Any) -> dict[str, Any]:
            if asked == operation:
                raise translate_error(denied, store._table.place) from denied
            return call(asked, **request)

        monkeypatch.setattr(store._table, "call", deny)
        with pytest.raises(StoreRefused, match="AccessDenied"):
            store.apply_schema()

    def test_more_than_one_page_of_it_is_read(self, dynamodb_store: DynamoDBStore) -> None:
        large = Outcome(State.COMPLETED, b"json:".ljust(300_000, b"1"))
        for number in range(5):
            dynamodb_store.settle(take(dynamodb_store, f"large:{number}"), large, ttl=60)
        take(dynamodb_store, "small")
        with requests(dynamodb_store) as sent:
            assert len(list(dynamodb_store.scan(state=State.COMPLETED))) == 5
        assert sent["Scan"] > 1


def verdict(store: DynamoDBStore, **changes: Any) -> Verdict:
    """Ask as a copy of the task "b", and return why there was no lease."""
    answer = store.acquire(claim(task_id="b", **changes))
    assert isinstance(answer, Refusal)
    return answer.verdict
