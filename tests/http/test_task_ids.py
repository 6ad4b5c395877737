"""Tasks that a guarded request publishes: each run of the request publishes the same ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery import Celery, _state, chain, chord, group
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError
from starlette.concurrency import run_in_threadpool

from celery_idempotent import IdempotentTask, current_lease, idempotent
from celery_idempotent.celery import propagation
from celery_idempotent.cli.explain import describe_event
from celery_idempotent.core.history import history
from celery_idempotent.http import IdempotencyMiddleware, Response
from celery_idempotent.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi, request_wsgi

Publish = Callable[[], Any]


class Shop:
    """An app with tasks, and what was published of them."""

    def __init__(self) -> None:
        self.app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.store = MemoryStore()
        self.app.conf.idempotency_store = self.store
        self.sent: list[Any] = []
        declare: Any = self.app.task
        self.send = declare(base=IdempotentTask, shared=False, name="send")(send)
        self.charge = declare(base=IdempotentTask, shared=False, name="charge", idempotency={"key": "order"})(charge)
        self.plain = declare(shared=False, name="plain")(send)

    def note(self, sender: Any = None, headers: Any = None, body: Any = None, **_: Any) -> None:
        if not sender.startswith("celery."):  # whose own have none to be the same
            embedded = body[2]
            steps = [ids_of(step) for step in embedded["chain"] or ()]
            body_of_chord = embedded["chord"] and ids_of(embedded["chord"])
            sending = (headers.get("idempotency") or {}).get("sending")
            self.sent.append((sender, headers["id"], headers["group"], steps, body_of_chord, sending))

    def run(
        self,
        publish: Publish,
        key: str = "k",
        scope: str = "anna",
        body: bytes = b"",
        store: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Return what a request publishes that is killed after that: nothing of it is remembered."""

        def app(environ: Any, start: Any) -> list[bytes]:
            publish()
            start("503 Service Unavailable", [])
            return [b""]

        before = len(self.sent)
        made = WsgiMiddleware(app, store=store or self.store, scope=lambda _: scope, **options)
        assert request_wsgi(made, key, body).status == 503
        return self.sent[before:]

    def twice(self, publish: Publish) -> list[Any]:
        """Return what each of two runs of a request publishes."""
        first, second = self.run(publish), self.run(publish)
        assert first == second
        return first


def send(*args: object) -> None:
    """A task without a key of its own."""


def charge(order: str, note: str = "") -> None:
    """A task with a key."""


def ids_of(signature: Any) -> Any:
    """Return all ids that a signature has."""
    found = [signature["options"].get("task_id")]
    for members in (signature["kwargs"].get(name) for name in ("tasks", "header", "body")):
        found += [ids_of(members)] if isinstance(members, dict) else [ids_of(each) for each in members or ()]
    return found


def ids(sent: list[Any]) -> list[str]:
    return [entry[1] for entry in sent]


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    before_task_publish.connect(shop.note, weak=False)
    before = _state.get_current_app()
    shop.app.set_current()  # a chord of chains has no other in Celery 5.4
    yield shop
    before.set_current()
    before_task_publish.disconnect(shop.note)
    shop.app.close()


# -- calls -------------------------------------------------------------------------------------------------------------


def test_each_run_of_a_request_publishes_the_same_ids_and_equal_calls_have_their_own(shop: Shop) -> None:
    sent = shop.twice(lambda: (shop.send.delay(1), shop.send.delay(1), shop.send.delay(2), shop.charge.delay("7")))
    assert len(set(ids(sent))) == 4


def test_requests_keys_and_callers_have_ids_of_their_own(shop: Shop) -> None:
    others: list[dict[str, Any]] = [{}, {"key": "l"}, {"scope": "ben"}, {"name": "b"}, {"body": b"corrected"}]
    calls = [shop.run(lambda: shop.send.delay(1), **other) for other in others]
    assert len({entry[1] for sent in calls for entry in sent}) == 5


def test_a_request_that_runs_without_its_store_publishes_the_same_ids(shop: Shop) -> None:
    with_store = shop.run(lambda: shop.send.delay(1))
    down = "redis://127.0.0.1:1/0"
    assert shop.run(lambda: shop.send.delay(1), store=down, on_store_error="run") == with_store


