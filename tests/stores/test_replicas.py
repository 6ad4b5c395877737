"""Claims that replicas must confirm, on a real server with a replica behind a proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery_idempotent import ConfigurationError, StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Refusal, State, Verdict, open_store
from celery_idempotent.stores.records import new_owner
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.store import Replicas
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

KEY = "idem:shop.charge:ORD-1"


def claim(key: str = KEY, task_id: str = "") -> Claim:
    return Claim(key, new_owner(), lease_ttl=60.0, keep_ttl=3600.0, task_id=task_id)


def granted(store: RedisStore, wanted: Claim) -> Lease | Refusal:
    """Claim until a replica confirms it in time, as a delivery does: on a busy machine it may come too late, once."""
    found: list[Lease | Refusal] = []

    def confirmed() -> bool:
        with suppress(StoreUnreachable):
            found.append(store.acquire(wanted))
        return bool(found)

    wait_until(confirmed, 20, "a replica that confirms a claim")
    return found[0]


class Pair:
    """A server and its replica, which reaches it through a proxy."""

    def __init__(self, main: RedisServer, replica: RedisServer, link: Proxy) -> None:
        self.main, self.replica, self.link = main, replica, link

    def wait_for_replica(self) -> None:
        def follows() -> bool:
            with self.main.client() as client:
                return client.execute_command("WAIT", 1, 100) == 1

        wait_until(follows, 20, "the replica to follow")

    def cut(self) -> None:
        """Let nothing through between the two; each side goes on believing in the other."""
        self.link.partition()


@pytest.fixture
def pair(own_redis: Callable[..., RedisServer], proxied: Callable[[int], Proxy]) -> Pair:
    main = own_redis(repl_timeout="60", repl_diskless_sync="yes", repl_diskless_sync_delay="0")
    link = proxied(main.port)
    pair = Pair(main, own_redis(replicaof=f"127.0.0.1 {link.port}"), link)
    pair.wait_for_replica()
    return pair


@pytest.fixture
def store(pair: Pair) -> Iterator[RedisStore]:
    store = RedisStore.from_url(pair.main.url(), wait_replicas=1)
    yield store
    store.close()


def calls(server: RedisServer, command: str) -> int:
    with server.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


def test_a_claim_that_the_replica_has_is_a_lease(store: RedisStore, pair: Pair) -> None:
    lease = granted(store, claim())
    assert isinstance(lease, Lease)
    with pair.replica.client() as replica:
        assert replica.hget(KEY, "owner") == lease.owner.encode()


def test_a_claim_that_no_replica_has_is_refused_and_given_back(store: RedisStore, pair: Pair) -> None:
    granted(store, claim("warm"))
    pair.cut()
    with pytest.raises(StoreUnreachable, match=r"wait_replicas=1 needs 1, and 0 confirmed within 0.5 s"):
        store.acquire(claim())
    record = store.get(KEY)
    assert record is not None
    assert (record.state, record.crashes) == (State.RELEASED, 0)
    pair.link.heal()
    pair.wait_for_replica()
    assert isinstance(granted(store, claim()), Lease)


@pytest.mark.parametrize("count", [1, 2])
def test_a_renewal_that_no_replica_has_extends_no_trust(store: RedisStore, pair: Pair, count: int) -> None:
    answers = [granted(store, claim(f"{KEY}-{number}")) for number in range(count)]
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(leases) == count
    assert store.renew(leases) == []
    pair.cut()
    with pytest.raises(StoreUnreachable, match="Too few replicas"):
        store.renew(leases)


def test_leases_whose_data_is_gone_are_restored_also_while_no_replica_is_there(store: RedisStore, pair: Pair) -> None:
    """Once there is one again, it may be a claim that comes first, and it must not be granted."""
    leases = [granted(store, claim(f"{KEY}-{number}")) for number in range(3)]
    pair.cut()
    with pair.main.client() as client:
        client.flushall()
    with pytest.raises(StoreUnreachable, match="Too few replicas"):
        store.renew([lease for lease in leases if isinstance(lease, Lease)])
    assert {record.key for record in store.scan()} == {f"{KEY}-{number}" for number in range(3)}


def test_a_replay_needs_no_replica(store: RedisStore, pair: Pair) -> None:
    lease = granted(store, claim())
    assert isinstance(lease, Lease)
    store.settle(lease, Outcome(State.COMPLETED, b'json:"done"'), ttl=60)
    pair.cut()
    found = store.acquire(claim())
    assert isinstance(found, Refusal)
    assert found.verdict is Verdict.COMPLETED


def test_more_replicas_than_there_are_confirm_nothing(pair: Pair) -> None:
    store = RedisStore.from_url(pair.main.url(), wait_replicas=2)
    with pytest.raises(StoreUnreachable, match=r"needs 2, and 1 confirmed"):
        store.acquire(claim())
    store.close()


@pytest.mark.nightly
def test_a_script_that_the_server_forgot_is_sent_again_with_its_wait(store: RedisStore, pair: Pair) -> None:
    with pair.main.client() as client:
        client.script_flush()
    assert isinstance(granted(store, claim()), Lease)


def test_the_wait_costs_no_round_trip_of_its_own(store: RedisStore, pair: Pair) -> None:
    granted(store, claim("warm"))
    before = calls(pair.main, "wait")
    sent: list[bytes] = []
    [client] = store._connections._pool.idle
    connection = client.connection
    send = connection.send_packed_command
    connection.send_packed_command = lambda command, **options: (sent.append(command), send(command, **options))
    assert isinstance(store.acquire(claim()), Lease)
    assert len(sent) == 1
    assert calls(pair.main, "wait") == before + 1


def test_without_the_option_no_replica_is_asked(pair: Pair) -> None:
    before = calls(pair.main, "wait")
    store = RedisStore.from_url(pair.main.url())
    assert isinstance(store.acquire(claim()), Lease)
    assert calls(pair.main, "wait") == before
    store.close()


@pytest.mark.parametrize(
    ("url", "rest", "said"),
    [
        ("redis://h:1/2", "redis://h:1/2", None),
        ("redis://h:1/2?wait_replicas=1", "redis://h:1/2", 1),
        (
            "rediss://u:p@h/0?ssl_cert_reqs=none&wait_replicas=2&client_name=x",
            "rediss://u:p@h/0?ssl_cert_reqs=none&client_name=x",
            2,
        ),
        ("unix:///run/redis.sock?db=1&wait_replicas=0", "unix:///run/redis.sock?db=1", 0),
    ],
)
def test_a_url_may_carry_the_option(url: str, rest: str, said: int | None) -> None:
    assert Replicas.in_url(url) == (rest, said)


def test_the_option_of_a_url_reaches_the_store(pair: Pair) -> None:
    store = open_store(f"{pair.main.url()}?wait_replicas=2")
    with pytest.raises(StoreUnreachable, match="wait_replicas=2"):
        store.acquire(claim())
    store.close()


@pytest.mark.parametrize("wrong", [-1, "1", 1.5, True, None])
def test_what_is_no_number_of_replicas_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected wait_replicas to be a number of replicas"):
        RedisStore(redis.Redis(), wait_replicas=wrong)


@pytest.mark.parametrize("wrong", ["x", "-1", ""])
def test_what_is_no_number_of_replicas_is_refused_in_a_url_too(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="Expected wait_replicas to be a number of replicas"):
        open_store(f"redis://h/0?wait_replicas={wrong}")


def test_a_client_of_several_nodes_is_refused_with_the_option() -> None:
    class Cluster:
        def execute_command(self, *command: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="several nodes"):
        RedisStore(Cluster(), wait_replicas=1)  # type: ignore[arg-type]
