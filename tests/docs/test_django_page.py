"""The files of docs/guides/django.md, laid into a new project, protect its task as the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.pages import PYTHON, blocks

PAGE = "docs/guides/django.md"
#: What needs a package that is not installed here.
LEFT_OUT = {"orders/tenants.py"}
PROBE = """
import json, os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.management import execute_from_command_line
for command in json.loads(sys.argv[1]):
    execute_from_command_line(command)

from django.test import RequestFactory
from orders import views
from orders.models import Payment
from orders.tasks import charge
assert [charge.apply(("ORD-1", 999)).get() for _ in range(3)] == [1, 1, 1]
assert Payment.objects.count() == 1
assert "celery_idempotent.purge" in charge.app.conf.beat_schedule
assert views.place(RequestFactory().get("/"), "ORD-2").status_code == 202
"""


@pytest.fixture
def folder(tmp_path: Path, redis_url: str) -> Path:
    """A new project with an app `orders`, and in it what the page shows."""
    (tmp_path / "orders").mkdir()
    run(tmp_path, "-m", "django", "startproject", "shop", ".")
    (tmp_path / "orders" / "__init__.py").touch()
    files: dict[str, str] = {"shop/settings.py": (tmp_path / "shop" / "settings.py").read_text()}
    for block in blocks(PAGE):
        if block.language == PYTHON:
            name, text = block.text.removeprefix("# ").split("\n", 1)
            text = re.sub(r"^(\w+) = \[\n    \.\.\.,\n", r"\1 += [\n", text, flags=re.MULTILINE)
            files[name] = files.get(name, "") + text.replace("redis://localhost:6379/0", redis_url)
    for name in files.keys() - LEFT_OUT:
        (tmp_path / name).write_text(files[name])
    return tmp_path


def run(folder: Path, *command: str) -> str:
    line = [sys.executable, *command]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_project_is_protected_by_what_the_page_shows(folder: Path) -> None:
    commands = [
        line.removeprefix("$ python ").split()
        for block in blocks(PAGE)
        if block.language == "console"
        for line in block.text.splitlines()
        if line.startswith("$ python ")
    ]
    assert len(commands) == 3
    printed = run(folder, "-c", PROBE, json.dumps(commands))
    assert "Applying celery_idempotent.0001_initial... OK" in printed
    assert "no issues" in printed
