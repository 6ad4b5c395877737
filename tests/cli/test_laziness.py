"""A command line that is looked at loads nothing, and a command loads what it needs itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys
from celery_idempotent import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as left:
    assert not left.code, left
print("LOADED", *sorted(sys.modules))
"""
# sqlite3 is the standard library's, and who measures coverage brings it.
DRIVERS = {"redis", "psycopg", "boto3", "botocore", "sqlalchemy", "django", "celery", "kombu", "rich"}


HELPED = ("forget", "list", "release", "schema", "stats", "watch")


def loaded(*arguments: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter has after this command."""
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED ")[2].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), *((name, "--help") for name in HELPED)])
def test_help_loads_no_driver_and_no_framework(arguments: tuple[str, ...]) -> None:
    assert not {name.partition(".")[0] for name in loaded(*arguments)} & DRIVERS


def test_a_command_loads_no_other_and_the_demo_no_store() -> None:
    ours = {name for name in loaded("demo", "--help") if name.startswith("celery_idempotent.")}
    assert "celery_idempotent.cli.demo" in ours
    nouns = {f"celery_idempotent.stores.{name}" for name in ("base", "history", "records", "rules")}
    assert {name for name in ours if "stores." in name} <= nouns
    assert not ours & {f"celery_idempotent.cli.{name}" for name in ("forget", "purge", "schema", "show")}
