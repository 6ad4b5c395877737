"""What a person sees in Flower: a real one, a real worker, a real browser. docs/guides/flower.md describes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from selenium.webdriver.common.by import By

from tests.conftest import missing
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.nodes import WorkerNode
from tests.support.docs.pages import PYTHON, blocks
from tests.support.flower.browser import chromium, picture
from tests.support.flower.watching import Flower
from tests.support.servers import ServerMissing
from tests.support.waiting import wait_until

SHOP = "tests.support.flower.shop"
GUIDE = "docs/guides/flower.md"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with chromium() as opened:
            yield opened
    except ServerMissing as error:
        raise missing(error, optional="chromium") from None


@pytest.fixture
def flower(worker_env: dict[str, str], tmp_path: Path) -> Iterator[Flower]:
    """Flower with the flowerconfig.py of the guide."""
    (config,) = [block.text for block in blocks(GUIDE) if block.language == PYTHON and "format_task" in block.text]
    path = tmp_path / "flowerconfig.py"
    path.write_text(config)
    flower = Flower(SHOP, path, worker_env, tmp_path / "flower.log")
    yield flower
    flower.close()


@pytest.fixture
def worker(start_worker: StartWorker, flower: Flower) -> WorkerNode:
    return start_worker(SHOP, name="celery", concurrency=3, extra_args=["-E"])


class Scene:
    """One order that is done and asked for again, one that runs and is asked for again, and a plain task."""

    def __init__(self, app: Celery, gates: Gates) -> None:
        charge = app.module.charge
        self.first: AsyncResult = charge.delay("ORD-1", 999)
        self.first.get(timeout=20)
        self.replayed: AsyncResult = charge.delay("ORD-1", 999)
        self.replayed.get(timeout=20)
        self.gate = gates.close("ORD-2")
        self.running: AsyncResult = charge.delay("ORD-2", 4200)
        self.gate.reached()
        self.deferred: AsyncResult = charge.delay("ORD-2", 4200)
        self.plain: AsyncResult = app.module.greet.delay("world")
        self.plain.get(timeout=20)


@pytest.fixture
def scene(client_app: Callable[..., Celery], worker: WorkerNode, gates: Gates, flower: Flower) -> Scene:
    scene = Scene(client_app(SHOP), gates)
    wait_until(lambda: metric(flower, "task-deferred") and metric(flower, "task-replayed"), 30, "Flower to hear of it")
    return scene


def metric(flower: Flower, kind: str, task: str = "shop.charge") -> float:
    """Return how many events of a type Flower has counted."""
    lines = re.findall(r"^flower_events_total\{(.*?)\} (\S+)$", flower.get("/metrics"), re.MULTILINE)
    return sum(float(value) for labels, value in lines if f'type="{kind}"' in labels and f'task="{task}"' in labels)


def open_page(browser: Any, url: str, selector: str) -> None:
    browser.get(url)
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, selector), 20, f"{selector} on {url}")


def row(browser: Any, task_id: str) -> str:
    """Return the text of a task's row in the list."""
    rows = browser.find_elements(By.CSS_SELECTOR, "#tasks-table tbody tr")
    return next((found.text for found in rows if task_id in found.get_attribute("innerHTML")), "")


def test_the_task_list_shows_a_replayed_and_a_deferred_task_as_such(browser: Any, flower: Flower, scene: Scene) -> None:
    def states() -> list[str]:
        open_page(browser, f"{flower.url}/tasks", "#tasks-table tbody tr")
        results = (scene.first, scene.replayed, scene.running, scene.deferred, scene.plain)
        texts = [row(browser, result.id) for result in results]
        return [next(iter(re.findall(r"\b(?:[A-Z]+-)?[A-Z]{6,}\b", text)), "") for text in texts]

    expected = ["SUCCESS", "REPLAYED", "STARTED", "DEFERRED", "SUCCESS"]
    wait_until(lambda: states() == expected, 20, lambda: f"{expected}, not {states()}")
    picture(browser, "tasks")
    scene.gate.open()
    scene.deferred.get(timeout=30)
    expected[2:4] = ["SUCCESS", "REPLAYED"]
    wait_until(lambda: states() == expected, 20, lambda: f"{expected}, not {states()}")


@pytest.mark.nightly
def test_the_page_of_a_replayed_task_shows_its_key_and_the_original_task(
    browser: Any, flower: Flower, scene: Scene
) -> None:
    def text_of(task_id: str) -> str:
        open_page(browser, f"{flower.url}/task/{task_id}", ".detail-list, #task-page, table")
        return str(browser.find_element(By.TAG_NAME, "body").text)

    def expect(task_id: str, *texts: str) -> None:
        """Open the page of a task until it shows all of this: Flower hears of a task event by event."""

        def shown() -> bool:
            text = text_of(task_id)
            return all(wanted in text for wanted in texts)

        wait_until(shown, 20, lambda: f"{texts}, not {text_of(task_id)}")

    expect(
        scene.replayed.id,
        "replayed: answered with the outcome of an earlier run",
        "key: idem:shop.charge::ORD-1",
        f"original task: {scene.first.id}",
        "receipt for ORD-1",
    )
    picture(browser, "replayed")
    expect(
        scene.deferred.id,
        "deferred: a duplicate of what is being done, tried again later",
        "key: idem:shop.charge::ORD-2",
    )
    picture(browser, "deferred")
    expect(scene.first.id, "receipt for ORD-1")
    assert "idem:" not in text_of(scene.first.id)


@pytest.mark.nightly
def test_the_page_of_a_worker_shows_its_counts_and_live_leases(
    browser: Any, flower: Flower, scene: Scene, worker: WorkerNode
) -> None:
    open_page(browser, f"{flower.url}/worker/{worker.hostname()}", "#tab-other")
    browser.find_element(By.CSS_SELECTOR, "[data-bs-target='#tab-other'], a[href='#tab-other']").click()
    other = browser.find_element(By.ID, "tab-other")
    facts = ("idempotency", "'leases': 1", "'acquired': 2", "'completed': 1", "'replayed': 1")
    wait_until(lambda: all(fact in other.text for fact in facts), 20, lambda: f"{facts}, not {other.text}")
    picture(browser, "worker")


@pytest.mark.smoke
def test_flower_counts_what_became_of_tasks_in_its_metrics(flower: Flower, scene: Scene) -> None:
    assert metric(flower, "task-replayed") == 1
    assert metric(flower, "task-deferred") >= 1
    assert metric(flower, "task-received") >= 4
    assert metric(flower, "task-replayed", "shop.greet") == 0
    scene.gate.open()
    scene.deferred.get(timeout=30)
    wait_until(lambda: metric(flower, "task-replayed") == 2, 20, "the replay to be counted")
