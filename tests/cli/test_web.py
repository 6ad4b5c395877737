"""`web`: the pages, over HTTP and in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By

from celery_idempotent.celery.app import TaskKeys, used_stores
from celery_idempotent.cli.common import Exit
from celery_idempotent.cli.explain import advice
from celery_idempotent.cli.web import pages
from celery_idempotent.stores import (
    Claim,
    HistoryEntry,
    Lease,
    Outcome,
    Reason,
    Record,
    Release,
    State,
    Store,
    open_store,
)
from celery_idempotent.stores.maintenance import NamedStore
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, app_with
from tests.conftest import missing
from tests.support.cli.shelf import Shelf, hold, release, settle
from tests.support.cli.terminal import CTRL_C, Terminal
from tests.support.cli.visitor import Reply, Visitor, visiting
from tests.support.flower.browser import chromium
from tests.support.servers import RedisServer, ServerMissing
from tests.support.waiting import wait_until

HELD, DONE, FREED = "idem:shop.export::17", "idem:shop.charge::ORD-1", "idem:shop.mail::bob"
EVIL = "<script>alert('x')</script>\"&'\u202e\x1b[31m"
PAGES = ("/", "/records", "/stats", f"/key?{urlencode({'key': DONE})}", "/key?key=unknown", "/records?older=soon")


@pytest.fixture
def visitor(shelf: Shelf) -> Iterator[Visitor]:
    """A visitor of pages that change nothing."""
    settle(shelf, DONE)
    release(shelf, FREED)
    hold(shelf, HELD)
    with visiting(shelf) as found:
        yield found


@pytest.fixture
def changing(shelf: Shelf) -> Iterator[Visitor]:
    """A visitor of pages that may change something."""
    settle(shelf, DONE)
    hold(shelf, HELD)
    with visiting(shelf, changes=True) as found:
        yield found


# Who gets in


def test_the_printed_url_lets_a_browser_in_and_nothing_else_does(visitor: Visitor) -> None:
    entered = visitor.enter()
    assert (entered.status, entered.headers["Location"]) == (303, "/")
    assert entered.headers["Set-Cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
    for path, cookie in (("/", ""), ("/", visitor.cookie + "x"), ("/?password=guessed", ""), ("/records", "a=b; c")):
        shut_out = visitor.send("GET", path, Cookie=cookie)
        assert (shut_out.status, shut_out.title) == (403, "Open the printed URL")
        assert "shelf" not in shut_out.body  # nothing of the store
    assert visitor.get("/").status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost@evil.example", ""])
def test_a_name_that_another_machine_can_have_is_refused(visitor: Visitor, host: str) -> None:
    reply = visitor.send("GET", "/", Host=host)
    assert (reply.status, reply.title) == (421, "Not by this name")


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:80"])
def test_the_end_of_a_tunnel_is_loopback(visitor: Visitor, host: str) -> None:
    assert visitor.send("GET", "/", Host=host).status == 200


def test_nothing_is_sent_that_a_browser_may_run_frame_or_keep(visitor: Visitor) -> None:
    replies = [visitor.get(path) for path in (*PAGES, "/static/style.css", "/static/none.css", "/nowhere")]
    replies.append(visitor.send("GET", "/", Cookie=""))
    for reply in replies:
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'self';")
        assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Cache-Control"] == "no-store"
        assert not re.search(r"<script|<style|\sstyle=|\son\w+=|(src|href|action)=\"(?!/|#)", reply.body)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("GET", "/static/../server.py", {}, 404),
        ("GET", "/call", {}, 404),
        ("POST", "/records", {}, 405),
        ("DELETE", "/", {}, 405),
        ("POST", "/forget", {"Content-Length": "100000"}, 413),
        ("POST", "/forget", {"Content-Length": "1" * 5000}, 413),
        ("GET", f"/records?{'&'.join(['a=b'] * 100)}", {}, 400),
    ],
)
def test_a_request_that_makes_no_sense_gets_a_page(
    visitor: Visitor, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    reply = visitor.send(method, path, **headers)
    assert (reply.status, bool(reply.title)) == (status, True)


def test_head_is_answered_without_a_body(visitor: Visitor) -> None:
    reply = visitor.send("HEAD", "/")
    assert (reply.status, reply.body) == (200, "")


# What is shown


def test_what_is_in_progress_is_the_first_page(shelf: Shelf, visitor: Visitor) -> None:
    hold(shelf, "idem:shop.thumb::1", lease_ttl=1)
    shelf.offset += 2
    page = visitor.get("/")
    assert page.status == 200
    assert "2 in progress, 1 of them ran out" in page.text
    assert page.links("/key") == [f"/key?{urlencode({'key': key})}" for key in ("idem:shop.thumb::1", HELD)]
    assert "host:1" in page.text
    assert DONE not in page.text
    assert visitor.get("/", every="1").body.count('http-equiv="refresh" content="5;') == 1


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ({}, {HELD, DONE, FREED}),
        ({"state": "completed"}, {DONE}),
        ({"task": "shop.mail"}, {FREED}),
        ({"text": "ORD-"}, {DONE}),
        ({"text": "ORD-", "state": "failed"}, set()),
        ({"younger": "1h"}, {HELD, DONE}),
        ({"older": "1h"}, set()),
        ({"unique": "1"}, {"idem:~unique:shop.reindex::7:m"}),
    ],
)
def test_fields_narrow_the_records_down(shelf: Shelf, visitor: Visitor, query: dict[str, str], keys: set[str]) -> None:
    hold(shelf, "idem:~unique:shop.reindex::7:m")
    page = visitor.get("/records", **query)
    assert {parse_qs(urlsplit(link).query)["key"][0] for link in page.links("/key")} == keys
    assert ("No such record" in page.text) == (not keys)


@pytest.mark.parametrize(
    "query", [{"older": "soon"}, {"younger": "1 fortnight"}, {"older": "2h", "younger": "1h"}, {"state": "done"}]
)
def test_a_field_that_is_wrong_is_explained(visitor: Visitor, query: dict[str, str]) -> None:
    page = visitor.get("/records", **query)
    assert page.status == 400
    assert "xpected " in page.text


def test_the_story_of_a_key_is_that_of_explain(shelf: Shelf, visitor: Visitor) -> None:
    facts = {"event": "TakenOver", "holder": "worker-2:4711", "task_id": "T9", "crashes": 2}
    shelf.append_history([HistoryEntry(DONE, json.dumps(facts), 5, 60)])
    shelf.mark_dispatched(DONE, "T5")
    page, record = visitor.get("/key", key=DONE), shelf.get(DONE)
    assert (page.status, page.title) == (200, DONE)
    assert re.search(r"Now: completed [\d.]+ m?s ago by task T1", page.text)
    assert advice(record) in page.text
    assert "taken over by worker-2:4711, task T9, after 2 crashes" in page.text
    assert "payload json:1" in page.text
    assert "announced T5" in page.text
    assert "start the command with --allow-changes" in page.text


def test_of_a_result_no_more_is_shown_than_show_prints(shelf: Shelf, visitor: Visitor) -> None:
    shelf.settle(hold(shelf, "k"), Outcome(State.COMPLETED, b"json:" + b"s" * 55 + b"secret"), ttl=60)
    shown = visitor.get("/key", key="k").body
    assert "s" * 55 + "..." in shown
    assert "secret" not in shown
    assert "sss" not in visitor.get("/records").body


def test_an_unknown_key_leads_to_the_one_that_was_meant(visitor: Visitor) -> None:
    page = visitor.get("/key", key=DONE.removeprefix("idem:"))
    assert page.status == 404
    assert f"did you mean {DONE}?" in page.text
    assert visitor.get(page.links("/find")[0]).headers["Location"] == f"/key?{urlencode({'key': DONE})}"


def test_text_from_elsewhere_is_shown_and_never_obeyed(shelf: Shelf, visitor: Visitor) -> None:
    key = f"idem:shop.mail::{EVIL}"
    claim = Claim(key, "o", 60, 600, task_id=EVIL, holder=EVIL)
    assert isinstance(shelf.acquire(claim), Lease)
    shelf.append_history([HistoryEntry(key, EVIL, 1, 60)])
    seen = [visitor.get("/"), visitor.get("/key", key=key), visitor.get("/find", q=key), visitor.get("/stats")]
    seen += [visitor.get("/records", **dict.fromkeys(("text", "task", "older", "reading", "page", "state"), EVIL))]
    seen += [visitor.get("/key", key=EVIL, done=EVIL), visitor.get("/records", task=EVIL)]
    for page in seen:
        assert "<script" not in page.body
        assert "\x1b" not in page.text
    assert "alert('x')" in seen[0].text
    assert "\\u202e\\x1b[31m" in seen[1].title


@pytest.mark.parametrize(
    "key",
    [
        "idem:a::x/y/../z",
        "idem:a::100%25%2F%zz+&=?#;",
        "idem:a::two\nlines\r\nand a tab\t",
        "idem:a::\u00e4\u4e2d\U0001f600",
        f"idem:a::{'k' * 3000}",
        " idem ",
    ],
)
def test_a_key_of_any_characters_is_found_by_its_link_and_forgotten_by_its_form(
    shelf: Shelf, changing: Visitor, key: str
) -> None:
    settle(shelf, key)
    links = [link for link in changing.get("/records").links("/key") if link.endswith(urlencode({"key": key}))]
    page = changing.get(links[0])
    assert page.status == 200
    assert changing.confirm(changing.get(page.links("/forget")[0])).status == 303
    assert shelf.get(key) is None


def test_figures_are_those_of_stats(visitor: Visitor) -> None:
    page = visitor.get("/stats")
    assert "records 3 (1 completed, 1 in_progress, 1 released)" in page.text
    assert "settled 1 in the last minute, 1 in the last hour" in page.text
    assert "/records?task=shop.charge" in page.links("/records")


# Search


@pytest.fixture
def with_app(shelf: Shelf) -> Iterator[Visitor]:
    """A visitor of the pages of an app with the task `pay0`, whose key is its argument."""
    app = app_with(shelf, idempotency={"key": "order_id"})
    from celery_idempotent import IdempotentTask

    @app.task(name="shop.charge", base=IdempotentTask, idempotency={"key": "order_id"})
    def charge(order_id: str, amount: int = 1) -> None: ...

    settle(shelf, DONE)
    with visiting(used_stores(app), TaskKeys(app)) as found:
        yield found


@pytest.mark.parametrize(
    ("text", "path", "query"),
    [
        (DONE, "/key", {"key": DONE}),
        ("shop.charge::ORD-1", "/key", {"key": DONE}),
        ("ORD-1", "/key", {"key": DONE}),
        ("shop.charge", "/records", {"task": "shop.charge"}),
        ("ORD-", "/records", {"text": "ORD-"}),
        ("", "/records", {}),
    ],
)
def test_one_field_finds_a_key_a_task_or_an_argument(
    with_app: Visitor, text: str, path: str, query: dict[str, str]
) -> None:
    location = urlsplit(with_app.get("/find", q=text).headers["Location"])
    assert (location.path, {name: value[0] for name, value in parse_qs(location.query).items()}) == (path, query)


def test_a_text_that_several_operations_have_as_their_key_shows_them(shelf: Shelf, with_app: Visitor) -> None:
    settle(shelf, "ORD-1")
    page = with_app.get("/find", q="ORD-1")
    assert page.links("/key") == [f"/key?{urlencode({'key': key})}" for key in ("ORD-1", DONE)]


def test_a_call_is_found_by_its_arguments(with_app: Visitor) -> None:
    form = with_app.get("/call")
    assert (form.status, "shop.charge" in form.text) == (200, True)
    found = with_app.get("/call", task="shop.charge", args='["ORD-1"]', kwargs='{"amount": 5}', header="")
    assert found.headers["Location"] == f"/key?{urlencode({'key': DONE})}"
    for wrong in ({"args": "ORD-1"}, {"args": "{}"}, {"args": "[]"}, {"task": "shop.charg"}):
        page = with_app.get("/call", **{"task": "shop.charge", "args": '["ORD-1"]'} | wrong)
        assert page.status == 400
        assert "xpected" in page.text or "missing" in page.text


# Large stores


class CountingShelf(Shelf):
    """Counts the records that scans have read."""

    read = 0

    def scan(self, **options: Any) -> Iterator[Record]:
        for record in super().scan(**options):
            self.read += 1
            yield record


def test_many_records_are_read_a_page_at_a_time() -> None:
    shelf = CountingShelf()
    for number in range(160):
        settle(shelf, f"idem:shop.charge::{number:03}")
    with visiting(shelf) as visitor:
        page, keys = visitor.get("/records"), []
        assert shelf.read <= pages.PAGE + 2
        assert "Records 1 to 50. Read at" in page.text
        for number in range(2, 5):
            keys += page.links("/key")
            [following] = [link for link in page.links("/records") if f"page={number}" in link]
            page = visitor.get(following)
        assert "Records 151 to 160 of 160." in page.text
        assert len(dict.fromkeys(keys + page.links("/key"))) == 160
        assert "page=5" not in page.body
        assert shelf.read == 160
        beyond = visitor.get("/records", page="999", reading="unknown")
        assert "Records 151 to 160 of 160." in beyond.text


def test_no_more_than_a_thousand_records_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_idempotent.cli.web.readings.MOST", 60)
    shelf = CountingShelf()
    for number in range(70):
        settle(shelf, f"idem:shop.charge::{number:03}")
    with visiting(shelf) as visitor:
        page = visitor.get("/records", page="2")
        assert "There are more than these" in page.text
        assert shelf.read == 61


class SlowShelf(Shelf):
    """Has a store's longest pause behind its first record."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = Event()

    def scan(self, **options: Any) -> Iterator[Record]:
        records = super().scan(**options)
        yield next(records)
        assert self.go_on.wait(30)
        yield from records


