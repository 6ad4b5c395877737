"""A DynamoDB that cannot serve, one that will not, and replies that are lost."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from celery_idempotent.errors import LeaseLost, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Reason, Release, State
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.connections import ConditionFailed
from celery_idempotent.stores.rules import SECOND
from tests.support import servers
from tests.support.dynamodb import SECRET_KEY, DynamoServer
from tests.support.proxy import Proxy
from tests.support.stores.benches import DONE, KEY, VERBS, age, claim, known, take, verb
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow

TOKEN = "AQoDYXdzEJr-session-token"


class Raw(io.BytesIO):
    """A body as botocore reads it from a connection."""

    def stream(self, **_: object) -> Iterator[bytes]:
        yield self.read()


@contextmanager
def answering(store: DynamoDBStore, code: str, message: str = "", status: int = 400, when: str = "") -> Iterator[None]:
    """Have an error come back in the place of what the service would say; to requests with ``when`` in them only."""
    events = store._table.client().meta.events

    def answer(request: Any, **_: object) -> AWSResponse | None:
        if when.encode() not in request.body:
            return None
        body = json.dumps({"__type__": code, "__type": f"com.amazonaws#{code}", "message": message}).encode()
        headers = {"content-type": "application/x-amz-json-1.0"}
        return AWSResponse(request.url, status, headers, Raw(body))

    events.register("before-send.dynamodb", answer)
    try:
        yield
    finally:
        events.unregister("before-send.dynamodb", answer)


class TestAServiceThatCannotServe:
    @pytest.mark.parametrize("name", VERBS)
    def test_an_endpoint_that_is_down_is_unreachable(
        self, dynamodb_server: DynamoServer, dynamodb_keys: None, name: str
    ) -> None:
        store = DynamoDBStore.from_url(dynamodb_server.url("records", servers.free_port()))
        with pytest.raises(StoreUnreachable, match="within reach") as caught:
            verb(store, name)()
        assert SECRET_KEY not in str(caught.value)
        store.close()

    def test_a_host_that_does_not_exist_is_unreachable(self, dynamodb_keys: None) -> None:
        store = DynamoDBStore.from_url("dynamodb://records?region=eu-west-1&endpoint_url=http://no-such-host.invalid")
        with pytest.raises(StoreUnreachable):
            store.ping()
        store.close()

    def test_an_endpoint_that_hangs_is_unreachable_within_the_timeout(
        self, dynamodb_server: DynamoServer, fresh_table: str, proxied: Callable[[int], Proxy]
    ) -> None:
        proxy = proxied(dynamodb_server.port)
        store = DynamoDBStore.from_url(f"{dynamodb_server.url(fresh_table, proxy.port)}&timeout=0.3")
        wait_until(lambda: serves(store), message="the store to serve")
        proxy.drop()
        for name in ("acquire", "renew"):
            began = monotonic()
            with pytest.raises(StoreUnreachable, match="ReadTimeoutError"):
                verb(store, name)()
            assert monotonic() - began < 10
        proxy.heal()
        wait_until(lambda: serves(store), message="the store to serve again")
        store.close()

    def test_a_soft_time_limit_in_the_middle_of_a_request_is_not_taken_for_an_outage(
        self, dynamodb_server: DynamoServer, fresh_table: str, proxied: Callable[[int], Proxy]
    ) -> None:
        class Interruption(Exception):
            pass

        def interrupt(*_: object) -> None:
            raise Interruption

        proxy = proxied(dynamodb_server.port)
        store = DynamoDBStore.from_url(dynamodb_server.url(fresh_table, proxy.port))
        wait_until(lambda: serves(store), message="the store to serve")
        proxy.drop()
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Interruption):
                store.get(KEY)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        proxy.heal()
        wait_until(lambda: serves(store), message="the store to serve again")
        store.close()

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("ProvisionedThroughputExceededException", 400),
            ("ThrottlingException", 400),
            ("RequestLimitExceeded", 400),
            ("TransactionConflictException", 400),
            ("InternalServerError", 500),
            ("ServiceUnavailable", 503),
        ],
    )
    def test_a_request_that_is_throttled_or_fails_is_unreachable(
        self, dynamodb_store: DynamoDBStore, code: str, status: int
    ) -> None:
        lease = take(dynamodb_store)
        with answering(dynamodb_store, code, "slow down", status):
            for name in VERBS:
                with pytest.raises(StoreUnreachable, match=code):
                    verb(dynamodb_store, name, lease)()
        assert dynamodb_store.renew([lease]) == []

    def test_a_lease_whose_renewal_is_throttled_keeps_no_other_from_being_renewed(
        self, dynamodb_store: DynamoDBStore
    ) -> None:
        first, second = take(dynamodb_store, "first"), take(dynamodb_store, "second")
        age(dynamodb_store, "second", 50)
        with (
            answering(dynamodb_store, "ThrottlingException", when='"first"'),
            pytest.raises(StoreUnreachable, match="Throttling"),
        ):
            dynamodb_store.renew([first, second])
        assert known(dynamodb_store, "second").remaining > 20

    def test_a_record_that_others_keep_changing_is_unreachable(self, dynamodb_store: DynamoDBStore) -> None:
        held = take(dynamodb_store)
        item = dynamodb_store._table.read(KEY)
        body = {"Item": item}
        for name in ("acquire", "release"):
            with overtaking(dynamodb_store, body), pytest.raises(StoreUnreachable, match="changed by others"):
                verb(dynamodb_store, name, held)()
        for change in ({"owner": {"S": held.owner}, "expires": {"N": "1"}, "lease": {"N": "0"}},):
            with overtaking(dynamodb_store, {"Item": {**(item or {}), **change}}):
                for name in ("renew", "settle"):
                    with pytest.raises(StoreUnreachable, match="changed by others"):
                        verb(dynamodb_store, name, held)()


@contextmanager
def overtaking(store: DynamoDBStore, said: dict[str, Any]) -> Iterator[None]:
    """Have every write refused, with this item."""
    events = store._table.client().meta.events

    def answer(request: Any, **_: object) -> AWSResponse | None:
        if b"ConditionExpression" not in request.body:
            return None
        body = {"__type": "com.amazonaws#ConditionalCheckFailedException", "message": "", **said}
        headers = {"content-type": "application/x-amz-json-1.0"}
        return AWSResponse(request.url, 400, headers, Raw(json.dumps(body).encode()))

    events.register("before-send.dynamodb", answer)
    try:
        yield
    finally:
        events.unregister("before-send.dynamodb", answer)


class TestAServiceThatRefuses:
    @pytest.mark.parametrize(
        "code",
        [
            "UnrecognizedClientException",
            "InvalidSignatureException",
            "IncompleteSignatureException",
            "ExpiredTokenException",
            "MissingAuthenticationTokenException",
        ],
    )
    def test_wrong_credentials_are_refused_and_never_shown(self, dynamodb_store: DynamoDBStore, code: str) -> None:
        """The text of some of these repeats the request with all that signed it."""
        with answering(dynamodb_store, code, f"x-amz-security-token:{TOKEN} {SECRET_KEY}"):
            for name in VERBS:
                with pytest.raises(StoreRefused, match="Check the credentials") as caught:
                    verb(dynamodb_store, name)()
                assert code in str(caught.value)
                assert TOKEN not in str(caught.value)
                assert SECRET_KEY not in str(caught.value)

    def test_missing_rights_are_refused(self, dynamodb_store: DynamoDBStore) -> None:
        message = "User: arn:aws:iam::1:role/shop is not authorized to perform: dynamodb:PutItem"
        with (
            answering(dynamodb_store, "AccessDeniedException", message),
            pytest.raises(StoreRefused, match="Give the role") as caught,
        ):
            take(dynamodb_store)
        assert message in str(caught.value)

    @pytest.mark.parametrize("name", VERBS)
    def test_a_table_that_is_not_there_is_refused_with_what_makes_it(
        self, dynamodb_server: DynamoServer, dynamodb_keys: None, name: str
    ) -> None:
        store = DynamoDBStore.from_url(dynamodb_server.url("not-there"))
        with pytest.raises(StoreRefused, match="celery-idempotent --store URL schema --apply"):
            verb(store, name)()
        store.close()

    def test_a_table_of_somebody_else_is_refused(self, dynamodb_store: DynamoDBStore) -> None:
        other = DynamoDBStore.from_url(f"dynamodb://orders?region=eu-west-1&endpoint_url={endpoint(dynamodb_store)}")
        other._table.call(
            "create_table",
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        )
        with pytest.raises(StoreRefused, match="one key attribute 'key'"):
            take(other)
        other.close()


def endpoint(store: DynamoDBStore) -> str:
    return store._table.place.endpoint_url


class TestLostReplies:
    """The service did the work, and the client never heard of it."""

    @pytest.fixture
    def proxy(self, dynamodb_server: DynamoServer, proxied: Callable[[int], Proxy]) -> Proxy:
        return proxied(dynamodb_server.port)

    @pytest.fixture
    def store(self, dynamodb_server: DynamoServer, fresh_table: str, proxy: Proxy) -> Iterator[DynamoDBStore]:
        store = DynamoDBStore.from_url(dynamodb_server.url(fresh_table, proxy.port))
        store.get(KEY)  # hears the clock
        yield store
        store.close()

    def test_a_claim_is_asked_for_again_and_granted(self, store: DynamoDBStore, proxy: Proxy) -> None:
        proxy.swallow_reply(matching=b"PutItem")
        lease = take(store)
        assert proxy.swallowed == 1
        assert (lease.taken_over, lease.crashes, known(store).owner) == (False, 0, lease.owner)
        assert known(store).fence == lease.fence

    def test_a_take_over_counts_its_crash_once(self, store: DynamoDBStore, proxy: Proxy) -> None:
        take(store)
        age(store, KEY, 61)
        proxy.swallow_reply(matching=b'"#0": "version"')
        lease = take(store)
        assert proxy.swallowed == 1
        assert (lease.taken_over, lease.crashes, known(store).crashes) == (True, 1, 1)

    def test_a_settle_is_settled_once(self, store: DynamoDBStore, proxy: Proxy) -> None:
        lease = take(store)
        proxy.swallow_reply(matching=b"PutItem")
        store.settle(lease, DONE, ttl=60)
        assert proxy.swallowed == 1
        assert known(store).payload == DONE.payload

    def test_a_release_is_released_once_and_still_was_ours(self, store: DynamoDBStore, proxy: Proxy) -> None:
        lease = take(store)
        proxy.swallow_reply(matching=b"UpdateItem")
        assert store.release(lease, Release(Reason.CRASHED))
        assert proxy.swallowed == 1
        assert (known(store).state, known(store).crashes) == (State.RELEASED, 1)

    def test_a_renewal_and_an_announcement_are_done(self, store: DynamoDBStore, proxy: Proxy) -> None:
        lease = take(store)
        age(store, KEY, 50)
        proxy.swallow_reply(matching=b"UpdateItem")
        assert store.renew([lease]) == []
        assert known(store).remaining > 20
        store.settle(lease, DONE, ttl=60)
        proxy.swallow_reply(matching=b"UpdateItem")
        assert store.mark_dispatched(KEY, "a")
        assert proxy.swallowed == 2
        assert known(store).dispatched == {"a"}

    def test_a_renewal_that_arrives_late_does_not_shorten_the_lease(
        self, store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was given up when no answer came, and the network delivers it after the one that was sent next."""
        lease = take(store)
        age(store, KEY, 50)
        ticks, late = store._records.clock.ticks, []
        with monkeypatch.context() as patch:
            patch.setattr(store._records.clock, "ticks", lambda: ticks() - 30 * SECOND)
            patch.setattr(store._table, "update", lambda *args, **options: late.append((args, options)))
            store.renew([lease])
        assert store.renew([lease]) == []
        ((args, options),) = late
        with pytest.raises(ConditionFailed):
            store._table.update(*args, **options)
        assert known(store).remaining > 20

    def test_a_waiting_copy_is_noted_once(self, store: DynamoDBStore, proxy: Proxy) -> None:
        take(store)
        proxy.swallow_reply(matching=b"UpdateItem")
        waiting = claim(task_id="b", copy=1, token="x")
        assert not isinstance(store.acquire(waiting), Lease)
        assert proxy.swallowed == 1

    def test_a_claim_whose_reply_was_lost_twice_is_unreachable_and_granted_when_it_is_asked_for_again(
        self, store: DynamoDBStore, proxy: Proxy
    ) -> None:
        proxy.swallow_reply(2, matching=b"PutItem")
        asked = claim()
        with pytest.raises(StoreUnreachable):
            store.acquire(asked)
        lease = store.acquire(asked)
        assert isinstance(lease, Lease)
        assert (lease.taken_over, lease.crashes) == (False, 0)

    def test_a_settle_whose_reply_was_lost_twice_is_asked_for_again(self, store: DynamoDBStore, proxy: Proxy) -> None:
        lease = take(store)
        proxy.swallow_reply(2, matching=b"PutItem")
        with pytest.raises(StoreUnreachable):
            store.settle(lease, DONE, ttl=60)
        store.settle(lease, DONE, ttl=60)
        assert proxy.swallowed == 2
        with pytest.raises(LeaseLost):
            store.settle(Lease(claim(), lease.fence + 1), DONE, ttl=60)


