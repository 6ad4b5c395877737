"""`show`, and what all commands have in common: where the store comes from, and how errors are said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, cli
from celery_idempotent.cli.common import Exit, status_of
from celery_idempotent.errors import ConfigurationError, IdempotencyError, MissingKey
from celery_idempotent.stores import Store
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, Said, app_with, by_app
from tests.support.cli.shelf import Shelf, hold, settle
from tests.support.servers import RedisServer, open_client

KEY = "idem:shop.charge::ORD-1"
NOWHERE = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """A function that runs `celery-idempotent` as a shell would, without a store unless it is named."""
    monkeypatch.delenv("CELERY_IDEMPOTENT_STORE", raising=False)

    def run(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Said(int(left.value.code or 0), out, err)

    return run


def test_a_record_is_shown(on_redis: Run, redis_store: RedisStore) -> None:
    lease = hold(redis_store, KEY)
    said = on_redis("show", KEY)
    assert said.status == Exit.OK
    assert {"in_progress", "host:1", "T1", str(lease.fence)} <= set(said.out.split())
    assert re.search(r"^remaining +\d+ (s|min)$", said.out, re.M)
    record = json.loads(on_redis("show", KEY, "--json").out)
    assert (record["holder"], type(record["remaining"])) == ("host:1", float)


def test_a_key_without_its_namespace_gets_a_hint(on_redis: Run, redis_store: RedisStore) -> None:
    settle(redis_store, KEY)
    said = on_redis("show", "shop.charge::ORD-1")
    assert said.status == Exit.NO
    assert f"did you mean {KEY}?" in said.err
    assert "did you mean" not in on_redis("show", "shop.charge::ORD").err


def test_the_hint_knows_the_namespace_of_the_app(shelf: Shelf) -> None:
    settle(shelf, "site:shop.charge::1")
    assert (
        "did you mean site:shop.charge::1?"
        in by_app(app_with(shelf, idempotency_namespace="site"), "show", "shop.charge::1").err
    )


def test_the_store_can_be_named_by_an_option_or_by_the_environment(
    main: Callable[..., Said], redis_url: str, redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(redis_store, KEY)
    assert "host:1" in main("show", KEY, "--store", redis_url).out
    monkeypatch.setenv("CELERY_IDEMPOTENT_STORE", redis_url)
    assert "host:1" in main("show", KEY).out
    assert main("show", KEY, "--store", NOWHERE).status == Exit.UNREACHABLE  # the option goes first


def test_the_store_may_be_named_before_the_command(
    main: Callable[..., Said], redis_url: str, redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(redis_store, KEY)
    assert "host:1" in main("--store", redis_url, "show", KEY).out
    assert "host:1" in main(f"--store={redis_url}", "list", "--held").out
    monkeypatch.setenv("CELERY_IDEMPOTENT_STORE", NOWHERE)
    assert "host:1" in main("--store", redis_url, "show", KEY).out  # it goes before the environment
    assert "host:1" in main("--store", NOWHERE, "show", KEY, "--store", redis_url).out  # as what follows goes before it


@pytest.mark.parametrize(
    "command", [("show", KEY), ("forget", KEY), ("purge",), ("schema",), ("list",), ("release", KEY), ("stats",)]
)
def test_without_a_store_a_command_says_how_to_name_one(main: Callable[..., Said], command: tuple[str, ...]) -> None:
    said = main(*command)
    assert said.status == Exit.USAGE
    assert "--store" in said.err
    assert "CELERY_IDEMPOTENT_STORE" in said.err


@pytest.mark.parametrize(
    "command",
    [
        ("show", KEY),
        ("forget", KEY),
        ("forget", "--prefix", "idem:", "--yes"),
        ("list",),
        ("purge",),
        ("release", KEY, "--yes"),
        ("stats",),
    ],
)
def test_a_store_that_does_not_answer_is_one_line_and_a_status(
    main: Callable[..., Said], command: tuple[str, ...]
) -> None:
    said = main(*command, "--store", NOWHERE)
    assert (said.status, said.out) == (Exit.UNREACHABLE, "")
    assert "cannot serve" in said.err
    assert "secret" not in said.err
    assert said.err.count("\n") == 1


def test_a_url_that_names_no_store_is_a_usage_error_with_a_suggestion(main: Callable[..., Said]) -> None:
    said = main("purge", "--store", "reddis://localhost")
    assert said.status == Exit.USAGE
    assert "Did you mean redis://?" in said.err


def test_a_store_that_refuses_us_has_a_status_of_its_own(
    main: Callable[..., Said], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis(requirepass="right")
    said = main("show", KEY, "--store", f"redis://:wrong@127.0.0.1:{server.port}/0")
    assert said.status == Exit.REFUSED
    assert "wrong@" not in said.err


def test_what_is_no_record_has_a_status_of_its_own(main: Callable[..., Said], redis_url: str) -> None:
    with open_client(redis_url) as client:
        client.set(KEY, "somebody else's")
    assert main("show", KEY, "--store", redis_url).status == Exit.UNREADABLE


def test_an_error_without_a_status_of_its_own_is_a_no() -> None:
    assert status_of(MissingKey("none")) is Exit.NO


def test_an_unknown_command_suggests_the_one_that_was_meant(main: Callable[..., Said]) -> None:
    said = main("forgt", KEY)
    assert said.status == Exit.USAGE
    assert "'forget'" in said.err
    known = ", ".join(map(repr, cli.cli.list_commands(click.Context(cli.cli))))
    assert known in main("dance").err
    assert cli.cli.get_command(click.Context(cli.cli), "dance") is None


class Interrupted(Shelf):
    """A store in whose verbs somebody presses Ctrl-C."""

    def get(self, key: str) -> None:
        raise KeyboardInterrupt


class Closing(Shelf):
    """A store in whose closing somebody presses Ctrl-C."""

    def close(self) -> None:
        raise KeyboardInterrupt


def test_an_interruption_is_a_status_and_no_traceback(invoke: Callable[..., Said]) -> None:
    assert Run(invoke, Interrupted())("show", KEY).status == Exit.INTERRUPTED


def test_an_interruption_of_the_last_moment_is_so_too(by_url: Callable[..., Said]) -> None:
    assert Run(by_url, Closing())("show", KEY).status == Exit.INTERRUPTED


def test_an_interruption_before_any_command_is_so_too(
    main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "parse_args", interrupted)
    assert main("show", KEY).status == Exit.INTERRUPTED


class Broken(Shelf):
    """A store that cannot serve, in many words."""

    def get(self, key: str) -> None:
        raise IdempotencyError("cannot\nserve")


def test_every_store_of_the_tasks_is_looked_into_and_named() -> None:
    own, other = Shelf(), Shelf()
    app = app_with(own, other)
    settle(other, "idem:pay::1")
    said = by_app(app, "show", "idem:pay::1")
    assert said.status == Exit.OK
    assert said.out.splitlines()[0].split() == ["store", "Shelf", "(2)"]
    assert "in Shelf, Shelf (2)" in by_app(app, "show", "idem:pay::2").err


def test_a_store_that_fails_does_not_hide_what_another_one_knows() -> None:
    other = Shelf()
    app = app_with(Broken(), other)
    settle(other, "idem:pay::1")
    said = by_app(app, "show", "idem:pay::1")
    assert said.status == Exit.NO
    assert "completed" in said.out
    assert said.err == "Error: cannot serve\n"


def test_the_modules_of_the_tasks_are_loaded_first(shelf: Shelf) -> None:
    app = app_with(shelf, imports=["tests.cli.no_such_module"])
    said = by_app(app, "purge")
    assert said.status == Exit.USAGE
    assert "no_such_module" in said.err


@pytest.mark.parametrize("command", ["purge", "doctor"])
def test_a_module_that_ends_the_process_where_it_is_imported_does_not_end_the_command(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / f"script_of_{command}.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = by_app(app_with(shelf, imports=[f"script_of_{command}"]), command)
    assert said.status == Exit.USAGE
    assert "one called sys.exit(0)" in " ".join((said.out + said.err).split())


def test_an_app_knows_its_stores_and_takes_no_url(shelf: Shelf) -> None:
    said = by_app(app_with(shelf), "show", KEY, "--store", "memory://")
    assert said.status == Exit.USAGE
    assert "--store" in said.err


def test_an_app_without_a_store_is_told_so() -> None:
    said = by_app(app_with(None), "purge")
    assert said.status == Exit.USAGE
    assert "idempotency_store" in said.err
    assert issubclass(ConfigurationError, IdempotencyError)


# -- by what a person knows of an operation ----------------------------------------------------------------------------


def shop(store: Store) -> Celery:
    """Return an app with a task of each kind of key."""
    app = app_with(store)

    def charge(order_id: str, cents: int = 0) -> None: ...

    def ship(shop: str, number: int) -> None: ...

    declared: dict[str, tuple[Any, dict[str, Any]]] = {
        "shop.charge": (charge, {"key": "order_id"}),
        "shop.ship": (ship, {"key": ("shop", "number")}),
        "shop.invoice": (charge, {"key": "order_id", "scope": "tenant"}),
        "shop.resize": (charge, {}),
    }
    for name, (body, options) in declared.items():
        app.task(body, name=name, base=IdempotentTask, idempotency=options, shared=False)
    return app


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (("ORD-1",), "idem:shop.charge::ORD-1"),
        (("17",), "idem:shop.charge::~17"),
        (('["berlin", 7]',), 'idem:shop.ship::~["berlin",7]'),
        (("ORD-1", "--header", "tenant=acme"), "idem:shop.invoice:acme:ORD-1"),
        (("0b1ee2a1",), "idem:shop.resize:0b1ee2a1"),
        (("--task", "shop.charge", "ORD-1"), "idem:shop.charge::ORD-1"),
        (("--task", "shop.charge", "--args", '["ORD-1"]'), "idem:shop.charge::ORD-1"),
        (("--task", "shop.charge", "--kwargs", '{"order_id": 17}'), "idem:shop.charge::~17"),
        (("--task", "shop.ship", "--args", '["berlin"]', "--kwargs", '{"number": 7}'), 'idem:shop.ship::~["berlin",7]'),
        (("--task", "shop.invoice", "--args", '["A"]', "--header", "tenant=acme"), "idem:shop.invoice:acme:A"),
    ],
)
def test_an_app_finds_a_key_by_what_a_person_knows_of_it(shelf: Shelf, typed: tuple[str, ...], key: str) -> None:
    settle(shelf, key)
    for command in ("show", "explain"):
        said = by_app(shop(shelf), command, *typed)
        assert (said.status, key in said.out) == (Exit.OK, True), said


def test_what_two_tasks_know_under_one_text_is_shown_of_both(shelf: Shelf) -> None:
    for task in ("shop.charge", "shop.ship"):
        settle(shelf, f"idem:{task}::ORD-1")
    said = by_app(shop(shelf), "show", "ORD-1")
    assert said.status == Exit.OK
    assert all(f"idem:{task}::ORD-1" in said.out for task in ("shop.charge", "shop.ship"))


def test_what_was_forgotten_is_found_by_its_history(shelf: Shelf) -> None:
    settle(shelf, KEY)
    by_app(shop(shelf), "forget", KEY)
    assert "forgotten by" in by_app(shop(shelf), "explain", "ORD-1").out


def test_a_command_that_changes_something_guesses_no_task_and_says_which_key_was_meant(shelf: Shelf) -> None:
    hold(shelf, KEY)
    for command in ("forget", "release"):
        said = by_app(shop(shelf), command, "ORD-1", "--yes")
        assert said.status == Exit.NO
        assert f"did you mean {KEY}?" in said.err
        assert shelf.get(KEY) is not None


@pytest.mark.parametrize("named", [("ORD-1",), ("--args", '["ORD-1"]')], ids=["key", "arguments"])
def test_a_key_that_is_named_by_its_task_is_released_and_forgotten(shelf: Shelf, named: tuple[str, ...]) -> None:
    hold(shelf, KEY)
    assert by_app(shop(shelf), "release", "--task", "shop.charge", *named, "--yes").out.startswith(f"{KEY} is released")
    assert by_app(shop(shelf), "forget", "--task", "shop.charge", *named).out == f"{KEY} is forgotten\n"
    assert shelf.get(KEY) is None


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ((), "Missing argument 'KEY', or --arg NAME=VALUE."),
        (("--args", '["ORD-1"]'), "--task"),
        (("--task", "shop.charge"), "one of: KEY; --arg"),
        (("--task", "shop.charge", "A", "--args", '["A"]'), "one of: KEY; --arg"),
        (("--task", "shop.chrge", "A"), "Did you mean shop.charge?"),
        (("--task", "nothing", "A"), "There is shop.charge, shop.invoice"),
        (("--task", "shop.charge", "--args", "ORD-1"), "expected JSON"),
        (("--task", "shop.charge", "--args", '"ORD-1"'), """'["ORD-1"]'"""),
        (("--task", "shop.charge", "--kwargs", "[]"), '"order_id"'),
        (("--task", "shop.charge", "--args", "[]"), "order_id"),
        (("--task", "shop.resize", "--args", '["A"]'), "the id of each message"),
        (("--task", "shop.invoice", "--args", '["A"]'), "tenant"),
        (("A", "--header", "tenant"), "NAME=VALUE"),
    ],
)
def test_a_key_that_cannot_be_told_is_a_usage_error(shelf: Shelf, typed: tuple[str, ...], words: str) -> None:
    said = by_app(shop(shelf), "show", *typed)
    assert said.status == Exit.USAGE, said
    assert words in said.err


@pytest.mark.parametrize("named", [("--args", '["ORD-1"]'), ("--kwargs", "{}"), ("--header", "tenant=acme")], ids=str)
@pytest.mark.parametrize("command", ["show", "explain", "release", "forget"])
def test_what_takes_an_app_says_so_without_one(
    by_url: Callable[..., Said], shelf: Shelf, command: str, named: tuple[str, str]
) -> None:
    said = by_url(shelf, (command, "--task", "shop.charge", *named), None)
    assert said.status == Exit.USAGE, said
    assert f"Expected an app for {named[0]}" in said.err
    assert "`celery -A proj idempotency`, which has it, or write --arg NAME=VALUE." in said.err
    assert f"{named[0]} " not in by_url(shelf, (command, "--help"), None).out


def test_a_task_tells_the_key_of_a_call(shelf: Shelf) -> None:
    tasks = shop(shelf).tasks
    assert tasks["shop.charge"].key_for("ORD-1", 999) == tasks["shop.charge"].key_for(order_id="ORD-1") == KEY
    assert tasks["shop.charge"].key_for("ORD-1", idempotency_key="req-42") == "idem:shop.charge::req-42"
    key = tasks["shop.invoice"].key_for("ORD-1", idempotency_headers={"tenant": "acme"})
    assert key == "idem:shop.invoice:acme:ORD-1"
    with pytest.raises(MissingKey, match="tenant"):
        tasks["shop.invoice"].key_for("ORD-1")
    with pytest.raises(MissingKey, match="the id of each message"):
        tasks["shop.resize"].key_for("ORD-1")
    with pytest.raises(TypeError):
        tasks["shop.charge"].key_for()
