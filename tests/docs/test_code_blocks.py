"""Every Python block of the pages runs, on a real Redis, and every session prints what the page says it prints.

The blocks of one page run in their order and share their names, as a reader understands them. No worker is started:
`task_always_eager` has Celery run in place what is published, as `is_async=False` has RQ, and `apply()` is guarded like
a delivery. What needs a worker is an example, and `test_examples.py` runs it.
"""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from celery import Celery
from celery.app import defaults
from rq import Queue

from celery_idempotent import events
from tests.support.docs.pages import PYTHON, SESSION, SHOWN, Block, blocks, pages
from tests.support.docs.stage import stage

#: Whose blocks are files of a project: `test_django_page.py` runs them.
LAID_OUT = "docs/guides/django.md"
LOCAL = re.compile(r"redis://localhost(?::6379)?(?:/(\d+))?(?=[\"'\s])")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def on_our_redis(fresh_redis: Callable[[], str]) -> Callable[[str], str]:
    """A function that has code speak to the tests' Redis, each database of the page being an empty one of ours."""
    urls: dict[str, str] = {}

    def move(text: str) -> str:
        return LOCAL.sub(lambda match: urls.setdefault(match[1] or "0", "") or _take(match[1] or "0"), text)

    def _take(number: str) -> str:
        urls[number] = fresh_redis()
        return urls[number]

    return move


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have apps that are made from now on run in place what is published, and keep the results; and queues of RQ."""
    monkeypatch.setitem(defaults.DEFAULTS, "task_always_eager", True)
    monkeypatch.setitem(defaults.DEFAULTS, "task_store_eager_result", True)
    monkeypatch.setattr(Queue, "__init__", partialmethod(Queue.__init__, is_async=False))


@pytest.fixture
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page hooks in, and where it counts, is gone after it."""
    monkeypatch.setattr(events, "_hooks", list(events._hooks))
    monkeypatch.setattr(events.logger, "filters", list(events.logger.filters))
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())


@pytest.mark.parametrize("page", [page for page in pages() if page != LAID_OUT])
@pytest.mark.usefixtures("in_place", "own_hooks")
def test_the_code_of_a_page_runs(
    page: str, on_our_redis: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes to a file is not left in the tree
    module = stage()
    monkeypatch.setitem(sys.modules, module.__name__, module)  # as a result backend looks up a task's exceptions
    names = vars(module)
    for block in blocks(page):
        if block.language == PYTHON:
            run(block, on_our_redis(block.text), names)
        elif block.language == SESSION:
            talk(block, on_our_redis(block.text), names)
    for app in [value for value in names.values() if isinstance(value, Celery)]:
        app.close()


@pytest.mark.parametrize("page", pages())
def test_a_block_of_a_page_says_in_which_language_it_is(page: str) -> None:
    unknown = [f"{page}:{block.line} {block.language!r}" for block in blocks(page) if block.language not in known()]
    assert not unknown, f"write one of {sorted(known())}"


def test_there_is_code_to_run() -> None:
    assert sum(block.language in (PYTHON, SESSION) for page in pages() for block in blocks(page)) >= 40


def known() -> set[str]:
    return SHOWN | {PYTHON, SESSION}


def run(block: Block, text: str, names: dict[str, Any]) -> None:
    # Blank lines before it, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + text, block.page, "exec")
    exec(code, names)


def talk(block: Block, text: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, f"{block.page}:{block.line}", block.page, block.line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not runner.failures, "".join(report)
