"""`show`, and what all commands have in common: where the store comes from, and how errors are said."""

from __future__ import annotations

import json
from collections.abc import Callable

import click
import pytest

from celery_idempotent import cli
from celery_idempotent.commands.exits import Exit, status_of
from celery_idempotent.errors import ConfigurationError, IdempotencyError, MissingKey
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, Said, app_with, by_app
from tests.cli.shelf import Shelf, hold, settle
from tests.servers import RedisServer, open_client

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
    assert json.loads(on_redis("show", KEY, "--json").out)["holder"] == "host:1"


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


def test_an_app_knows_its_stores_and_takes_no_url(shelf: Shelf) -> None:
    said = by_app(app_with(shelf), "show", KEY, "--store", "memory://")
    assert said.status == Exit.USAGE
    assert "--store" in said.err


def test_an_app_without_a_store_is_told_so() -> None:
    said = by_app(app_with(None), "purge")
    assert said.status == Exit.USAGE
    assert "idempotency_store" in said.err
    assert issubclass(ConfigurationError, IdempotencyError)
