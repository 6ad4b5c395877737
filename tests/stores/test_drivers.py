"""A store whose driver is missing says how to get it; and SQLite what keeps it from opening its file."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from celery_idempotent import stores
from celery_idempotent.errors import ConfigurationError, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sqlite.connections import translate_error


def test_a_driver_that_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("celery_idempotent.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'celery-idempotent\[postgres\]'"):
        open_store("postgresql://app:secret@db/shop")


@pytest.mark.parametrize("extra", ["", "postgres"])
def test_a_module_of_ours_that_is_missing_is_no_matter_of_drivers(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    monkeypatch.setitem(stores.SCHEMES, "odd", ("nothing_of_the_kind", "OddStore", extra))
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        open_store("odd://")


def why(path: Path) -> StoreError:
    return translate_error(sqlite3.OperationalError("unable to open database file"), str(path))


def test_a_file_that_cannot_be_opened_is_told_with_its_reason(tmp_path: Path) -> None:
    assert isinstance(missing := why(tmp_path / "nowhere" / "shop.db"), StoreRefused)
    assert "there is no folder" in str(missing)
    assert isinstance(folder := why(tmp_path), StoreRefused)
    assert "it is a folder" in str(folder)
    assert isinstance(many := why(tmp_path / "shop.db"), StoreUnreachable)
    assert "too many files open" in str(many)


def test_a_file_that_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "to be allowed to write" in str(why(tmp_path / "shop.db"))
