"""The commands on a SQL store: SQLite, which needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idempotent import cli, open_store
from celery_idempotent.cli.common import Exit
from celery_idempotent.stores import Store
from tests.support.cli.shelf import hold, keys, settle
from tests.support.stores.kinds import kind_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.sqlite'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = open_store(url)
    yield store
    store.close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return int(left.value.code or 0)


def test_what_has_expired_is_removed(url: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        settle(store, f"idem:old::{number}")
        kind_of(store).age(store, f"idem:old::{number}", 601)
    settle(store, "idem:new::1")
    assert run("purge", "--store", url) == Exit.OK
    assert ": 3 expired records removed" in capsys.readouterr().out
    assert keys(store) == {"idem:new::1"}


def test_a_prefix_is_forgotten_while_it_is_scanned(url: str, store: Store) -> None:
    for number in range(120):  # more than a page, and more than is read ahead
        settle(store, f"idem:a::{number}")
    settle(store, "idem:b::1")
    hold(store, "idem:a::held")
    assert run("forget", "--prefix", "idem:a:", "--yes", "--store", url) == Exit.NO
    assert keys(store) == {"idem:a::held", "idem:b::1"}


@pytest.mark.parametrize("command", ["list", "stats", "show k", "explain k", "doctor", "forget k", "purge"])
def test_a_file_that_is_not_there_is_an_error_and_not_made(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(*command.split(), "--store", url) == Exit.USAGE
    assert f"Expected the file of a store, got {url}, where none is" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_schema_is_pending_until_it_is_applied(url: str) -> None:
    assert run("schema", "--store", url) == Exit.NO
    assert run("schema", "--apply", "--store", url) == Exit.OK
    assert run("schema", "--store", url) == Exit.OK
