"""The reference of commands has every command with every option, and no other."""

from __future__ import annotations

import re
from importlib import import_module

import click
import pytest

from celery_idempotent.cli import cli
from celery_idempotent.cli.common import KeyCommand
from tests.support.docs.pages import ROOT

PAGES = [*sorted((ROOT / "docs/reference").glob("commands*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |^# |\Z)", TEXT, re.MULTILINE | re.DOTALL))
#: Commands with a guide of their own.
GUIDED = {"doctor", "web"}
COMMANDS = sorted({*cli.list_commands(click.Context(cli))} - GUIDED)
#: Options that every command has, or every command on keys.
COMMON = {"--store", "--help"}
NAMING = {"--task", "--arg", "--args", "--kwargs", "--header"}


def command(name: str) -> click.Command:
    found: click.Command = import_module(f"celery_idempotent.cli.{name}").command
    return found


def options(name: str) -> set[str]:
    return {word for each in command(name).params for word in each.opts if word.startswith("--")} - COMMON


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_has_the_options_of_its_command(name: str) -> None:
    synopsis = "\n".join(re.findall(r"^celery.*$", SECTIONS[name], re.MULTILINE))
    written = set(re.findall(r"--[a-z][a-z-]*", synopsis)) - COMMON
    if "[the options of list but --json]" in synopsis:
        written |= options("list") - {"--json"}
    if name == "watch":
        written -= {"--json"}
    assert written == options(name)


def test_the_options_that_name_a_key_are_those_of_commands_on_keys() -> None:
    naming = TEXT.partition("## Naming a key\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"--[a-z]+", naming)) - COMMON == NAMING
    assert {name for name in COMMANDS if isinstance(command(name), KeyCommand)} == {
        "explain",
        "forget",
        "release",
        "show",
    }