class TestAReplyThatIsCutOff:
    """botocore takes a body that is empty or ends in the middle for an answer that says nothing: "no such item"."""

    @pytest.fixture
    def store(self, dynamodb_server: DynamoServer, fresh_table: str) -> Iterator[DynamoDBStore]:
        server = DynamoDBStore.from_url(dynamodb_server.url(fresh_table))
        wait_until(lambda: serves(server), message="the store to serve")
        yield server
        server.close()

    @contextmanager
    def cutting(self, store: DynamoDBStore, kept: float, times: int) -> Iterator[None]:
        """Have so many replies end after this part of their body, with the headers that were sent before it."""
        left = [times]
        send = store._table.client()._endpoint.http_session.send

        def cut(request: Any) -> Any:
            answer = send(request)
            if left[0]:
                left[0] -= 1
                body = answer.content
                assert int(answer.headers["content-length"]) == len(body)
                return AWSResponse(request.url, answer.status_code, answer.headers, Raw(body[: int(kept * len(body))]))
            return answer

        store._table.client()._endpoint.http_session.send = cut
        try:
            yield
        finally:
            store._table.client()._endpoint.http_session.send = send

    @pytest.mark.parametrize("kept", [0, 0.5, 0.99])
    def test_a_record_is_not_said_to_be_gone(self, store: DynamoDBStore, kept: float) -> None:
        take(store)
        with self.cutting(store, kept, 1):
            assert known(store).state is State.IN_PROGRESS
        with self.cutting(store, kept, 2), pytest.raises(StoreUnreachable, match="closed"):
            store.get(KEY)

    def test_one_whose_length_was_not_said_is_found_out_wherever_it_ends(self, store: DynamoDBStore) -> None:
        """As from an HTTP/1.0 proxy, which tells the end of a reply by closing the connection."""
        take(store)
        body = json.dumps({"Item": store._table.read(KEY)}).encode()
        parts = [body[: end + 1] for end, letter in enumerate(body[:-1]) if letter == ord("}")]
        assert len(parts) > 3
        for part in parts:
            answer = AWSResponse("", 200, {"content-type": "application/x-amz-json-1.0"}, Raw(part))
            events = store._table.client().meta.events
            events.register("before-send.dynamodb", lambda answer=answer, **_: answer, unique_id="part")
            try:
                with pytest.raises(StoreUnreachable, match="closed"):
                    store.get(KEY)
            finally:
                events.unregister("before-send.dynamodb", unique_id="part")

    @pytest.mark.parametrize("name", VERBS)
    def test_no_verb_takes_it_for_an_answer(self, store: DynamoDBStore, name: str) -> None:
        call = verb(store, name)
        with self.cutting(store, 0, 100), pytest.raises(StoreUnreachable, match="closed"):
            call()

    def test_a_write_whose_reply_was_cut_off_is_found_done(self, store: DynamoDBStore) -> None:
        with self.cutting(store, 0, 1):
            lease = take(store)
        with self.cutting(store, 0, 1):
            store.settle(lease, DONE, ttl=600)
        assert known(store).state is State.COMPLETED


def serves(store: DynamoDBStore) -> bool:
    try:
        store.ping()
    except StoreError:
        return False
    return True
