"""What the pages say of the library is what the library has."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Ignore, Retry

import celery_idempotent
from celery_idempotent import Policy, errors, events
from celery_idempotent.celery import delivery
from celery_idempotent.units import parse_duration, parse_size
from tests.support.docs.pages import ROOT, pages

LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#\s]+)(#[^)]*)?\)")
ROW = re.compile(r"^\| `(?P<option>\w+)` \| (?P<default>.*?) \|", re.MULTILINE)
OPTIONS = {field.name: field.default for field in fields(Policy) if field.name != "_given"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages())
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    linked = [match["path"] for match in LINK.finditer(text_of(page))]
    broken = [path for path in linked if not ((ROOT / page).parent / path).exists()]
    assert not broken


@pytest.mark.parametrize("page", pages())
def test_a_page_has_at_most_1500_words_with_its_code(page: str) -> None:
    words = [word for word in text_of(page).split() if word.strip("|:-")]  # the frame of a table has none
    assert len(words) <= 1500, f"{page}: shorten it, or give a part of it a page of its own"


def options_in(page: str) -> dict[str, str]:
    return {row["option"]: row["default"] for row in ROW.finditer(text_of(page)) if row["option"] in OPTIONS}


def test_the_configuration_page_lists_every_option() -> None:
    assert options_in("docs/configuration.md").keys() == OPTIONS.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_a_table_states_the_defaults_that_the_code_has(page: str) -> None:
    for option, shown in options_in(page).items():
        default: Any = OPTIONS[option]
        if option in ("key", "scope", "store", "max_lease", "large_results"):
            assert default is None, option
        elif option == "fingerprint":
            assert default is True
        elif isinstance(default, (bool, str)):
            assert shown.strip('`"') == str(default), option
        elif option == "remember_failures":
            assert default == ()
        elif option == "max_crashes":
            assert int(shown) == default
        elif option in ("compress_above", "result_max_bytes"):
            assert parse_size(shown, option) == default
        else:
            assert parse_duration(shown, option) == default, option


def test_the_checklist_names_events_that_exist() -> None:
    section = text_of("docs/guides/production.md").partition("## What to watch")[2].partition("```")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named
    assert named <= set(events.__all__)


def test_the_pages_name_errors_that_exist() -> None:
    known = {*errors.__all__, *celery_idempotent.__all__}
    everything = "".join(text_of(page) for page in pages())
    named = set(re.findall(r"celery_idempotent\.errors\.(\w+)", everything))
    assert named
    assert named <= known


def test_what_an_error_tracker_is_to_leave_out_is_what_ends_a_delivery_without_an_error() -> None:
    own = {kind for kind in vars(delivery).values() if isinstance(kind, type) and issubclass(kind, Ignore)}
    block = text_of("docs/guides/observing.md").partition("error_collector.ignore_classes = ")[2].partition("```")[0]
    assert set(block.split()) == {f"{kind.__module__}:{kind.__name__}" for kind in {Ignore, Retry, *own}}


def test_the_diagrams_in_the_repository_are_those_that_the_build_draws() -> None:
    diagrams = load(ROOT / "docs" / "diagrams.py")
    drawn = {f"{name}.svg": diagram() for name, diagram in diagrams.DIAGRAMS.items()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "images").glob("*.svg")}
    assert kept == drawn, "run `python docs/diagrams.py`"


def test_every_picture_is_shown() -> None:
    shown = {Path(path).name for page in pages() for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text_of(page))}
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