def test_a_call_has_its_id_whatever_comes_before_it(shop: Shop) -> None:
    first = shop.run(lambda: (shop.send.delay(1), shop.send.delay(2), group(shop.send.si(3)).delay()))
    second = shop.run(lambda: (group(shop.send.si(3)).delay(), shop.send.delay(2), shop.send.delay(1)))
    assert sorted(map(repr, first)) == sorted(map(repr, second))


def test_arguments_are_compared_by_what_they_name(shop: Shop) -> None:
    positional = shop.run(lambda: shop.charge.delay("7", "card"))
    assert shop.run(lambda: shop.charge.apply_async((), {"note": "card", "order": "7"})) == positional
    assert shop.run(lambda: shop.charge.delay("7", "cash")) != positional


def test_what_has_a_key_is_told_apart_by_it(shop: Shop) -> None:
    drawn = iter(range(10))
    sent = shop.run(lambda: shop.send.apply_async((next(drawn),), idempotency_key="x"))
    assert ids(shop.run(lambda: shop.send.apply_async((next(drawn),), idempotency_key="x"))) != ids(sent)
    keyed = shop.run(lambda: shop.charge.delay("7"))
    assert ids(shop.run(lambda: shop.charge.delay("8"))) != ids(keyed)


def test_a_given_task_id_is_kept_and_its_errbacks_are_of_one_sending(shop: Shop) -> None:
    error = shop.send.si("failed")
    sent = shop.twice(lambda: shop.send.apply_async((1,), task_id="mine", link_error=error))
    assert ids(sent) == ["mine"]
    (own,) = shop.twice(lambda: shop.send.apply_async((1,), link_error=error))
    assert own[5]
    assert own[5] != sent[0][5]


def test_a_call_that_the_broker_did_not_take_has_the_same_id_when_it_is_made_again(shop: Shop) -> None:
    def broken(**_: Any) -> None:
        raise OperationalError

    def publish() -> None:
        shop.send.delay(1)
        with pytest.raises(OperationalError):
            shop.send.apply_async((1,), router=type("Router", (), {"route": staticmethod(lambda *_: broken())}))
        shop.send.delay(1)

    assert shop.run(publish) == shop.run(lambda: (shop.send.delay(1), shop.send.delay(1)))


def test_arguments_that_cannot_be_compared_get_a_random_id(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="celery_idempotent"):
        first, second = (shop.run(lambda: shop.send.apply_async((iter("a"),), serializer="pickle")) for _ in range(2))
        assert ids(first) != ids(second)
        members = [shop.send.si(iter("a")), shop.send.si(1)]
        first, second = (shop.run(lambda: group(members).apply_async(serializer="pickle")) for _ in range(2))
        assert not {*ids(first)} & {*ids(second)}
    lines = [line.getMessage().partition(" under")[0] for line in caplog.records]
    assert [line for line in lines if line.endswith(" is published")] == [  # a store's thread may have its own to say
        *["send is published"] * 2,
        *["celery.group is published"] * 2,
    ]


def test_wrong_arguments_are_celerys_to_refuse(shop: Shop) -> None:
    def publish() -> None:
        with pytest.raises(TypeError, match="argument"):
            shop.charge.delay()

    assert shop.run(publish) == []


def test_propagation_can_be_switched_off(shop: Shop) -> None:
    calls = [shop.run(lambda: shop.send.delay(1), propagate=False) for _ in range(2)]
    calls += [shop.run(lambda: chain(shop.send.si(1), shop.send.si(2)).delay(), propagate=False) for _ in range(2)]
    assert len({entry[1] for sent in calls for entry in sent}) == 4


def test_a_request_without_a_key_publishes_random_ids(shop: Shop) -> None:
    def app(environ: Any, start: Any) -> list[bytes]:
        shop.send.delay(1)
        start("200 OK", [])
        return [b""]

    made = WsgiMiddleware(app, store=shop.store, scope=None)
    for _ in range(2):
        assert request_wsgi(made, None).status == 200
    assert len(set(ids(shop.sent))) == 2


# -- canvases ----------------------------------------------------------------------------------------------------------

