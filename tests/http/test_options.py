"""The options of the middlewares: wrong ones are refused when the application is made, and each does what it says."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import add_hook, current_lease, remove_hook
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.events import Acquired, Completed, Event, KeyReused, Replayed
from celery_idempotent.http import UNGUARDED, IdempotencyMiddleware, Response, wsgi
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi, request_wsgi

NO_COROUTINES = ("paths", "exempt", "remember", "header", "fingerprint")


async def never(*_: Any) -> bool:
    return False


class Never:
    async def __call__(self, path: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scope": None}, "store: expected a store, its URL"),
        ({"store": "memory://"}, "scope: expected who calls"),
        ({"scoope": None}, "did you mean 'scope'"),
        ({"colour": 1}, "expected options of the middleware"),
        ({"scope": 3}, "scope: expected a callable over the request"),
        ({"methods": "POST"}, "methods: expected methods in upper case"),
        ({"methods": ["GET"]}, "methods that change something, got ['GET']: leave them out, since they need no key"),
        ({"paths": "/orders"}, "paths: expected paths that begin with a slash"),
        ({"exempt": ["orders"]}, "exempt: expected paths"),
        (
            {"paths": ["/carts", "/orders/{id}/pay"]},
            """got '/orders/{id}/pay': write ["/orders"], which""",
        ),
        ({"paths": ["/orders/<int:id>"]}, """got '/orders/<int:id>': write ["/orders"], which stands for all below"""),
        (
            {"paths": ["/orders/:id"]},
            """got '/orders/:id': write ["/orders"], which stands for all""",
        ),
        ({"exempt": ["/*"]}, """exempt: expected paths and no patterns, got '/*': write ["/"], which stands"""),
        ({"exempt": ["/login?next=/"]}, """got '/login?next=/': write ["/"], which"""),
        ({"methods": []}, "methods: expected one method at least, got []: leave the option out"),
        ({"paths": []}, "paths: expected one path at least, got []: leave the option out"),
        *[({name: never}, f"{name}: expected a function that is no coroutine") for name in NO_COROUTINES],
        ({"exempt": Never()}, "exempt: expected a function that is no coroutine"),
        ({"header": "HTTP_IDEMPOTENCY_KEY"}, "as it is sent, got 'HTTP_IDEMPOTENCY_KEY': write 'Idempotency-Key'"),
        ({"scope": "X_Api_Key"}, "write 'X-Api-Key'"),
        ({"fingerprint_headers": ["Accept", "X_Total"]}, "write 'X-Total'"),
        ({"fingerprint": "body"}, "fingerprint: expected one of"),
        ({"fingerprint_headers": "Accept"}, "fingerprint_headers: expected names of headers"),
        ({"on_conflict": "defer"}, "on_conflict: expected one of 'raise', 'wait'"),
        ({"on_store_error": "maybe"}, "on_store_error: expected one of"),
        ({"settle_at": "end"}, "settle_at: expected one of"),
        ({"remember": "all"}, "remember: expected a callable"),
        ({"header": ""}, "header: expected the name of a header"),
        ({"header": "Idempotency Key"}, "header: expected the name of a header"),
        ({"header": "Idempotency-Key:"}, 'write "Idempotency-Key"'),
        ({"scope": "X Api Key"}, "scope: expected a callable over the request, the name of a header"),
        ({"keep_headers": ["X-Total", "Link: next"]}, "keep_headers: expected names of headers"),
        ({"result_ttl": 0}, "result_ttl: expected a duration from 0.5 s"),
        ({"lease_ttl": "soon"}, "lease_ttl: expected a duration"),
        ({"request_max_bytes": "big"}, "request_max_bytes: expected a size"),
        ({"name": ""}, "name: expected a text"),
    ],
)
def test_a_wrong_option_is_refused_when_the_application_is_made(options: dict[str, Any], said: str) -> None:
    whole = options if len(options) == 1 and options.keys() <= {"store"} else {"scope": None, "store": "memory://"}
    given = options if options == {"scope": None} else {**whole, **options}
    for middleware in (IdempotencyMiddleware, wsgi.IdempotencyMiddleware):
        with pytest.raises(ConfigurationError, match="expected") as error:
            middleware(lambda *_: None, **given)  # type: ignore[arg-type,return-value]
        assert said in str(error.value)


def test_the_middleware_for_wsgi_refuses_an_application_for_asgi() -> None:
    async def function(scope: Any, receive: Any, send: Any) -> None: ...

    class Application:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    for app in (function, Application()):
        with pytest.raises(
            ConfigurationError, match=r"got .*, which is one for ASGI\. Write from celery_idempotent\.http "
        ):
            wsgi.IdempotencyMiddleware(app, store="memory://", scope=None)  # type: ignore[arg-type]


def test_the_middleware_for_asgi_refuses_an_application_for_wsgi() -> None:
    def function(environ: Any, start_response: Any) -> list[bytes]: ...

    for app in (function, Shop().wsgi):
        with pytest.raises(
            ConfigurationError, match=r"got .*, which is one for WSGI\. Write from celery_idempotent\.http\.wsgi "
        ):
            IdempotencyMiddleware(app, store="memory://", scope=None)  # type: ignore[arg-type]


def test_what_django_gives_to_its_middlewares_is_no_application() -> None:
    @functools.wraps(Shop().wsgi)  # as Django wraps a view
    def view(request: Any) -> None: ...

    @functools.wraps(Shop().asgi)
    async def async_view(request: Any) -> None: ...

    for middleware in (wsgi.IdempotencyMiddleware, IdempotencyMiddleware):
        for inner in (view, async_view):
            with pytest.raises(
                ConfigurationError,
                match=r"takes a request alone.*Write \"celery_idempotent\.http\.django\.Idem.* in MIDDLEWARE",
            ):
                middleware(inner)  # type: ignore[arg-type, call-arg]


def test_an_application_of_aiohttp_or_tornado_is_refused_with_what_to_write_instead() -> None:
    class Aiohttp:
        def __call__(self) -> Aiohttp:
            return self

    class Tornado:
        def __call__(self, request: Any) -> None: ...

    for middleware in (wsgi.IdempotencyMiddleware, IdempotencyMiddleware):
        for app in (Aiohttp(), Tornado()):
            with pytest.raises(ConfigurationError, match=r"In aiohttp and Tornado, write @idempotent"):
                middleware(app, store="memory://", scope=None)  # type: ignore[arg-type]


def test_the_middleware_for_asgi_takes_an_application_that_shows_no_signature_or_that_of_another() -> None:
    class Hidden:
        __signature__ = "none"

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    @functools.wraps(Shop().wsgi)
    async def adapted(scope: Any, receive: Any, send: Any) -> None: ...

    for app in (Hidden(), adapted):
        IdempotencyMiddleware(app, store="memory://", scope=None)


def test_a_guarded_request_outside_of_asyncio_is_an_error_that_says_so() -> None:
    shop = Shop()
    app = IdempotencyMiddleware(shop.asgi, store="memory://", scope=None)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
    with pytest.raises(ConfigurationError, match=r"asyncio's event loop, got none.* Run it on asyncio"):
        app(scope, None, None).send(None)  # type: ignore[arg-type, attr-defined]
    assert shop.runs == 0


class Shop:
    """An application for WSGI and ASGI that counts its runs."""

    def __init__(self, status: int = 201, work: Callable[[], Any] = lambda: None) -> None:
        self.status, self.work, self.runs = status, work, 0

    def wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        self.runs += 1
        run = self.runs
        self.work()
        start_response(f"{self.status} X", [("Content-Type", "text/plain")])
        return [b"run %d" % run]

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        run = self.runs
        await asyncio.to_thread(self.work)
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", b"text/plain")]}
        )
        await send({"type": "http.response.body", "body": b"run %d" % run})


@pytest.fixture(params=["asgi", "wsgi"])
def ask(request: pytest.FixtureRequest) -> Callable[..., list[Response]]:
    """A function that sends requests to an application behind the middleware, one after another."""

    def send(shop: Shop, requests: list[dict[str, Any]], **options: Any) -> list[Response]:
        given = {"store": MemoryStore(), "scope": None, **options}
        if request.param == "wsgi":
            app = wsgi.IdempotencyMiddleware(shop.wsgi, **given)
            return [request_wsgi(app, **each) for each in requests]

        async def all_of_them() -> list[Response]:
            app = IdempotencyMiddleware(shop.asgi, **given)
            return [await request_asgi(app, **each) for each in requests]

        return asyncio.run(all_of_them())

    return send


Ask = Callable[..., list[Response]]


def test_a_key_may_be_required(ask: Ask) -> None:
    shop = Shop()
    [reply] = ask(shop, [{"key": None}], required=True)
    assert (reply.status, shop.runs) == (400, 0)
    assert b"key-missing" in reply.body


def test_a_key_may_come_from_elsewhere(ask: Ask) -> None:
    shop = Shop()
    replies = ask(shop, [{"key": None}, {"key": None}], header=lambda request: "event-7")
    assert [reply.body for reply in replies] == [b"run 1"] * 2
    [reply] = ask(Shop(), [{"key": None}], header=lambda request: None, required=True)
    assert reply.status == 400


def test_a_store_that_the_servers_processes_do_not_share_is_warned_of(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    ask(Shop(), [{"key": "a"}, {"key": "b"}])
    assert not caplog.messages
    ask(Shop(), [{"key": "a"}, {"key": "b"}], store="memory://", name="shop")
    [said] = caplog.messages
    assert said.startswith("The middleware shop has the store memory://: each process of its server knows the requests")


@pytest.mark.parametrize("key", [0, 7, b"7", False])
def test_a_key_that_is_no_text_is_an_error_and_lets_nothing_pass(ask: Ask, key: object) -> None:
    shop = Shop()
    with pytest.raises(ConfigurationError, match=f"header: expected .* got {type(key).__name__}: return str"):
        ask(shop, [{"key": None}], header=lambda request: key)
    assert shop.runs == 0
    ask(shop, [{"key": None}], header=lambda request: "")
    assert shop.runs == 1


@pytest.mark.parametrize(("account", "runs"), [(7, 1), ("anna", 1), (UNGUARDED, 2)])
def test_a_scope_gives_the_account(ask: Ask, account: object, runs: int) -> None:
    shop = Shop()
    ask(shop, [{}, {}], scope=lambda request: account)
    assert shop.runs == runs


class Anonymous:
    is_authenticated = False


WITHIN = [("shop", b""), {"shop": 1, "user": None}, ("shop", ("anna", "")), {"shop": 1, "user": Anonymous()}]


@pytest.mark.parametrize(
    "account",
    [None, "", b"", False, Anonymous(), ("shop", None), ["", "anna"], ("shop", Anonymous()), *WITHIN],
)
def test_without_an_account_a_request_is_refused(ask: Ask, account: object) -> None:
    [reply] = ask(Shop(), [{}], scope=lambda request: account)
    assert reply.status == 401


def test_an_account_is_neither_logged_nor_kept(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "celery_idempotent")
    store = MemoryStore()
    seen: list[Event] = []
    add_hook(seen.append)
    try:
        ask(Shop(), [{}, {}, {"body": b"another"}], scope=lambda request: "anna@example.com", store=store)
    finally:
        remove_hook(seen.append)
    assert [type(event) for event in seen] == [Acquired, Completed, Replayed, KeyReused]
    kept = [record.key for record in store.scan()]
    assert len(kept) == 1
    assert "anna" not in f"{kept} {seen} {caplog.text}"


def test_an_account_of_which_no_key_can_be_made_is_an_error(ask: Ask) -> None:
    with pytest.raises(ConfigurationError, match="the account of a verified caller"):
        ask(Shop(), [{}], scope=lambda request: object())
    for account in (True, ("shop", True)):  # as of is_authenticated, which is the same for all
        with pytest.raises(ConfigurationError, match="got True: return its id"):
            ask(Shop(), [{}], scope=lambda request, account=account: account)


@pytest.mark.parametrize("of", [str, lambda user: ("shop", repr(user))])
def test_the_address_of_a_user_is_no_account(ask: Ask, of: Callable[[object], object]) -> None:
    """It would be another one in each process, and for each request."""
    with pytest.raises(ConfigurationError, match=r"got <object object at 0x\w+>: return its id \(the address"):
        ask(Shop(), [{}], scope=lambda request: of(object()))


def test_an_account_in_a_header_is_what_its_client_wrote(ask: Ask) -> None:
    shop, user = Shop(), "<object object at 0x7f3c>"
    request = {"HTTP_X_USER": user, "headers": [(b"x-user", user.encode())]}
    ask(shop, [request, request], scope="X-User")
    assert shop.runs == 1


def test_a_scope_may_be_a_coroutine_in_asgi() -> None:
    async def account(scope: Any) -> str:
        await asyncio.sleep(0)
        return "anna"

    async def twice() -> list[bytes]:
        app = IdempotencyMiddleware(Shop().asgi, store=MemoryStore(), scope=account)
        return [(await request_asgi(app)).body for _ in range(2)]

    assert asyncio.run(twice()) == [b"run 1"] * 2


def test_a_method_in_lower_case_is_the_same(ask: Ask) -> None:
    shop = Shop()
    ask(shop, [{"REQUEST_METHOD": written, "method": written} for written in ("post", "POST", "Post")])
    assert shop.runs == 1


def test_paths_are_those_within_an_application_too(ask: Ask) -> None:
    """Which is mounted somewhere else in production than in its tests."""
    mounted = {"SCRIPT_NAME": "/shop", "PATH_INFO": "/orders", "path": "/shop/orders", "root_path": "/shop"}
    for options, runs in [({"paths": ["/orders"]}, 1), ({"paths": ["/shop"]}, 1), ({"exempt": ["/orders"]}, 2)]:
        shop = Shop()
        ask(shop, [mounted, mounted], **options)
        assert shop.runs == runs


def test_a_middleware_within_the_same_lets_its_request_pass(ask: Ask) -> None:
    outer, shop, options = Shop(), Shop(), {"store": MemoryStore(), "scope": None}
    outer.wsgi = wsgi.IdempotencyMiddleware(shop.wsgi, **options)  # type: ignore[method-assign]
    outer.asgi = IdempotencyMiddleware(shop.asgi, **options)  # type: ignore[method-assign]
    replies = ask(outer, [{}, {}, {"body": b"another"}], **options)
    assert [(reply.status, reply.body) for reply in replies[:2]] == [(201, b"run 1")] * 2
    assert (replies[2].status, shop.runs) == (422, 1)


@pytest.mark.parametrize(("status", "runs"), [(302, 1), (303, 1), (307, 2), (308, 2)])
def test_a_redirection_that_repeats_the_request_is_not_remembered(ask: Ask, status: int, runs: int) -> None:
    """It leads to another address with the same key, or to the same address by https."""
    shop = Shop(status)
    ask(shop, [{}, {}])
    assert shop.runs == runs


def test_who_was_redirected_to_the_last_slash_may_begin_anew(ask: Ask) -> None:
    """Its answer was lost on the way, and it sends all it sent before, the redirected request first."""
    store, early = MemoryStore(), list[Response]()
    bare, slashed, other = ({"PATH_INFO": path, "path": path} for path in ("/orders", "/orders/", "/orders/1"))
    shop = Shop(work=lambda: early.extend(ask(Shop(), [bare], store=store)))
    ask(Shop(307), [bare], store=store)
    ask(shop, [slashed], store=store)
    anew = ask(Shop(), [bare, {**bare, "body": b"another"}, other], store=store)
    assert [(reply.status, reply.body) for reply in anew[:1]] == [(201, b"run 1")]
    assert [reply.status for reply in early + anew] == [409, 201, 422, 422]
    assert shop.runs == 1


def test_paths_may_be_chosen(ask: Ask) -> None:
    for options, runs in [
        ({"paths": ["/orders"]}, 1),
        ({"paths": ["/orders/"]}, 1),
        ({"paths": ["/order"]}, 2),
        ({"paths": ["/"]}, 1),
        ({"exempt": ["/"]}, 2),
    ]:
        shop = Shop()
        ask(shop, [{}, {}], **options)
        assert shop.runs == runs
    shop = Shop()
    ask(shop, [{}, {}], paths=lambda path: path.endswith("rders"))
    assert shop.runs == 1


def test_an_exception_is_raised_to_the_server_and_may_be_remembered(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("handler")

    shop = Shop(work=fail)
    with pytest.raises(ValueError, match="handler"):
        ask(shop, [{}])
    shop = Shop(work=fail)
    replies = ask(shop, [{}, {}], remember=lambda response: True)
    assert ([reply.status for reply in replies], shop.runs) == ([500, 500], 1)
    assert caplog.text.count("ValueError: handler") == 1  # its traceback, of which nobody else knows
    with pytest.raises(ValueError, match="handler"):
        ask(Shop(work=fail), [{}], remember=lambda response: None)


def test_a_word_that_is_none_keeps_no_body(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    assert [reply.status for reply in ask(shop, [{}, {}], remember=lambda response: "facts")] == [201, 409]
    assert shop.runs == 1
    assert "got 'facts', which is taken for \"fact\"" in caplog.text


def test_a_status_may_be_remembered(ask: Ask) -> None:
    shop = Shop(status=500)
    ask(shop, [{}, {}], remember=lambda response: response.status < 600)
    assert shop.runs == 1


def test_bodies_may_be_compared_by_value(ask: Ask) -> None:
    bodies = [b'{"a": 1, "b": [2.0]}', b'{"b":[2],"a":1}', b'{"a": 2}']
    replies = ask(Shop(), [{"body": body} for body in bodies], fingerprint="json")
    assert [reply.status for reply in replies] == [201, 201, 422]


def test_bodies_may_be_compared_by_a_callable_or_not_at_all(ask: Ask) -> None:
    requests = [{"body": b"ab"}, {"body": b"ac"}, {"body": b"b"}]
    replies = ask(Shop(), requests, fingerprint=lambda request, body: body[:1])
    assert [reply.status for reply in replies] == [201, 201, 422]
    shop = Shop()
    replies = ask(shop, [{"body": b"a"}, {"body": b"b"}], fingerprint="headers", request_max_bytes=0)
    assert [reply.body for reply in replies] == [b"run 1"] * 2


@dataclass
class Shortened:
    """As an array of numpy, which shows of many numbers the first and the last."""

    body: bytes

    def __repr__(self) -> str:
        return "Shortened(...)"


def test_what_a_callable_returns_is_compared_by_value_and_not_by_how_it_is_shown(ask: Ask) -> None:
    assert repr({0, 8}) != repr({8, 0})
    requests = [{"body": body} for body in (b"08", b"80", b"00")]
    replies = ask(Shop(), requests, fingerprint=lambda request, body: {digit - ord("0") for digit in body})
    assert [reply.status for reply in replies] == [201, 201, 422]
    replies = ask(Shop(), requests, fingerprint=lambda request, body: Shortened(body))
    assert [reply.status for reply in replies] == [201, 422, 422]


def test_what_cannot_be_compared_is_refused(ask: Ask) -> None:
    with pytest.raises(ConfigurationError, match="fingerprint: expected a callable that returns text"):
        ask(Shop(), [{}], fingerprint=lambda request, body: iter(body))


def test_a_request_is_not_repeated_for_an_option_that_fails(ask: Ask) -> None:
    shop = Shop()
    replies = ask(shop, [{}, {}], remember=lambda response: response.no_such_thing)
    assert [reply.body for reply in replies] == [b"run 1"] * 2
    assert shop.runs == 1


def test_a_response_may_wait_for_the_application_to_return(ask: Ask) -> None:
    shop = Shop()
    replies = ask(shop, [{}, {}], settle_at="return")
    assert [reply.body for reply in replies] == [b"run 1"] * 2


def test_the_store_may_be_that_of_a_celery_app(ask: Ask, redis_url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=redis_url, idempotency_namespace="shop")
    seen: list[str] = []
    shop = Shop(work=lambda: seen.append(getattr(current_lease(), "key", "")))
    ask(shop, [{}, {}], store=None, celery_app=app, scope=lambda request: "anna")
    anna = sha256(b'"anna"').hexdigest()
    assert seen == [f"shop:http:{anna}:k"]


def test_a_store_that_is_down_refuses_or_lets_run(ask: Ask) -> None:
    down = "redis://127.0.0.1:1/0"
    shop = Shop()
    [reply] = ask(shop, [{}], store=down)
    assert (reply.status, shop.runs) == (503, 0)
    assert dict(reply.headers)[b"retry-after"] == b"5"
    [reply] = ask(shop, [{"key": "other"}], store=down, on_store_error="run")
    assert (reply.status, shop.runs) == (201, 1)
    began = time.monotonic()
    [reply] = ask(shop, [{}], store=down, on_store_error="wait", wait_timeout=0.3)
    assert (reply.status, shop.runs) == (503, 1)
    assert time.monotonic() - began >= 0.2


def test_a_duplicate_may_wait_for_the_first() -> None:
    going, shop = threading.Event(), Shop(work=lambda: going.wait(10))
    app = wsgi.IdempotencyMiddleware(shop.wsgi, store=MemoryStore(), scope=None, on_conflict="wait")
    replies: list[Response] = []
    threads = [threading.Thread(target=lambda: replies.append(request_wsgi(app))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    going.set()
    for thread in threads:
        thread.join(20)
    assert [reply.body for reply in replies] == [b"run 1"] * 3