@pytest.mark.parametrize("path", ["/", "/records?state=in_progress", "/stats"])
def test_a_page_does_not_wait_for_a_store_that_looks_for_long(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(pages, "WAIT", 0.1)
    shelf = SlowShelf()
    hold(shelf, HELD)
    hold(shelf, "idem:shop.export::18")
    with visiting(shelf) as visitor:
        page = visitor.get(path)
        assert "Still reading" in page.text
        assert "Find" not in page.text  # what is being typed would be lost
        [stop] = [link for link in page.links(path.partition("?")[0]) if "wait=no" in link]
        stopped = visitor.get(stop)
        assert (stopped.refresh, "Stopped" in stopped.text) == ("", True)
        shelf.go_on.set()
        whole = visitor.get(page.refresh)
        assert whole.refresh == ""
        assert "idem:shop.export::18" in whole.body or "2 by a live lease" in whole.text


def test_readings_that_were_left_are_forgotten_for_new_ones(visitor: Visitor) -> None:
    first = visitor.get("/records", state="released")
    for _ in range(20):
        visitor.get("/records")
    assert first.status == 200
    assert visitor.get("/records", state="released", reading="gone").links("/key") == first.links("/key")


# Stores


def test_a_store_that_is_down_is_shown_as_that_until_it_is_back(own_redis: Callable[..., RedisServer]) -> None:
    server = own_redis(appendonly="yes")
    store = RedisStore.from_url(server.url(0))
    settle(store, DONE)
    paths = ("/", "/records", "/stats", f"/key?{urlencode({'key': DONE})}")
    with visiting(store, changes=True) as visitor:
        server.stop()
        assert visitor.get("/forget", key=DONE, store="shelf").title == "The store cannot serve"
        for path in paths:
            page = visitor.get(path)
            assert page.status == 503
            assert "cannot serve" in page.text
            assert page.title
        assert visitor.get(visitor.get("/find", q="ORD-1").headers["Location"]).status == 503
        server.start()
        settle(store, DONE)
        assert [visitor.get(path).status for path in paths] == [200] * 4
    store.close()


def test_a_store_that_is_down_does_not_hide_another(shelf: Shelf) -> None:
    settle(shelf, DONE)
    gone = RedisStore.from_url("redis://127.0.0.1:1/0")
    with visiting([NamedStore("gone", gone), NamedStore("here", shelf)]) as visitor:
        for page in (visitor.get("/records"), visitor.get("/key", key=DONE), visitor.get("/stats")):
            assert page.status == 503
            assert "A store cannot serve." in page.text
            assert "here" in page.text
            assert "ORD-1" in page.text or "1 completed" in page.text


def test_what_is_no_record_gets_a_page(redis_store: RedisStore, redis_client: Any) -> None:
    redis_client.set("odd", "text")
    with visiting([NamedStore("shelf", redis_store)], changes=True) as visitor:
        assert visitor.get("/key", key="odd").status == 503
        page = visitor.get("/forget", key="odd", store="shelf")
        assert (page.status, page.title) == (500, "The record cannot be read")


@pytest.mark.parametrize("kind", ["redis_url", "sqlite_url", "postgres_url", "dynamodb_url", "cluster_url"])
def test_every_store_is_shown_and_changed(request: pytest.FixtureRequest, kind: str) -> None:
    store: Store = open_store(request.getfixturevalue(kind))
    store.apply_schema()
    settle(store, DONE)
    hold(store, HELD)
    with visiting(store, changes=True) as visitor:
        assert visitor.get("/").links("/key") == [f"/key?{urlencode({'key': HELD})}"]
        assert "2 (1 completed, 1 in_progress)" in visitor.get("/stats").text
        assert len(visitor.get("/records", text="shop.").links("/key")) == 2
        assert visitor.get("/key", key="with\0 nul").status in (404, 503)
        page = visitor.get("/key", key=HELD)
        freed = visitor.get(visitor.confirm(visitor.get(page.links("/release")[0])).headers["Location"])
        assert f"{HELD} is released" in freed.text
        assert "No worker is doing it" in freed.text
    store.close()


# Changes


def test_pages_change_nothing_unless_that_is_allowed(shelf: Shelf, visitor: Visitor) -> None:
    page = visitor.get("/key", key=HELD)
    assert not page.links("/release") + page.links("/forget")
    for path in ("/release", "/forget"):
        target = f"{path}?{urlencode({'key': HELD, 'store': 'shelf'})}"
        assert visitor.get(target).title == "These pages change nothing"
        assert visitor.send("POST", target, "", Origin=visitor.origin).status == 403
    record = shelf.get(HELD)
    assert record is not None
    assert record.state is State.IN_PROGRESS


def test_a_release_is_confirmed_and_noted(shelf: Shelf, changing: Visitor) -> None:
    page = changing.get("/key", key=HELD)
    question = changing.get(page.links("/release")[0])
    assert question.title == "Release this key?"
    assert "If the holder is alive, this may be done twice." in question.text
    assert "host:1" in question.text
    record = shelf.get(HELD)
    assert record is not None
    assert record.state is State.IN_PROGRESS
    done = changing.confirm(question)
    assert done.status == 303
    after = changing.get(done.headers["Location"])
    assert f"{HELD} is released" in after.text
    assert "Now: released: by an operator" in after.text
    assert "(celery-idempotent web) from host:1, task T1" in after.text
    record = shelf.get(HELD)
    assert record is not None
    assert (record.state, record.reason) == (State.RELEASED, Reason.SHUTDOWN)
    again = changing.get("/release", key=HELD, store="shelf")
    assert (again.status, again.title) == (409, "There is nothing to release")


def test_what_is_forgotten_runs_again_and_keeps_who_forgot_it(shelf: Shelf, changing: Visitor) -> None:
    question = changing.get(changing.get("/key", key=DONE).links("/forget")[0])
    assert "Its operation may run again" in question.text
    after = changing.get(changing.confirm(question).headers["Location"])
    assert (shelf.get(DONE), after.status) == (None, 200)
    assert f"{DONE} is forgotten" in after.text
    assert "(celery-idempotent web): it was completed, by task T1" in after.text
    held = changing.get("/forget", key=HELD, store="shelf")
    assert f"host:1 holds {HELD} and may be running it. Forget it all the same?" in held.text
    assert changing.get("/forget", key=DONE, store="shelf").status == 404
    assert changing.get("/forget", key=HELD, store="another").status == 404


def another_origin(visitor: Visitor, page: Reply) -> Reply:
    return visitor.confirm(page, Origin="http://evil.example")


def another_port(visitor: Visitor, page: Reply) -> Reply:
    return visitor.confirm(page, Origin="http://127.0.0.1:1")


def no_origin(visitor: Visitor, page: Reply) -> Reply:
    action, fields = page.form
    return visitor.send("POST", action, urlencode(fields))


def no_token(visitor: Visitor, page: Reply) -> Reply:
    action, fields = page.form
    return visitor.send("POST", action, urlencode(fields | {"token": "guessed"}), Origin=visitor.origin)


def no_cookie(visitor: Visitor, page: Reply) -> Reply:
    return visitor.confirm(page, Cookie="")


def another_name(visitor: Visitor, page: Reply) -> Reply:
    return visitor.confirm(page, Host="evil.example", Origin="http://evil.example")


@pytest.mark.parametrize(
    ("send", "status"),
    [
        (another_origin, 403),
        (another_port, 403),
        (no_origin, 403),
        (no_token, 403),
        (no_cookie, 403),
        (another_name, 421),
    ],
)
@pytest.mark.parametrize("path", ["/release", "/forget"])
def test_a_form_of_another_site_changes_nothing(
    shelf: Shelf, changing: Visitor, send: Callable[[Visitor, Reply], Reply], status: int, path: str
) -> None:
    assert send(changing, changing.get(path, key=HELD, store="shelf")).status == status
    record = shelf.get(HELD)
    assert record is not None
    assert record.state is State.IN_PROGRESS


@pytest.mark.parametrize("path", ["/release", "/forget"])
def test_what_changed_since_a_person_saw_it_is_left_alone(shelf: Shelf, changing: Visitor, path: str) -> None:
    question = changing.get(path, key=HELD, store="shelf")
    shelf.delete(HELD)
    hold(shelf, HELD)
    reply = changing.confirm(question)
    assert (reply.status, reply.title) == (409, "It has changed meanwhile")
    record = shelf.get(HELD)
    assert record is not None
    assert record.state is State.IN_PROGRESS


class SettlingShelf(Shelf):
    """Settles what is held right before a release of it."""

    def release(self, lease: Lease, release: Release) -> bool:
        self.settle(lease, Outcome(State.COMPLETED, b"json:1"), ttl=60)
        return super().release(lease, release)


def test_a_key_that_is_settled_before_the_release_is_left_alone() -> None:
    shelf = SettlingShelf()
    hold(shelf, HELD)
    with visiting(shelf, changes=True) as visitor:
        reply = visitor.confirm(visitor.get("/release", key=HELD, store="shelf"))
        assert (reply.status, reply.title) == (409, "It was not released")
        assert "settled meanwhile" in reply.text


# The command


def test_the_command_prints_a_url_that_works_and_ends_well_with_ctrl_c(
    in_terminal: Callable[..., Terminal], redis_store: RedisStore
) -> None:
    hold(redis_store, HELD)
    terminal = in_terminal("web", "--port", "0")
    url = re.compile(r"http://127\.0\.0\.1:\d+/\?password=[\w-]{32}")
    found = url.search(terminal.until(url))
    assert found is not None
    visitor = Visitor(found[0])
    visitor.enter()
    page = visitor.get("/")
    assert (page.status, "1 in progress" in page.text) == (200, True)
    terminal.press(CTRL_C)
    assert terminal.status() == Exit.OK
    assert terminal.sane
    assert "Traceback" not in terminal.drawn


def test_sigterm_ends_it_as_ctrl_c_does(redis_url: str) -> None:
    command = [sys.executable, "-m", "celery_idempotent.cli", "web", "--port", "0", "--store", redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (Exit.OK, "", "")


def test_a_port_that_is_taken_is_a_usage_error(on_redis: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = on_redis("web", "--port", str(port))
    assert said.status == Exit.USAGE
    assert f"Expected port {port} of 127.0.0.1 to be free, got: Address already in use. Give another" in said.err


def test_the_memory_of_one_process_is_no_store_to_look_into(on_shelf: Run) -> None:
    said = on_shelf("web", "--port", "0")
    assert said.status == Exit.USAGE
    assert "Expected a store that this process shares with the workers" in said.err


def test_without_jinja_it_names_the_extra(on_redis: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else find(name))
    said = on_redis("web", "--port", "0")
    assert said.status == Exit.USAGE
    assert "pip install 'celery-idempotent[web]'" in said.err


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with chromium() as opened:
            yield opened
    except ServerMissing as error:
        raise missing(error, optional="chromium") from None


def at_width(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 720, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def until_heading(browser: Any, title: str) -> None:
    """Wait until a page with this heading is there: a click may return before its page is."""

    def shown() -> bool:
        try:
            return bool(browser.find_element(By.TAG_NAME, "h1").text == title)
        except (NoSuchElementException, StaleElementReferenceException):  # between two pages
            return False

    wait_until(shown, 20, f"the page {title}")


def test_a_person_finds_a_key_reads_its_story_and_releases_it(browser: Any, shelf: Shelf, changing: Visitor) -> None:
    at_width(browser, 1280)
    browser.get(changing.url)
    until_heading(browser, "In progress")
    browser.find_element(By.NAME, "q").send_keys("shop.export::17\n")
    until_heading(browser, HELD)
    assert "It is being done." in browser.find_element(By.TAG_NAME, "main").text
    browser.find_element(By.PARTIAL_LINK_TEXT, "Release").click()
    until_heading(browser, "Release this key?")
    browser.find_element(By.CSS_SELECTOR, "form.confirm button").click()
    until_heading(browser, HELD)
    assert "is released" in browser.find_element(By.CSS_SELECTOR, "[role=status]").text
    record = shelf.get(HELD)
    assert record is not None
    assert record.state is State.RELEASED
    assert browser.get_log("browser") == []  # nothing that the policy refused


def test_no_page_is_wider_than_a_phone(browser: Any, shelf: Shelf) -> None:
    long = f"idem:shop.{'invoices' * 30}::{EVIL}"
    hold(shelf, long)
    settle(shelf, DONE)
    release(shelf, FREED)
    shelf.append_history([HistoryEntry(long, "e" * 400, 1, 60)])
    gone = RedisStore.from_url("redis://127.0.0.1:1/0")
    query = urlencode({"key": long, "store": "s" * 300})
    paths = (*PAGES, f"/key?{query}", f"/release?{query}", f"/records?text={'x' * 300}")
    with visiting([NamedStore("s" * 300, shelf), NamedStore("gone", gone)], changes=True) as visitor:
        browser.get(visitor.url)
        at_width(browser, 360)
        for path in paths:
            browser.get(visitor.origin + path)
            assert browser.execute_script("return document.documentElement.scrollWidth") == 360, path
            assert browser.execute_script("return getComputedStyle(document.body).display") == "flex", path
