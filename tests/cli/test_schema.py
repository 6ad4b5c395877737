"""`schema`: what a store needs on its server is said, and done when asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from celery_idempotent.cli.common import Exit
from tests.cli.conftest import Run, app_with, by_app
from tests.support.cli.shelf import Shelf


def test_what_is_pending_is_printed_and_told_by_the_status(on_shelf: Run, shelf: Shelf) -> None:
    said = on_shelf("schema")
    assert (said.status, said.out, shelf.applied) == (Exit.NO, "CREATE TABLE shelf ();\n", 0)
    assert "--apply" in said.err


def test_what_is_pending_is_done_when_asked(on_shelf: Run, shelf: Shelf) -> None:
    said = on_shelf("schema", "--apply")
    assert (said.status, said.out, shelf.applied) == (Exit.OK, "CREATE TABLE shelf ();\n", 1)
    again = on_shelf("schema", "--apply")
    assert (again.status, again.out, shelf.applied) == (Exit.OK, "", 1)
    assert "nothing" in again.err


def test_a_store_that_needs_none_has_nothing_pending(on_redis: Run) -> None:
    for command in (("schema",), ("schema", "--apply")):
        said = on_redis(*command)
        assert (said.status, said.out) == (Exit.OK, "")


def test_scripts_get_json(on_shelf: Run, shelf: Shelf) -> None:
    (pending,) = json.loads(on_shelf("schema", "--json").out).values()
    assert pending == {"pending": "CREATE TABLE shelf ();\n", "applied": ""}
    (applied,) = json.loads(on_shelf("schema", "--apply", "--json").out).values()
    assert applied == {"pending": "", "applied": "CREATE TABLE shelf ();\n"}


def test_every_store_of_the_tasks_is_prepared() -> None:
    own, other = Shelf(), Shelf()
    app = app_with(own, other)
    own.apply_schema()
    assert by_app(app, "schema").status == Exit.NO
    assert by_app(app, "schema", "--apply").status == Exit.OK
    assert (own.applied, other.applied) == (1, 1)


def test_a_database_of_django_is_found_where_the_project_is_and_words_say_where_it_is_not(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "site_settings.py").write_text(
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'site.sqlite3'}}\n"
    )
    command = [Path(sys.executable).with_name("celery-idempotent"), "--store", "django://default", "schema", "--apply"]
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "site_settings"}
    ran = [
        subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
        for folder in (project, elsewhere)
    ]
    assert [each.returncode for each in ran] == [Exit.OK, Exit.USAGE]
    assert (project / "site.sqlite3").exists()
    assert "No module named 'site_settings'. Set DJANGO_SETTINGS_MODULE to a module that" in ran[1].stderr
    assert "Traceback" not in ran[1].stderr
