"""Facts: what an application behind a middleware answers to a request, and to its repetition."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import uuid4

import pytest

from ._http_client import TIMEOUT, Connection, Reply, check, request_bytes

#: Statuses of responses that are the end of their operation, and of those after which the same request runs again.
REMEMBERED = (200, 201, 202, 303, 402, 404, 410, 412, 451)
RELEASED = (400, 401, 403, 405, 406, 408, 409, 413, 415, 422, 425, 428, 429, 500, 503)


@dataclass(frozen=True)
class Call:
    """A request; ``{}`` in its key is the key that the row has for itself."""

    key: str | None = "{}"
    body: bytes = b"body"
    method: str = "POST"
    caller: str = "anna"
    status: int = 201
    path: str = ""  #: below the application's
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """Requests that come one after another, what each is answered, and how often the application ran for them."""

    name: str
    steps: list[tuple[Call, str]]
    runs: int


def multipart(boundary: str, content: str) -> Call:
    """Return the request of a form with one field."""
    body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{content}\r\n--{boundary}--\r\n'
    return Call(body=body.encode(), headers=(("Content-Type", f"multipart/form-data; boundary={boundary}"),))


def compressed(content: bytes, at: int) -> Call:
    """Return the request whose body was compressed at this time."""
    return Call(body=gzip.compress(content, mtime=at), headers=(("Content-Encoding", "gzip"),))


#: What to do where a body without a length does not arrive.
UNREAD = (
    "The application, or its server, reads no body without a length, as Django on WSGI: set reads_chunked = False. "
    "Where it answers such requests with an error, as Bottle on gunicorn, deselect the fact."
)
POST = Call()
MALFORMED = [
    '""',
    '"',
    '"a',
    '"a" "b"',
    "a,b",
    '"a","b"',
    "a b",
    '"a b"',
    "x" * 256,
    '"\\a"',
    "\xfc",
    "sch\xc3\xb6n",
    "a\tb",
]

#: The table. A row that differs from another by a status or a key alone is made in a loop.
ROWS = [
    *(Row(f"{s} is replayed", [(Call(status=s), f"{s}"), (Call(status=s), f"{s} replayed")], 1) for s in REMEMBERED),
    *(Row(f"{s} may be tried again", [(Call(status=s), f"{s}"), (Call(status=s), f"{s}")], 2) for s in RELEASED),
    *(Row(f"{key[:20]!a} is no key", [(Call(key=key), "400 key-malformed")], 0) for key in MALFORMED),
    Row("an empty key", [(Call(key=""), "400 key-malformed")], 0),
    Row("a key of 255 characters", [(Call(key="{:x<255}"), "201"), (Call(key="{:x<255}"), "201 replayed")], 1),
    Row("a key in quotation marks is the bare one", [(POST, "201"), (Call(key='"{}"'), "201 replayed")], 1),
    Row("parameters of a key count nothing", [(POST, "201"), (Call(key='"{}";a=1; b="x"'), "201 replayed")], 1),
    Row("space around a key counts nothing", [(POST, "201"), (Call(key=' "{}" '), "201 replayed")], 1),
    Row("a key with a quotation mark", [(Call(key='"{}\\""'), "201"), (Call(key='"{}\\""'), "201 replayed")], 1),
    Row("keys differ in upper and lower case", [(Call(key="{}a"), "201"), (Call(key="{}A"), "201")], 2),
    Row("the third and fourth are replayed", [(POST, "201"), *([(POST, "201 replayed")] * 3)], 1),
    Row("another key is another operation", [(POST, "201"), (Call(key="{}-2"), "201"), (POST, "201 replayed")], 2),
    Row("GET passes", [(POST, "201"), (Call(method="GET"), "200"), (Call(method="GET"), "200")], 1),
    Row("a key is its caller's own", [(POST, "201"), (Call(caller="bert"), "201"), (POST, "201 replayed")], 2),
    Row("another body", [(POST, "201"), (Call(body=b"other"), "422 key-reused"), (POST, "201 replayed")], 1),
    Row("no body", [(Call(body=b""), "201"), (Call(body=b""), "201 replayed"), (POST, "422 key-reused")], 1),
    Row("another query", [(POST, "201"), (Call(query="&more=1"), "422 key-reused"), (POST, "201 replayed")], 1),
    Row("another path", [(POST, "201"), (Call(path="/other"), "422 key-reused"), (POST, "201 replayed")], 1),
    Row("another method", [(POST, "201"), (Call(method="PATCH"), "422 key-reused"), (POST, "201 replayed")], 1),
    Row(
        "another content type",
        [(POST, "201"), (Call(headers=(("Content-Type", "text/csv"),)), "422 key-reused"), (POST, "201 replayed")],
        1,
    ),
    Row(
        "other headers of the client may differ",
        [(Call(headers=(("User-Agent", "a"), ("X-Trace", "1"))), "201"), (POST, "201 replayed")],
        1,
    ),
    Row(
        "a request that was refused may be corrected",
        [(Call(status=400), "400"), (Call(body=b"corrected"), "201"), (Call(body=b"corrected"), "201 replayed")],
        2,
    ),
    Row(
        "a form is the same with another boundary",
        [
            (multipart("aaa", "1"), "201"),
            (multipart("bbbb", "1"), "201 replayed"),
            (multipart("c", "2"), "422 key-reused"),
        ],
        1,
    ),
    Row(
        "a body is the same when it was compressed later",
        [
            (compressed(b"body", 1), "201"),
            (compressed(b"body", 2), "201 replayed"),
            (compressed(b"other", 1), "422 key-reused"),
        ],
        1,
    ),
    Row("any bytes", [(Call(body=bytes(range(256))), "201"), (Call(body=bytes(range(256))), "201 replayed")], 1),
]  # fmt: skip


class Shop:
    """The application under test, and the requests that one row sends to it.

    Arguments:
        contract: Which knows where it is.
        url: Of its server.
    """

    def __init__(self, contract: HttpFacts, url: str) -> None:
        self.contract, self.url = contract, url
        self.host = url.partition("://")[2].partition("/")[0]
        self.key, self.tag = uuid4().hex, uuid4().hex

    def request(self, call: Call = POST, parts: list[bytes] | None = None, *, version: str = "1.1") -> bytes:
        """Return the bytes of a request; of a chunked one, where there are ``parts``."""
        contract = self.contract
        target = f"{contract.path}{call.path}?tag={self.tag}&status={call.status}{call.query}"
        callers: dict[str, Mapping[str, str]] = {"anna": contract.anna, "bert": contract.bert, "none": {}}
        headers = [*callers[call.caller].items(), *call.headers]
        if call.key is not None:
            headers.append(("Idempotency-Key", call.key.format(self.key)))
        return request_bytes(call.method, target, headers, parts or call.body, version=version, host=self.host)

    def connect(self) -> Connection:
        """Return a connection of its own."""
        return Connection(self.url)

    def call(self, call: Call = POST, parts: list[bytes] | None = None) -> Reply:
        """Send a request, and return the reply."""
        with self.connect() as connection:
            connection.send(self.request(call, parts))
            return connection.read(call.method)

    def raw(self, *headers: bytes) -> Reply | None:
        """Send a request with headers as they are; return None where the server closes without a reply."""
        whole = self.request(Call(key=None, headers=(("Connection", "close"),)))
        first, _, rest = whole.partition(b"\r\n")
        with self.connect() as connection:
            try:
                connection.send(b"\r\n".join([first, *headers, rest]))
                return connection.read()
            except OSError:
                return None

    def runs(self) -> int:
        """Return how often the application ran."""
        reply = self.call(Call(method="GET", key=None))
        assert reply.status == 200, f"expected GET {self.contract.path} to return a number, got {reply}"
        return int(reply.body)

    def check_runs(self, expected: int) -> None:
        """See that the application ran so often."""
        found = self.runs()
        assert found == expected, (
            f"GET {self.contract.path} counted {found} runs of this tag, expected {expected}. Count them where all "
            "processes of the server see them, as in a file or a table, and each run of POST once; if the count is "
            "right, the middleware let a repetition through, or a request that it was to carry out did not arrive."
        )

    def settled(self, call: Call = POST) -> Reply:
        """Repeat a request until it is no more in progress, and return the last reply."""
        replies: list[Reply] = []

        def ended() -> bool:
            replies.append(self.call(call))
            return replies[-1].kind != "in-progress"

        wait_until(ended)
        return replies[-1]


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, f"waited {TIMEOUT:g} s in vain"
        time.sleep(0.02)


class HttpFacts:
    """What the facts need of the class that they become part of."""

    path: str
    anna: Mapping[str, str]
    bert: Mapping[str, str]
    anna_refreshed: Mapping[str, str] | None
    revoked: Mapping[str, str] | None
    request_max_bytes: int
    response_max_bytes: int
    reads_chunked: bool
    streams: bool
    clients: int

    @pytest.fixture
    def shop(self, url: str) -> Shop:
        """The application, with a key and a tag that no other test has."""
        return Shop(self, url)


class RowFacts(HttpFacts):
    """The table: requests one after another, and what is answered."""

    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
    def test_requests_are_answered_as_in_the_table(self, shop: Shop, row: Row) -> None:
        ran: list[bytes] = []
        for call, expected in row.steps:
            reply = shop.call(call)
            check(reply, expected, shop.request(call))
            if reply.replayed:
                assert reply.body in ran
            elif call.method == "POST" and not reply.kind:
                assert reply.body.endswith(call.body), (
                    f"the body has to end with the bytes that were sent, got {reply.body[-200:]!r}"
                )
                assert reply.body not in ran
                ran.append(reply.body)
        shop.check_runs(row.runs)

    def test_a_request_without_a_key_passes(self, shop: Shop) -> None:
        """Not where the option ``required`` is set: override it there."""
        for _ in range(2):
            check(shop.call(Call(key=None)), "201")
        shop.check_runs(2)

    @pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
    def test_what_asks_about_a_resource_passes(self, shop: Shop, method: str) -> None:
        shop.call()
        replies = [shop.call(Call(method=method)) for _ in range(2)]
        assert {(reply.replayed, reply.kind) for reply in replies} == {(False, "")}
        assert shop.call().replayed

    @pytest.mark.parametrize(
        "headers",
        [
            [b"Idempotency-Key: a", b"Idempotency-Key: b"],
            [b"Idempotency-Key: a", b"idempotency-key: a"],
            [b'Idempotency-Key: "a\\"'],
            [b"Idempotency-Key: " + b"k" * 7000],
            [b"Idempotency-Key: " + b"k" * 10_000],
            [b"Idempotency-Key: a\r\n b"],
            [b"Idempotency-Key: a\x00b"],
        ],
        ids=["two", "two that are equal", "open", "7 kB", "10 kB", "in two lines", "NUL"],
    )
    def test_raw_bytes_that_are_no_key_are_refused(self, shop: Shop, headers: list[bytes]) -> None:
        """By the middleware, or by the server before it."""
        reply = shop.raw(*headers)
        assert reply is None or 400 <= reply.status < 500
        shop.check_runs(0)

    def test_a_header_with_an_underscore_is_no_key(self, shop: Shop) -> None:
        replies = [shop.raw(b"Idempotency_Key: " + shop.key.encode()) for _ in range(2)]
        assert not [reply for reply in replies if reply and reply.replayed]
        check(shop.call(), "201")


class CallerFacts(HttpFacts):
    """Who calls, as the option ``scope`` has it."""

    def test_a_caller_who_is_not_known_is_refused(self, shop: Shop) -> None:
        reply = shop.call(Call(caller="none"))
        if reply.status != 401:
            check(reply, "401")
        shop.check_runs(0)

    def test_refreshed_credentials_are_the_same_caller(self, shop: Shop) -> None:
        if self.anna_refreshed is None:
            pytest.skip("set anna_refreshed, the headers of the same caller with other credentials")
        assert shop.call().status == 201
        self.anna = self.anna_refreshed
        assert shop.call().replayed

    def test_revoked_credentials_get_no_replay(self, shop: Shop) -> None:
        if self.revoked is None:
            pytest.skip("set revoked, the headers of a caller who is locked out")
        assert shop.call().status == 201
        good, self.anna = self.anna, self.revoked
        assert shop.call().status == 401
        self.anna = good
        shop.check_runs(1)


class ResponseFacts(HttpFacts):
    """What is in a replay, and when there is none."""

    def test_a_replay_has_the_headers_of_the_operation_and_none_of_the_first_callers(self, shop: Shop) -> None:
        first, second = shop.call(), shop.call()
        assert int(second.headers["Content-Length"]) == len(first.body)
        for name in ("Content-Type", "Location"):
            assert first.headers[name]
            assert second.headers[name] == first.headers[name]
        assert first.headers["Set-Cookie"]
        assert second.headers["Set-Cookie"] is None
        assert len(second.headers.get_all("Date", [])) <= 1

    def test_a_refusal_is_a_problem_with_links_and_without_the_callers_name(self, shop: Shop) -> None:
        shop.call()
        problem = shop.call(Call(body=b"other")).problem
        assert problem["type"].endswith("key-reused")
        assert problem["key"] == shop.key
        assert not [value for value in self.anna.values() if value in str(problem)]

    def test_an_exception_leaves_the_key_free(self, shop: Shop) -> None:
        assert [shop.call(Call(status=0)).status for _ in range(2)] == [500, 500]
        shop.check_runs(2)

    def test_a_response_that_is_too_large_is_known_to_have_been_sent(self, shop: Shop) -> None:
        large = Call(body=b"x" * (self.response_max_bytes + 1))
        first = shop.call(large)
        assert (first.status, first.body.endswith(large.body)) == (201, True)
        self.check_not_kept(shop, large)

    def test_a_stream_is_known_to_have_been_sent(self, shop: Shop) -> None:
        if not self.streams:
            pytest.skip("the application sends no event streams")
        stream = Call(query="&stream=1")
        first = shop.call(stream)
        assert (first.status, first.headers["Content-Type"].partition(";")[0]) == (201, "text/event-stream")
        assert first.body
        self.check_not_kept(shop, stream)

    def check_not_kept(self, shop: Shop, call: Call) -> None:
        """See that a repetition is refused for good, and knows the first status."""
        second = shop.settled(call)
        check(second, "409 not-kept")
        assert second.headers["Retry-After"] is None
        assert second.problem["first_status"] == 201
        shop.check_runs(1)


class TransportFacts(HttpFacts):
    """How a request comes over the socket."""

    def test_a_chunked_body_is_read_whole(self, shop: Shop) -> None:
        first, second = (shop.call(parts=parts) for parts in ([b"bo", b"dy"], [b"b", b"ody"]))
        for reply, expected in ((first, "201"), (second, "201 replayed")):
            assert reply.summary == expected, f"got {reply.body[:200]!r}. {UNREAD}"
        if self.reads_chunked:
            assert first.body.endswith(b"body"), f"got {first.body[:200]!r}. {UNREAD}"
            assert shop.call(parts=[b"other"]).kind == "key-reused"
        shop.check_runs(1)

    def test_a_chunked_body_that_is_too_large_is_refused(self, shop: Shop) -> None:
        if not self.reads_chunked:
            pytest.skip("the application reads no body without a length")
        with shop.connect() as connection:
            connection.send(shop.request(parts=[b"x" * self.request_max_bytes, b"x"]))
            check(connection.read(), "413 body-too-large")
        shop.check_runs(0)

    def test_a_body_that_comes_slowly_is_read_whole(self, shop: Shop) -> None:
        head, _, body = shop.request().partition(b"\r\n\r\n")
        with shop.connect() as connection:
            connection.send(
                head[:20], head[20:] + b"\r\n\r\n", *(body[i : i + 1] for i in range(len(body))), pause=0.05
            )
            assert connection.read().body.endswith(b"body")
        assert shop.call().replayed

    def test_http_1_0_is_served(self, shop: Shop) -> None:
        replies = []
        for _ in range(2):
            with shop.connect() as connection:
                connection.send(shop.request(version="1.0"))
                replies.append(connection.read())
        assert [reply.summary for reply in replies] == ["201", "201 replayed"]
        assert replies[0].body == replies[1].body

    def test_a_connection_may_be_kept(self, shop: Shop) -> None:
        calls = [POST, POST, Call(key='"'), Call(body=b"other"), POST, Call(key="{}-2")]
        with shop.connect() as connection:
            found = []
            for call in calls:
                connection.send(shop.request(call))
                found.append(connection.read().summary)
        expected = ["201", "201 replayed", "400 key-malformed", "422 key-reused", "201 replayed", "201"]
        assert found == expected

    def test_a_client_may_wait_for_100_continue(self, shop: Shop) -> None:
        head, _, body = shop.request(Call(headers=(("Expect", "100-continue"),))).partition(b"\r\n\r\n")
        for expected in ("201", "201 replayed"):
            with shop.connect() as connection:
                connection.send(head + b"\r\n\r\n")
                assert connection.first_line().startswith(b"HTTP/1.1 100")
                connection.send(body)
                check(connection.read(), expected)

    def test_a_body_that_is_too_large_is_refused(self, shop: Shop) -> None:
        """Before it is sent, but by those that read bodies before a middleware is called, as Django on ASGI."""
        call = Call(body=b"x" * (self.request_max_bytes + 1), headers=(("Expect", "100-continue"),))
        head, _, body = shop.request(call).partition(b"\r\n\r\n")
        with shop.connect() as connection:
            connection.send(head + b"\r\n\r\n")
            reply = connection.read_within(1.0)
            if reply is None:
                connection.send(body)
                reply = connection.read()
        check(reply, "413 body-too-large")
        shop.check_runs(0)
        check(shop.call(Call(body=b"x" * self.request_max_bytes)), "201")

    def test_a_body_that_is_cut_off_claims_nothing(self, shop: Shop) -> None:
        with shop.connect() as connection:
            connection.send(shop.request()[:-1])
            assert b"201" not in connection.finish().partition(b"\r\n")[0]
        shop.check_runs(0)
        check(shop.call(), "201")


class ClientFacts(HttpFacts):
    """Clients that come at once, and clients that go."""

    def test_of_many_at_once_one_runs_and_the_others_come_again(self, shop: Shop) -> None:
        slow = Call(query="&seconds=0.5")
        with ThreadPoolExecutor(self.clients) as clients:
            replies = list(clients.map(shop.call, [slow] * self.clients))
        assert {reply.summary for reply in replies} <= {"201", "201 replayed", "409 in-progress"}
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies if reply.status == 409)
        again = shop.call(slow)
        assert again.replayed
        assert {reply.body for reply in replies if reply.status == 201} <= {again.body}
        shop.check_runs(1)

    def test_a_client_that_goes_while_its_request_is_carried_out_finds_its_response(self, shop: Shop) -> None:
        slow = Call(query="&seconds=0.5")
        with shop.connect() as connection:
            connection.send(shop.request(slow))
            wait_until(lambda: shop.runs() == 1)
        check(shop.settled(slow), "201 replayed")
        shop.check_runs(1)

    def test_a_client_that_goes_before_it_has_read_its_response_finds_it(self, shop: Shop) -> None:
        with shop.connect() as connection:
            connection.send(shop.request())
            connection.first_line()
        check(shop.settled(), "201 replayed")
        shop.check_runs(1)

    def test_a_client_that_goes_in_the_middle_of_a_large_response_is_known_to_have_had_it(self, shop: Shop) -> None:
        large = Call(body=b"x" * self.request_max_bytes)
        with shop.connect() as connection:
            connection.send(shop.request(large))
            connection.first_line()
        check(shop.settled(large), "409 not-kept")
        shop.check_runs(1)
