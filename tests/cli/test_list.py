"""`list`: which records, and how they look."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.cli.common import Exit
from celery_idempotent.core.keys import compose
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Release, State
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, Said, app_with, by_app
from tests.support.cli.shelf import Shelf, hold, keys, release, settle
from tests.support.cli.terminal import COLUMNS, Terminal

HELD, DONE, FREED = "idem:shop.export::17", "idem:shop.charge::ORD-1", "idem:shop.mail::bob"


def fill(store: Shelf | RedisStore) -> Lease:
    settle(store, DONE)
    release(store, FREED)
    return hold(store, HELD)


def listed(out: str) -> list[str]:
    """Return the keys of a table, in its order."""
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_records_are_listed_with_what_is_in_progress_first(on_redis: Run, redis_store: RedisStore) -> None:
    lease = fill(redis_store)
    said = on_redis("list")
    assert (said.status, said.err) == (Exit.OK, "")
    assert listed(said.out) == [HELD, FREED, DONE]
    head, held, freed, done = said.out.splitlines()
    assert head.split() == ["KEY", "STATE", "LEASE/REASON", "AGE", "CRASHES", "HOLDER", "TASK", "ID", "FENCE"]
    _, state, left, word, age, *rest = held.split()
    assert (state, word, rest) == ("in_progress", "left", ["-", "host:1", "T1", str(lease.fence)])
    assert 30 <= int(left.removesuffix("s")) < 60
    assert int(age.removesuffix("s")) < 30
    assert freed.split()[1:-1] == ["released", "failed", "-", "-", "-", "T1"]
    assert done.split()[1:-1] == ["completed", "-", done.split()[3], "-", "-", "T1"]


def test_a_script_gets_one_object_with_what_is_not_told_as_null(on_redis: Run, redis_store: RedisStore) -> None:
    lease = fill(redis_store)
    said = on_redis("list", "--json")
    told = json.loads(said.out)
    held, freed, done = told["records"]
    assert told["more"] is False
    assert (held["key"], held["state"], held["task"], held["task_id"]) == (HELD, "in_progress", "shop.export", "T1")
    assert (held["holder"], held["fence"], held["age"]) == ("host:1", lease.fence, None)
    assert 0 < held["held_for"] < 30 < held["remaining"] <= 60
    assert (freed["reason"], freed["age"], freed["held_for"], freed["remaining"]) == ("failed", None, None, 0)
    assert (done["remaining"], done["holder"], done["payload_bytes"]) == (None, None, 6)
    assert done["age"] >= 0


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--state", "completed"], [DONE]),
        (["--state", "completed", "--state", "released"], [FREED, DONE]),
        (["--held"], [HELD]),
        (["--held", "--state", "completed"], []),
        (["--task", "shop.mail"], [FREED]),
        (["--task", "shop.mai"], []),
        (["--prefix", "idem:shop.e"], [HELD]),
    ],
)
def test_options_narrow_it_down(on_redis: Run, redis_store: RedisStore, options: list[str], keys: list[str]) -> None:
    fill(redis_store)
    said = on_redis("list", *options)
    assert (said.status, listed(said.out)) == (Exit.OK, keys)
    assert ("No such record" in said.err) == (not keys)


def test_a_lease_that_ran_out_is_in_progress_and_not_held(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, HELD)
    shelf.offset += 61
    hold(shelf, "idem:shop.export::18")
    said = on_shelf("list")
    assert listed(said.out) == [HELD, "idem:shop.export::18"]
    assert said.out.splitlines()[1].split()[1:4] == ["in_progress", "ran", "out"]
    assert said.out.splitlines()[1].split()[4].startswith("6")
    assert listed(on_shelf("list", "--held").out) == ["idem:shop.export::18"]


def test_a_task_is_found_by_its_name_whatever_is_in_it(on_shelf: Run, shelf: Shelf) -> None:
    odd = compose("idem", "shop:über ~%", key="1")
    hold(shelf, odd)
    hold(shelf, "idem:shop::1")
    assert listed(on_shelf("list", "--task", "shop:über ~%").out) == [odd]
    assert json.loads(on_shelf("list", "--task", "shop:über ~%", "--json").out)["records"][0]["task"] == "shop:über ~%"


def test_a_task_is_looked_for_in_the_namespace_of_the_app(shelf: Shelf) -> None:
    hold(shelf, "site:pay0::1")
    app = app_with(shelf, shelf, idempotency_namespace="site")
    assert listed(by_app(app, "list", "--task", "pay0").out) == ["site:pay0::1"]
    assert "Did you mean --task pay0?" in by_app(app, "list", "--task", "pay1").err


def test_what_is_in_progress_is_as_old_as_its_lease_and_what_is_done_as_long_ago(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, HELD, lease_ttl=600)
    settle(shelf, DONE)
    shelf.offset += 120
    settle(shelf, "idem:shop.charge::ORD-2")
    assert listed(on_shelf("list", "--older", "90s").out) == [HELD, DONE]
    assert listed(on_shelf("list", "--older", "100").out) == [HELD, DONE]
    assert listed(on_shelf("list", "--younger", "1m").out) == ["idem:shop.charge::ORD-2"]
    assert listed(on_shelf("list", "--older", "1m", "--younger", "1h", "--held").out) == [HELD]


def test_what_has_no_age_is_left_out_by_age_and_counted(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    said = on_shelf("list", "--younger", "1h")
    assert listed(said.out) == [HELD, DONE]
    assert "1 more are of an age that the store does not know" in said.err


def test_it_says_that_there_are_more_than_it_shows(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    said = on_redis("list", "--limit", "2")
    assert len(listed(said.out)) == 2
    assert "more than these 2" in said.err
    assert json.loads(on_redis("list", "--limit", "2", "--json").out)["more"] is True
    assert on_redis("list", "--limit", "3").err == ""


def test_a_prefix_without_its_namespace_gets_a_hint(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    said = on_shelf("list", "--prefix", "shop.charge:")
    assert (said.status, said.out) == (Exit.OK, "")
    assert "Did you mean --prefix idem:shop.charge:?" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--state", "in-progres"], "Did you mean in_progress?"),
        (["--state", "dancing"], "expected one of in_progress, completed, failed, released"),
        (["--older", "soon"], "such as 90s, 15m, 24h or 7d, got 'soon'"),
        (["--younger", "-1s"], "such as 90s, 15m, 24h or 7d"),
        (["--older", "2h", "--younger", "1h"], "--older to be less than --younger"),
        (["--task", "pay", "--prefix", "idem:"], "--task or --prefix"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(on_shelf: Run, options: list[str], words: str) -> None:
    said = on_shelf("list", *options)
    assert (said.status, said.out) == (Exit.USAGE, "")
    assert words in " ".join(said.err.split())


def test_each_of_several_stores_has_its_table_and_its_limit() -> None:
    own, other = Shelf(), Shelf()
    app = app_with(own, other)
    fill(own)
    hold(other, "idem:pay0::7")
    said = by_app(app, "list", "--limit", "2")
    assert "Shelf\nKEY" in said.out
    assert "Shelf (2)\nKEY" in said.out
    assert "more than these 2 in Shelf:" in said.err
    told = json.loads(by_app(app, "list", "--held", "--json").out)
    assert [(found["store"], found["key"]) for found in told["records"]] == [
        ("Shelf", HELD),
        ("Shelf (2)", "idem:pay0::7"),
    ]


class Interrupted(Shelf):
    """Somebody presses Ctrl-C when two records are read."""

    error: type[BaseException] = KeyboardInterrupt

    def scan(self, **options: Any) -> Iterator[Record]:
        for number, record in enumerate(super().scan(**options)):
            if number == 2:
                raise self.error("The store cannot serve.")
            yield record


def test_ctrl_c_prints_what_there_is_and_ends_with_130() -> None:
    store, other = Interrupted(), Shelf()
    fill(store)
    fill(other)
    app = app_with(store, other)
    said = by_app(app, "list")
    assert said.status == Exit.INTERRUPTED
    assert listed(said.out.partition("\n")[2]) == [FREED, DONE]
    assert "there may be more" in said.err
    said = by_app(app, "list", "--json")
    assert said.status == Exit.INTERRUPTED
    assert json.loads(said.out)["more"] is True


def test_a_store_that_goes_away_does_not_keep_the_command_from_the_others() -> None:
    class Fading(Interrupted):
        error = StoreUnreachable

    store, other = Fading(), Shelf()
    fill(store)
    fill(other)
    said = by_app(app_with(store, other), "list")
    assert said.status == Exit.UNREACHABLE
    assert said.out.startswith("Shelf\nKEY")
    assert "The store cannot serve." in said.err


def test_nothing_that_a_record_holds_commands_the_terminal(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, "idem:shop::\x1b[31mred")
    said = on_shelf("list")
    assert "\x1b" not in said.out
    assert r"idem:shop::\x1b[31mred" in said.out
    assert "\x1b" not in on_shelf("show", "idem:shop::\x1b[31mred").out


def long_ones(store: RedisStore) -> None:
    """Put in what is as wide as it gets in life, of every state."""
    for number in range(3):
        key = f"idem:shop.invoices.tasks.make_invoice:acme:2024-11-03-{number:06}"
        claim = Claim(key, f"owner {number}", 60, 600, task_id="0b1ee2a1-66d4-4b8a-a25e-0a5d3a5be6b2", holder="h" * 30)
        lease = store.acquire(claim)
        assert isinstance(lease, Lease)
        if number == 1:
            store.release(lease, Release(Reason.CRASHED))
            store.release(store.acquire(claim), Release(Reason.RETRY, 5000, 1))  # type: ignore[arg-type]
        if number == 2:
            store.settle(lease, Outcome(State.FAILED, b"json:1"), ttl=600)


@pytest.mark.thorough
def test_a_terminal_gets_colours_and_lines_that_fit(
    in_terminal: Callable[..., Terminal], redis_store: RedisStore
) -> None:
    long_ones(redis_store)
    terminal = in_terminal("list")
    assert terminal.status() == Exit.OK
    assert terminal.widest <= COLUMNS
    assert terminal.drawn.count("\r\n") == 4
    assert "\x1b[36min_progress" in terminal.drawn
    assert "idem:shop.in" in terminal.drawn
    assert "-000000" in terminal.drawn
    assert "retry in 83m" in terminal.drawn


@pytest.mark.thorough
def test_who_wants_no_colours_gets_none(in_terminal: Callable[..., Terminal], redis_store: RedisStore) -> None:
    long_ones(redis_store)
    terminal = in_terminal("list", NO_COLOR="1")
    assert terminal.status() == Exit.OK
    assert "\x1b[36m" not in terminal.drawn
    assert terminal.widest <= COLUMNS


def test_what_is_piped_is_whole_and_plain(on_redis: Run, redis_store: RedisStore) -> None:
    long_ones(redis_store)
    said = on_redis("list")
    assert "\x1b" not in said.out
    assert "idem:shop.invoices.tasks.make_invoice:acme:2024-11-03-000001" in said.out
    assert "h" * 30 in said.out


# -- by an argument, as an operator knows an operation -----------------------------------------------------------------

ORDER, OTHER, MONTH, MAILED = (
    compose("idem", "shop.charge", key="ORD-1"),
    compose("idem", "shop.charge", key="ORD-11"),
    compose("idem", "shop.invoice", key=("acme", 17)),
    compose("idem", "shop.mail", key="ORD-1", scope="acme"),
)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--arg", "ORD-1"], {ORDER, MAILED}),
        (["--arg", "order_id=ORD-1", "--task", "shop.charge"], {ORDER}),
        (["--arg", "customer=acme"], {MONTH, MAILED}),
        (["--arg", "customer=acme", "--arg", "month=17"], {MONTH}),
        (["--arg", "1"], set()),
    ],
)
def test_an_argument_finds_the_keys_that_are_made_of_it(
    by_url: Callable[..., Said], shelf: Shelf, options: list[str], keys: set[str]
) -> None:
    for key in (ORDER, OTHER, MONTH, MAILED):
        settle(shelf, key)
    said = Run(by_url, shelf)("list", *options)
    assert (said.status, set(listed(said.out))) == (Exit.OK, keys)


def invoice(customer: str, month: int, note: str = "") -> None:
    """Do what a task does."""


def by_month(month: int) -> str:
    return f"m-{month}"


@pytest.fixture
def shop(shelf: Shelf) -> Celery:
    app = app_with(shelf)
    keys: dict[str, Any] = {"shop.invoice": ["customer", "month"], "shop.total": by_month, "shop.first": "month"}
    for name, key in keys.items():
        app.task(invoice, name=name, base=IdempotentTask, idempotency={"key": key})
    app.task(invoice, name="shop.each", base=IdempotentTask)
    app.task(invoice, name="shop.own", base=IdempotentTask, idempotency={"key": "month", "scope": "tenant"})
    for key in (MONTH, "idem:shop.total::m-17", "idem:shop.first::~17", "idem:shop.own:acme:~17"):
        settle(shelf, key)
    return app


@pytest.mark.parametrize(
    ("task", "arguments", "key"),
    [
        ("shop.invoice", ["customer=acme", "month=17"], MONTH),
        ("shop.invoice", ["customer=acme"], MONTH),
        ("shop.total", ["month=17"], "idem:shop.total::m-17"),
        ("shop.first", ["17"], "idem:shop.first::~17"),
        ("shop.own", ["month=17"], "idem:shop.own:acme:~17"),
    ],
)
@pytest.mark.parametrize("command", ["list", "show", "explain"])
def test_an_app_makes_the_key_as_its_task_does(
    shop: Celery, command: str, task: str, arguments: list[str], key: str
) -> None:
    said = by_app(shop, command, "--task", task, *(word for each in arguments for word in ("--arg", each)))
    assert (said.status, said.err) == (Exit.OK, "")
    assert key in said.out


@pytest.mark.parametrize(
    ("task", "argument", "words"),
    [
        ("shop.invoce", "month=17", "Did you mean shop.invoice?"),
        ("shop.invoice", "moth=17", "Did you mean month?"),
        ("shop.invoice", "note=x", "makes its key (customer, month), got note"),
        ("shop.total", "customer=acme", "--args JSON"),
        ("shop.each", "month=17", "show --task shop.each TASK_ID"),
    ],
)
def test_an_argument_that_no_key_shows_is_refused_with_what_to_do(
    shop: Celery, task: str, argument: str, words: str
) -> None:
    said = by_app(shop, "list", "--task", task, "--arg", argument)
    assert said.status == Exit.USAGE
    assert words in said.err


def test_what_changes_records_takes_arguments_of_one_operation_alone(on_shelf: Run, shelf: Shelf) -> None:
    settle(shelf, ORDER)
    settle(shelf, MAILED)
    said = on_shelf("forget", "--arg", "ORD-1", "--yes")
    assert (said.status, len(list(shelf.scan()))) == (Exit.USAGE, 2)
    assert f"got 2: {ORDER}, {MAILED}. Name the KEY." in said.err
    assert on_shelf("forget", "--arg", "ORD-7").status == Exit.NO
    asked = on_shelf("forget", "--arg", "acme", "--arg", "ORD-1", answer="n\n")
    assert f"Forget {MAILED}? [y/N]" in asked.err
    assert asked.status == Exit.NO
    assert on_shelf("forget", "--arg", "acme", "--arg", "ORD-1", "--yes").out == f"{MAILED} is forgotten\n"


@pytest.mark.parametrize("command", ["show", "explain"])
def test_scripts_get_a_line_for_each_record_that_is_found(shop: Celery, shelf: Shelf, command: str) -> None:
    settle(shelf, TEXT)
    said = by_app(shop, command, "--task", "shop.first", "--arg", "month=17", "--json")
    assert {(facts.get("now") or facts)["key"] for facts in map(json.loads, said.out.splitlines())} == {TEXT, NUMBER}
    assert "JSON object a line for each record" in " ".join(by_app(shop, command, "--help").out.split())


TEXT, NUMBER = "idem:shop.first::17", "idem:shop.first::~17"


@pytest.mark.parametrize("command", ["forget", "release"])
@pytest.mark.parametrize("named", [("--arg", "month=17"), ("17",)], ids=["argument", "key"])
def test_what_changes_records_takes_no_number_for_the_text_of_it_where_there_are_both(
    shop: Celery, shelf: Shelf, command: str, named: tuple[str, ...]
) -> None:
    hold(shelf, TEXT)
    before = keys(shelf)
    said = by_app(shop, command, "--task", "shop.first", *named, "--yes")
    assert said.status == Exit.USAGE
    assert f"got 2: {TEXT}, {NUMBER}. Name the KEY." in said.err
    assert keys(shelf) == before
    assert [record.key for record in shelf.scan(state=State.IN_PROGRESS)] == [TEXT]


@pytest.mark.parametrize(
    ("named", "key"),
    [
        ((TEXT,), TEXT),
        ((NUMBER,), NUMBER),
        (("--task", "shop.first", "--arg", 'month="17"'), TEXT),
        (("--task", "shop.first", "--args", '["acme", "17"]'), TEXT),
        (("--task", "shop.first", "--args", '["acme", 17]'), NUMBER),
    ],
)
def test_a_number_and_the_text_of_it_are_told_apart_by_how_they_are_named(
    shop: Celery, shelf: Shelf, named: tuple[str, ...], key: str
) -> None:
    settle(shelf, TEXT)
    before = keys(shelf)
    said = by_app(shop, "forget", *named, "--yes")
    assert (said.status, said.out) == (Exit.OK, f"{key} is forgotten\n")
    assert keys(shelf) == before - {key}


def test_without_an_app_what_changes_records_takes_one_key_of_a_task_alone(
    by_url: Callable[..., Said], shelf: Shelf
) -> None:
    """Of a text that is the key of one call, and the id of another one's message."""
    by_key, by_id = compose("idem", "shop.charge", key="ORD-1"), "idem:shop.charge:ORD-1"
    settle(shelf, by_key)
    settle(shelf, by_id)
    said = Run(by_url, shelf)("forget", "--task", "shop.charge", "ORD-1", "--yes")
    assert (said.status, len(list(shelf.scan()))) == (Exit.USAGE, 2)
    assert f"got 2: {by_key}, {by_id}. Name the KEY." in said.err


