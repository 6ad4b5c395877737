"""The plugin as users' suites have it: found by its entry point, in a pytest of their own."""

from __future__ import annotations

import os
import sys

import pytest

SUITE = """
import pytest
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop")
app.conf.update(task_always_eager=True, idempotency_store="redis://127.0.0.1:1/0")
charged = []


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id):
    charged.append(order_id)


@pytest.fixture(autouse=True)
def no_charges():
    charged.clear()


@pytest.mark.parametrize("number", [1, 2])
def test_fresh(idempotency_store, number):
    charge.delay("A")
    charge.delay("A")
    assert charged == ["A"]
    assert len(list(idempotency_store.scan())) == 1


def test_off(idempotency_off):
    charge.delay("A")
    charge.delay("A")
    assert charged == ["A", "A"]
"""


WORKER = """
import pytest
from celery.contrib.testing.worker import start_worker

from test_shop import app, charge, charged, no_charges


@pytest.fixture(scope="module", autouse=True)
def worker():
    app.conf.update(task_always_eager=False, broker_url="memory://", result_backend="cache+memory://")
    with start_worker(app, perform_ping_check=False, shutdown_timeout=30):
        yield


def test_fresh(idempotency_store):
    for _ in range(2):
        charge.delay("A").get(timeout=30)
    assert charged == ["A"]
    assert len(list(idempotency_store.scan())) == 1


def test_off(idempotency_off):
    for _ in range(2):
        charge.delay("A").get(timeout=30)
    assert charged == ["A", "A"]
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_shop=SUITE)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    return pytester


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_the_fixtures_are_there_without_being_imported(suite: pytest.Pytester, options: list[str]) -> None:
    result = suite.runpytest_subprocess(*options)
    result.assert_outcomes(passed=3)


@pytest.mark.nightly
def test_a_worker_in_a_thread_uses_what_the_test_has(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_worker=WORKER)
    result = suite.runpytest_subprocess("test_worker.py", "-W", "default")
    result.assert_outcomes(passed=2)


@pytest.mark.nightly
def test_under_coverage_the_fixtures_are_there_too(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
        monkeypatch.delenv(name)  # the data of the suite are its own, and not those of the run that this test is in
    result = suite.run(sys.executable, "-m", "coverage", "run", "--source", ".", "-m", "pytest", "-q")
    result.assert_outcomes(passed=3)


@pytest.mark.nightly
def test_the_plugin_can_be_left_out(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-p", "no:celery_idempotent")
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["*fixture 'idempotency_store' not found*"])


def test_loading_the_plugin_imports_nothing_else(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            mine = {name for name in sys.modules if name.startswith("celery_idempotent")}
            assert mine == {f"celery_idempotent{part}" for part in ("", ".testing", ".testing.plugin")}
            assert not {"celery", "kombu", "redis", "rq"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "celery_idempotent").assert_outcomes(passed=1)


def test_the_kit_needs_no_pytest(pytester: pytest.Pytester) -> None:
    script = """
import sys
sys.modules["pytest"] = None
from celery_idempotent import testing
assert sorted(testing.__all__) == sorted(dir(testing))
for name in testing.__all__:
    if not name.endswith("Contract"):
        getattr(testing, name)
assert not hasattr(testing, "nothing")
print("ready")
"""
    pytester.runpython_c(script).stdout.fnmatch_lines(["ready"])