CANVASES: dict[str, Callable[[Any], Any]] = {
    "chain": lambda s: chain(s(1), s(2), s(3)),
    "group": lambda s: group(s(1), s(1), s(2)),
    "generator": lambda s: group(s(i) for i in range(3)),
    "chord": lambda s: chord([s(1), s(2)], s(3)),
    "chord of a generator": lambda s: chord((s(i) for i in range(2)), s(3)),
    "group in a chain": lambda s: chain(s(0), group(s(1), s(2)), s(3), group(s(4), s(5))),
    "chains in a chord": lambda s: chord([chain(s(1), s(2)), chain(s(3), s(4))], chain(s(5), s(6))),
    "chord in a group": lambda s: group(chain(s(0), chord([s(1), s(2)], s(3))), s(9)),
    "links": lambda s: chain(s(1).on_error(s("e")), s(2)).on_error(s("f")),
}


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_has_the_same_ids_on_each_run(shop: Shop, name: str) -> None:
    def publish() -> None:
        results.append([CANVASES[name](shop.send.si).apply_async() for _ in range(2)])

    results: list[list[Any]] = []
    sent = shop.twice(publish)
    (one, two), again = ([result.as_tuple() for result in run] for run in results)
    assert [one, two] == again
    assert one != two
    assert all(ids(sent))
    assert len(set(ids(sent))) == len(sent)
    assert None not in [step[0] for entry in sent for step in entry[3]]


def test_a_canvas_of_other_arguments_has_other_ids(shop: Shop) -> None:
    runs = [shop.run(lambda end=end: chain(shop.send.si(1), shop.send.si(end)).delay()) for end in (2, 3)]  # type: ignore[misc]
    runs.append(shop.run(lambda: chord([shop.send.s()])(shop.send.si(4))))
    runs.append(shop.run(lambda: chord([shop.send.s()])(shop.send.si(5))))
    runs.append(shop.run(lambda: group(shop.send.s()).delay(1)))
    runs.append(shop.run(lambda: group(shop.send.s()).delay(2)))
    assert len({entry[1] for sent in runs for entry in sent}) == 6


def test_a_signature_that_is_frozen_before_it_is_published_has_the_same_id_on_each_run(shop: Shop) -> None:
    frozen: list[str] = []

    def publish() -> None:
        steps = chain(shop.send.si(1), shop.send.si(2))
        frozen.append(steps.freeze().id)
        assert steps.apply_async().id == frozen[-1]
        one = shop.send.si(1)
        frozen.append(one.freeze().id)
        assert one.apply_async().id == frozen[-1]

    shop.twice(publish)
    assert frozen[:2] == frozen[2:]
    assert len(set(frozen)) == 2


def test_outside_of_a_request_ids_are_random(shop: Shop) -> None:
    for name in CANVASES:
        first, second = (
            [CANVASES[name](shop.send.si).apply_async(), shop.sent[:], shop.sent.clear()] for _ in range(2)
        )
        assert first[0].id != second[0].id
        assert not {*ids(first[1])} & {*ids(second[1])}


def test_the_hooks_are_hung_once() -> None:
    hooks = [propagation.Signature.freeze, propagation.celery.canvas.uuid, propagation.group.apply_async]
    propagation.derive_canvas_ids()
    assert hooks == [propagation.Signature.freeze, propagation.celery.canvas.uuid, propagation.group.apply_async]


# -- where -------------------------------------------------------------------------------------------------------------


def test_threads_and_tasks_of_asyncio_belong_to_the_request_and_pools_do_not(shop: Shop) -> None:
    async def publish() -> None:
        shop.send.delay("coroutine")
        await asyncio.to_thread(shop.send.delay, "to_thread")
        await run_in_threadpool(shop.send.delay, "sync endpoint of Starlette")
        await sync_to_async(shop.send.delay)("sync view of Django")
        await asyncio.create_task(in_task())
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, shop.send.delay, "executor")

    async def in_task() -> None:
        shop.send.delay("task")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await publish()
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        shop.send.delay("after the response")

    made = IdempotencyMiddleware(app, store=shop.store, scope=None)
    runs = []
    for _ in range(2):
        asyncio.run(request_asgi(made))
        runs.append(ids(shop.sent))
        shop.sent.clear()
    same = [one == other for one, other in zip(*runs, strict=True)]
    assert same == [True] * 5 + [False, True]