def test_a_key_may_be_named_by_its_task_without_an_app(by_url: Callable[..., Said], shelf: Shelf) -> None:
    settle(shelf, ORDER)
    run = Run(by_url, shelf)
    assert f"key            {ORDER}" in run("show", "--task", "shop.charge", "ORD-1").out
    assert run("show", "--task", "shop.charge", "ORD-7").status == Exit.NO


# -- what is typed in the wrong way ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["list", "ORD-1"], "For one key: show KEY. For an argument in a key: list --arg VALUE."),
        (["list", "redis://localhost/1"], "Give the URL of a store as --store URL."),
        (["show", ORDER, ORDER], "This command takes one KEY."),
        (["list", "--limit", "many"], "'many' is not a valid whole number."),
        (["list", "--arg", "order_id="], "expected NAME=VALUE or VALUE, as in order_id=ORD-1, got 'order_id='."),
        (["show", ORDER, "--arg", "ORD-1"], "Expected either a KEY or --arg, got both."),
    ],
)
def test_what_is_typed_wrongly_is_answered_with_what_to_type(on_shelf: Run, typed: list[str], words: str) -> None:
    said = on_shelf(*typed)
    assert said.status == Exit.USAGE
    assert words in said.err


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["show", "ORD-7"], "to look for ORD-7 in them: list --arg ORD-7"),
        (["show", "idem:shop.charge:ORD-1"], f"did you mean {ORDER}?"),
        (["show", "shop.charge:ORD-1"], f"did you mean {ORDER}?"),
        (["forget", "idem:shop.charge::*"], "For all keys that begin so: --prefix idem:shop.charge::"),
        (["list", "--task", "charge"], "Did you mean --task shop.charge?"),
        (["list", "--task", "shop.chrge"], "Did you mean --task shop.charge?"),
    ],
)
def test_a_key_or_task_that_is_not_there_is_answered_with_one_that_is(
    on_shelf: Run, shelf: Shelf, typed: list[str], words: str
) -> None:
    settle(shelf, ORDER)
    assert words in on_shelf(*typed).err


def test_an_app_names_its_stores_itself(shelf: Shelf) -> None:
    said = by_app(app_with(shelf), "list", "--store", "redis://localhost/1")
    assert said.status == Exit.USAGE
    assert "For another store: celery-idempotent list --store URL" in said.err


def test_without_a_named_app_the_error_says_to_name_one() -> None:
    said = by_app(Celery(set_as_current=False), "list")
    assert said.status == Exit.USAGE
    assert "name the app: celery -A proj idempotency" in said.err
