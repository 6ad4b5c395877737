"""`watch`: a table that is renewed, in a real terminal."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from celery_idempotent.cli.common import Exit
from celery_idempotent.stores import Outcome, State
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run
from tests.support.cli.shelf import Shelf, hold, settle
from tests.support.cli.terminal import ALTERNATE, COLUMNS, CTRL_C, Terminal
from tests.support.servers import RedisServer

KEY = "idem:shop.export::17"
#: For what is drawn: both programs have it drawn by the same code, and that one starts in half the time.
ONE_PROGRAM = pytest.mark.parametrize("in_terminal", ["celery-idempotent"], indirect=True)


def test_it_shows_what_begins_and_what_ends(in_terminal: Callable[..., Terminal], redis_store: RedisStore) -> None:
    settle(redis_store, "idem:shop.charge::1")
    lease = hold(redis_store, KEY)
    terminal = in_terminal("watch", "--every", "200ms")
    terminal.until("1 in progress")
    terminal.until(KEY)  # a screen comes in parts, and the headline before the rows
    hold(redis_store, f"idem:shop.invoices.tasks.make_invoice:{'acme' * 20}:000123")
    terminal.until("000123")
    redis_store.settle(lease, Outcome(State.COMPLETED, b"json:1"), ttl=60)
    terminal.until("Ended meanwhile")
    terminal.until("completed")
    assert "idem:shop.charge::1" not in terminal.drawn
    terminal.press(CTRL_C)
    assert terminal.status() == Exit.INTERRUPTED
    assert terminal.sane
    assert terminal.widest <= COLUMNS
    assert "\x1b[32mcompleted" in terminal.drawn
    assert "in_progress" not in terminal.drawn  # every row is: keys have the room
    assert "FENCE" not in terminal.drawn
    assert "Ended meanwhile" in terminal.drawn.rpartition("\x1b[?1049l")[2]  # what was seen last stays


@pytest.mark.nightly
def test_it_goes_on_while_the_store_is_away(
    in_terminal: Callable[..., Terminal], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis(appendonly="yes")
    store = RedisStore.from_url(server.url(0))
    hold(store, KEY)
    terminal = in_terminal("watch", "--every", "200ms", CELERY_IDEMPOTENT_STORE=server.url(0), STORE_URL=server.url(0))
    terminal.until(KEY)
    server.stop()
    terminal.until("No answer for ")
    terminal.until("cannot serve")
    server.start()
    hold(store, "idem:shop.export::18")
    terminal.until("idem:shop.export::18")
    terminal.press(CTRL_C)
    assert terminal.status() == Exit.INTERRUPTED
    assert terminal.sane
    assert terminal.widest <= COLUMNS
    store.close()


@pytest.mark.thorough
@ONE_PROGRAM
def test_more_than_fits_the_screen_is_told(in_terminal: Callable[..., Terminal], redis_store: RedisStore) -> None:
    for number in range(40):
        hold(redis_store, f"idem:shop.export::{number}")
    terminal = in_terminal("watch", "--limit", "30")
    terminal.until("and 13 more, --limit leaves out others")
    terminal.press(CTRL_C)
    assert terminal.status() == Exit.INTERRUPTED


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(
    in_terminal: Callable[..., Terminal], redis_store: RedisStore
) -> None:
    hold(redis_store, KEY)
    terminal = in_terminal("watch")
    terminal.until(KEY)
    assert ALTERNATE in terminal.drawn
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.status() == 128 + signal.SIGTERM
    assert terminal.sane, repr(terminal.drawn[-300:])


@pytest.mark.thorough
@ONE_PROGRAM
def test_without_colours_it_draws_none(in_terminal: Callable[..., Terminal], redis_store: RedisStore) -> None:
    hold(redis_store, KEY)
    terminal = in_terminal("watch", NO_COLOR="1")
    terminal.until(KEY)
    terminal.press(CTRL_C)
    assert terminal.status() == Exit.INTERRUPTED
    assert "\x1b[36m" not in terminal.drawn


@pytest.mark.nightly
def test_a_store_that_is_away_from_the_beginning_is_a_status(in_terminal: Callable[..., Terminal]) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    terminal = in_terminal("watch", CELERY_IDEMPOTENT_STORE=nowhere, STORE_URL=nowhere)
    assert terminal.status() == Exit.UNREACHABLE
    assert "cannot serve" in terminal.drawn
    assert ALTERNATE not in terminal.drawn


def test_without_a_terminal_it_says_what_to_do_instead(on_shelf: Run, shelf: Shelf) -> None:
    said = on_shelf("watch")
    assert (said.status, said.out) == (Exit.USAGE, "")
    assert "list --state in_progress" in said.err


@pytest.fixture
def no_rich(tmp_path: os.PathLike[str]) -> str:
    """A path for Python on which rich cannot be found."""
    hook = os.path.join(tmp_path, "sitecustomize.py")
    with open(hook, "w", encoding="utf-8") as file:
        file.write("import sys\nsys.modules['rich'] = None\n")
    return os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.thorough
def test_without_rich_it_says_how_to_install_it(in_terminal: Callable[..., Terminal], no_rich: str) -> None:
    terminal = in_terminal("watch", PYTHONPATH=no_rich)
    assert terminal.status() == Exit.USAGE
    assert "pip install 'celery-idempotent[cli]'" in terminal.drawn.replace("\r\n", "")


@pytest.mark.thorough
@ONE_PROGRAM
def test_without_rich_a_table_is_plain_and_fits(
    in_terminal: Callable[..., Terminal], redis_store: RedisStore, no_rich: str
) -> None:
    hold(redis_store, f"idem:shop.invoices.tasks.make_invoice:{'acme' * 20}:000123")
    for command in ("list", "stats"):
        terminal = in_terminal(command, PYTHONPATH=no_rich)
        assert terminal.status() == Exit.OK
        assert "\x1b[36m" not in terminal.drawn
        assert "000123" in terminal.drawn


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("in_terminal", "command"),
    [("celery -A", "watch"), *(("celery-idempotent", command) for command in ("list", "stats", "watch"))],
    indirect=["in_terminal"],
)
def test_a_slow_search_shows_that_it_goes_on_and_ctrl_c_ends_it(
    in_terminal: Callable[..., Terminal], own_redis: Callable[..., RedisServer], command: str
) -> None:
    server = own_redis()
    url = f"{server.url(0)}?socket_timeout=60"
    os.kill(server.pid, signal.SIGSTOP)
    try:
        terminal = in_terminal(command, CELERY_IDEMPOTENT_STORE=url, STORE_URL=url)
        what = "records read" if command == "stats" else "found"
        terminal.until(re.compile(rf"0 {what}, [1-9]\d* s"))  # a busy machine draws less often than each second
        terminal.press(CTRL_C)
        assert terminal.status() == Exit.INTERRUPTED
        assert terminal.sane
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("options", [("--every", "soon"), ("--state", "dancing"), ("--older", "?")])
def test_what_makes_no_sense_is_a_usage_error(on_shelf: Run, options: tuple[str, ...]) -> None:
    said = on_shelf("watch", *options)
    assert said.status == Exit.USAGE
    assert "expected" in said.err