@pytest.mark.parametrize("options", [{}, {"base": IdempotentTask}], ids=["plain", "idempotent"])
def test_what_the_body_of_an_eager_task_publishes_has_random_ids(shop: Shop, options: Any) -> None:
    @shop.app.task(shared=False, name="outer", **options)
    def outer() -> None:
        shop.send.delay(1)

    first, second = (shop.run(outer.apply) for _ in range(2))
    derived = shop.run(lambda: shop.send.delay(1))
    assert len({*ids(first), *ids(second), *ids(derived)}) == 3


def test_an_eager_call_has_a_derived_id_and_takes_effect_once(shop: Shop) -> None:
    @shop.app.task(base=IdempotentTask, shared=False, name="eager", bind=True)
    def eager(self: Any) -> None:
        seen.append(self.request.id)

    seen: list[str] = []
    shop.app.conf.task_always_eager = True
    for _ in range(2):
        shop.run(eager.delay)
    assert len(seen) == 1


def test_a_function_within_a_request_publishes_ids_that_follow_from_both(shop: Shop) -> None:
    @idempotent(store=shop.store, key="order")
    def pay(order: str) -> None:
        shop.send.delay(1)
        if fails:
            raise ValueError(order)

    def publish(call: bool = True) -> None:
        try:
            pay("7") if call else None
        except ValueError:
            pass
        shop.send.delay(1)

    fails = True
    first, second = shop.run(publish), shop.run(publish)
    assert first == second
    fails = False
    shop.run(publish)
    # It is done, and does not publish again; what comes after it keeps its id.
    assert shop.run(publish) == first[1:]
    assert len(set(ids(first))) == 2
    shop.sent.clear()
    pay("8")  # outside of a request
    assert current_lease() is None


# -- what is known of it -----------------------------------------------------------------------------------------------


def test_a_task_that_is_forgotten_before_its_request_is_reported_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    declare: Any = shop.app.task
    short = declare(base=IdempotentTask, shared=False, name="short", idempotency={"result_ttl": "1h"})(send)
    later = declare(base=IdempotentTask, shared=False, name="later", idempotency={"result_ttl": 0})(send)
    with caplog.at_level(logging.WARNING, logger="celery_idempotent"):
        for _ in range(2):
            shop.run(lambda: (short.delay(1), shop.send.delay(1), chain(shop.send.si(1), later.si(1)).delay()))
    assert [line.getMessage().partition(":")[0] for line in caplog.records] == [
        "short is remembered for 60 min, and a request that publishes it for 24 h",
        "later is remembered for 0 s, and a request that publishes it for 24 h",
    ]


def test_the_history_of_a_request_has_the_ids_that_it_published(shop: Shop) -> None:
    sent = shop.run(lambda: (shop.send.delay(1), chain(shop.plain.si(1), shop.send.si(2)).delay()))
    assert history.flush()
    (record,) = shop.store.scan()
    found = [facts_of(entry.text) for entry in shop.store.history(record.key)]
    lines = [describe_event(facts) for facts in found if facts["event"] == "Published"]
    assert lines == [f"published send as {sent[0][1]}", f"published celery.chain as {sent[1][3][0][0]}"]


# -- the answer --------------------------------------------------------------------------------------------------------


def test_a_202_has_where_to_poll_in_the_way_of_each_framework(shop: Shop) -> None:
    from celery_idempotent.http import accepted as for_starlette
    from celery_idempotent.http.response import as_response
    from celery_idempotent.http.wsgi import accepted as for_flask

    result = shop.send.apply_async((1,), task_id="a/b")
    response = for_starlette(result, "/jobs/{id}", retry_after=2)
    assert as_response(response).body == b'{"id":"a/b","location":"/jobs/a%2Fb"}'
    assert (response.status_code, response.headers["location"], response.headers["retry-after"]) == (
        202,
        "/jobs/a%2Fb",
        "2",
    )
    assert for_flask(result, "https://shop.test/jobs/1") == (
        {"id": "a/b", "location": "https://shop.test/jobs/1"},
        202,
        {"Location": "https://shop.test/jobs/1", "Cache-Control": "no-store"},
    )
    members = group(shop.send.si(1), shop.send.si(2)).delay()
    body, _, _ = for_flask(members, "/groups/{id}")
    assert shop.app.GroupResult.restore(body["id"]) == members
    assert isinstance(as_response(response), Response)
