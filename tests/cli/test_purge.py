"""`purge`: expired records go, in batches, from every store."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest

from celery_idempotent.cli.common import Exit, ProgressCounter
from celery_idempotent.errors import StoreUnreachable
from tests.cli.conftest import Run, app_with, by_app
from tests.support.cli.shelf import Shelf, keys, settle
from tests.support.servers import open_client
from tests.support.waiting import wait_until


class Away(Shelf):
    """A store that removes one batch and then cannot serve."""

    def purge(self, limit: int | None = None) -> int:
        if self.batches:
            raise StoreUnreachable("The store cannot serve.")
        self.batches.append(limit)
        return limit or 0


def test_what_has_expired_is_removed_and_counted(on_shelf: Run, shelf: Shelf) -> None:
    shelf.fill_expired(7)
    settle(shelf, "idem:new")
    said = on_shelf("purge")
    assert (said.status, said.err) == (Exit.OK, "")
    assert ": 7 expired records removed" in said.out
    assert "secret" not in said.out
    assert keys(shelf) == {"idem:new"}
    assert ": 0 expired" in on_shelf("purge").out


def test_a_limit_is_kept(on_shelf: Run, shelf: Shelf) -> None:
    shelf.fill_expired(7)
    assert ": 3 expired" in on_shelf("purge", "--limit", "3").out
    assert shelf.batches == [3]
    assert ": 4 expired" in on_shelf("purge").out


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_limit_is_a_number_of_records(on_shelf: Run, limit: str) -> None:
    assert on_shelf("purge", "--limit", limit).status == Exit.USAGE


def test_a_server_that_expires_by_itself_leaves_nothing_to_remove(on_redis: Run) -> None:
    said = on_redis("purge", "--json")
    assert (said.status, list(json.loads(said.out)["removed"].values())) == (Exit.OK, [0])


def test_every_store_of_the_tasks_is_purged() -> None:
    own, other = Shelf(), Shelf()
    app = app_with(own, other, other)  # two tasks of one store
    own.fill_expired(2)
    other.fill_expired(3)
    assert json.loads(by_app(app, "purge", "--json").out) == {"removed": {"Shelf": 2, "Shelf (2)": 3}}


def test_a_store_that_goes_away_does_not_keep_the_others_from_it() -> None:
    other = Shelf()
    other.fill_expired(3)
    app = app_with(Away(), other)
    said = by_app(app, "purge")
    assert said.status == Exit.UNREACHABLE
    assert said.out == "Shelf: 3 expired records removed\n"
    assert said.err == "1,000 expired records removed before it ended\nError: The store cannot serve.\n"


def test_an_app_none_of_whose_tasks_uses_its_inherited_store_is_not_asked_for_one() -> None:
    other = Shelf()
    app = app_with(None, other)
    assert by_app(app, "purge").out == "Shelf: 0 expired records removed\n"


@pytest.mark.nightly
@pytest.mark.worker
@pytest.mark.smoke
def test_celerys_own_command_line_purges_every_store_and_keeps_the_status(redis_url: str) -> None:
    with open_client(redis_url) as client:
        client.sadd("expired", *range(1500))
    command = [sys.executable, "-m", "celery", "-A", "tests.support.celery.purge_app", "idempotency", "purge"]
    env = {**os.environ, "STORE_URL": redis_url, "BROKER_URL": "memory://", "RESULT_URL": "cache+memory://"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "Expiring: 1,500 expired records removed\n"
    assert done.returncode == Exit.UNREACHABLE
    assert "cannot serve" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_number_rises_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("celery_idempotent.cli.common.EVERY", 0.001)
    with ProgressCounter("removed") as tally:
        wait_until(lambda: "\r0 removed, 0 s" in screen.getvalue(), message="a sign of life before anything is done")
        tally.add(1000)
        tally.add(234)
        wait_until(lambda: re.search(r"\r1,234 removed, \d+ s", screen.getvalue()))
    assert screen.getvalue().endswith(" s\r\x1b[K")
    left = screen.getvalue()
    tally = ProgressCounter("removed")
    tally.add(7)
    with pytest.raises(KeyboardInterrupt), tally:
        raise KeyboardInterrupt
    assert screen.getvalue().removeprefix(left).endswith("\r\x1b[K7 removed before it ended\n")
