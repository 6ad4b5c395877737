"""Every example runs, on real workers: what a reader is told to do is done, and what they are told to see is seen.

That of RQ is in `test_rq_example.py`, that of an HTTP API in `test_shop_api.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.support import processes
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.nodes import WorkerNode
from tests.support.docs.pages import ROOT
from tests.support.servers import open_client
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker

#: How long everything takes in the examples, which a reader is given ten seconds for.
SECONDS = "1.5"


@pytest.fixture
def ledger(worker_env: dict[str, str], tmp_path: Path) -> Callable[[], list[str]]:
    """The lines of the examples' ledger."""
    path = tmp_path / "ledger.txt"
    worker_env["LEDGER"] = str(path)
    return lambda: path.read_text().splitlines() if path.exists() else []


def tasks(app: Celery) -> Any:
    return app.module


def pids(node: WorkerNode, word: str) -> list[int]:
    """Return the processes that the worker's log says have come to this point, in their order."""
    lines = [line.split() for line in node.logs().splitlines() if "process " in line and f" {word} " in line]
    return [int(words[words.index("process") + 1]) for words in lines]


def wait_for_pid(node: WorkerNode, word: str, count: int = 1) -> int:
    return wait_until(lambda: pids(node, word)[count - 1 :], 30, lambda: f"{word!r} in the log:\n{node.logs()}")[0]


def oldest_unacked(broker: redis.Redis) -> float:
    """Return how many seconds ago the broker handed out what has waited for its ack the longest."""
    scores: Any = broker.zrange("unacked_index", 0, 0, withscores=True)
    return time.time() - scores[0][1]


def test_every_example_is_tested() -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"namespaced", "shop_api"}
    apps = {"shop", "tutorial", "payment", "retries", "namespaced"}
    assert examples == apps | {"folder_store", "consumer", "rq_shop", "shop_api"}


@pytest.mark.smoke
def test_the_shop_charges_an_order_once_and_resizes_per_call(
    client_app: Callable[..., Celery], start_worker: StartWorker, ledger: Callable[[], list[str]]
) -> None:
    start_worker("examples.shop")
    shop = tasks(client_app("examples.shop"))
    receipts = [shop.charge.delay("ORD-1", 999) for _ in range(3)]
    images = [shop.resize.delay("cat.png") for _ in range(2)]
    assert [receipt.get(timeout=20) for receipt in receipts] == ["receipt for ORD-1"] * 3
    assert [image.get(timeout=20) for image in images] == ["small cat.png"] * 2
    assert sorted(ledger()) == ["charged ORD-1 999", "resized cat.png", "resized cat.png"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_the_shop_charges_an_order_once_on_other_pools(
    client_app: Callable[..., Celery], start_worker: StartWorker, ledger: Callable[[], list[str]], pool: str
) -> None:
    start_worker("examples.shop", pool=pool)
    shop = tasks(client_app("examples.shop"))
    receipts = [shop.charge.delay("ORD-1", 999) for _ in range(3)]
    assert [receipt.get(timeout=20) for receipt in receipts] == ["receipt for ORD-1"] * 3
    assert ledger() == ["charged ORD-1 999"]


def test_settings_with_a_prefix_reach_the_tasks(
    client_app: Callable[..., Celery], start_worker: StartWorker, ledger: Callable[[], list[str]], store_url: str
) -> None:
    start_worker("examples.namespaced.tasks")
    site = tasks(client_app("examples.namespaced.tasks"))
    names = [site.welcome.delay(7).get(timeout=20) for _ in range(2)]
    assert names == ["site:examples.namespaced.tasks.welcome::~7"] * 2
    assert ledger() == ["welcomed 7"]
    record = RedisStore.from_url(store_url).get(names[0])
    assert record is not None
    assert record.state is State.COMPLETED


@pytest.mark.parametrize("name", ["charge", "refund"])
def test_a_retried_payment_settles_and_its_duplicate_gets_the_result(
    client_app: Callable[..., Celery], start_worker: StartWorker, ledger: Callable[[], list[str]], name: str
) -> None:
    start_worker("examples.retries")
    task = getattr(tasks(client_app("examples.retries")), name)
    assert task.delay("ORD-1", 999).get(timeout=20) == "receipt for ORD-1"
    assert task.delay("ORD-1", 999).get(timeout=20) == "receipt for ORD-1"
    assert ledger() == [f"called ORD-1 {attempt}" for attempt in range(3)]


def test_a_declined_card_is_not_tried_again(
    client_app: Callable[..., Celery], start_worker: StartWorker, ledger: Callable[[], list[str]]
) -> None:
    start_worker("examples.retries")
    charge = tasks(client_app("examples.retries")).charge
    for _ in range(2):
        with pytest.raises(Exception, match="ORD-1 is above the limit") as caught:
            charge.delay("ORD-1", 200_000).get(timeout=20)
        assert type(caught.value).__name__ == "CardDeclined"
    assert ledger() == ["called ORD-1 0"]


@pytest.mark.nightly
def test_a_payment_killed_before_its_record_is_charged_once_by_the_gateway(
    client_app: Callable[..., Celery], start_worker: StartWorker, worker_env: dict[str, str], tmp_path: Path
) -> None:
    worker_env |= {"GATEWAY": str(tmp_path / "payments"), "SECONDS": SECONDS}
    node = start_worker("examples.payment")
    result = tasks(client_app("examples.payment")).pay.delay("ORD-6", 999)
    node.kill_child(wait_for_pid(node, "paid"))
    assert result.get(timeout=30).endswith("for ORD-6")
    assert len(pids(node, "paid")) == 2
    assert "the gateway knows" in node.logs()
    assert [charge.read_text() for charge in (tmp_path / "payments").iterdir()] == ["ORD-6 999"]


class TestTutorial:
    """The steps of docs/tutorial.md."""

    @pytest.fixture(autouse=True)
    def quickly(self, worker_env: dict[str, str], ledger: Callable[[], list[str]]) -> None:
        worker_env["SECONDS"] = SECONDS

    @pytest.fixture
    def module(self, client_app: Callable[..., Celery]) -> Any:
        return tasks(client_app("examples.tutorial"))

    @pytest.mark.nightly
    def test_step_1_a_plain_task_charges_twice(
        self, module: Any, start_worker: StartWorker, ledger: Callable[[], list[str]]
    ) -> None:
        start_worker("examples.tutorial")
        for result in [module.plain_charge.delay("ORD-1", 999) for _ in range(2)]:
            result.get(timeout=20)
        assert ledger() == ["charged ORD-1 999"] * 2

    def test_steps_2_and_3_a_duplicate_is_deferred_or_replays(
        self, module: Any, start_worker: StartWorker, ledger: Callable[[], list[str]]
    ) -> None:
        node = start_worker("examples.tutorial")
        for result in [module.charge.delay("ORD-2", 999) for _ in range(2)]:
            assert result.get(timeout=20) == "receipt for ORD-2"
        logs = node.logs()
        assert "Conflicted key=idem:examples.tutorial.charge::ORD-2" in logs
        assert "copy=2" in logs
        assert "Replayed key=idem:examples.tutorial.charge::ORD-2" in logs
        assert module.charge.delay("ORD-2", 999).get(timeout=20) == "receipt for ORD-2"
        with pytest.raises(Exception, match=r"::ORD-2' was used .* with other arguments"):
            module.charge.delay("ORD-2", 111).get(timeout=20)
        assert ledger() == ["charged ORD-2 999"]

    @pytest.mark.nightly
    def test_step_4_a_killed_child_is_replaced_at_once(
        self, module: Any, start_worker: StartWorker, ledger: Callable[[], list[str]]
    ) -> None:
        node = start_worker("examples.tutorial")
        result = module.charge.delay("ORD-3", 999)
        node.kill_child(wait_for_pid(node, "charges"))
        assert result.get(timeout=30) == "receipt for ORD-3"
        assert ledger() == ["charged ORD-3 999"]

    @pytest.mark.nightly
    def test_step_5_a_killed_worker_is_taken_over(
        self, module: Any, start_worker: StartWorker, ledger: Callable[[], list[str]], broker_url: str
    ) -> None:
        node = start_worker("examples.tutorial")
        result = module.charge.delay("ORD-4", 999)
        wait_for_pid(node, "charges")
        node.kill()
        with open_client(broker_url) as broker:
            wait_until(lambda: oldest_unacked(broker) > 3 * float(SECONDS), 20, "the visibility timeout to pass")
        node.start().ready()
        node.wait_for_log("TakenOver key=idem:examples.tutorial.charge::ORD-4", timeout=30)
        assert "crashes=1" in node.logs()
        assert result.get(timeout=30) == "receipt for ORD-4"
        assert ledger() == ["charged ORD-4 999"]

    @pytest.mark.nightly
    def test_step_6_a_process_killed_after_the_charge_leaves_nothing_that_says_so(
        self, module: Any, start_worker: StartWorker, ledger: Callable[[], list[str]]
    ) -> None:
        node = start_worker("examples.tutorial")
        result = module.charge.delay("ORD-5", 999)
        node.kill_child(wait_for_pid(node, "charged"))
        assert result.get(timeout=30) == "receipt for ORD-5"
        assert ledger() == ["charged ORD-5 999"] * 2


class Consumer:
    """A process of examples/consumer.py, and what it has said."""

    def __init__(self, env: dict[str, str], path: Path) -> None:
        self.path = path
        command = [sys.executable, "-m", "examples.consumer", "work"]
        with path.open("wb") as log:
            self.process = processes.spawn(
                command, env={**os.environ, **env}, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        self.says("is ready")

    @property
    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.log, 60, lambda: f"{text!r} in the log:\n{self.log}")


class TestConsumer:
    """What docs/guides/functions.md says of its consumers."""

    @pytest.fixture
    def start(self, worker_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], Consumer]]:
        worker_env["SECONDS"] = SECONDS
        started: list[Consumer] = []

        def start_one() -> Consumer:
            started.append(Consumer(worker_env, tmp_path / f"consumer-{len(started)}.log"))
            return started[-1]

        yield start_one
        for consumer in started:
            processes.end(consumer.process)

    @pytest.fixture
    def order(self, worker_env: dict[str, str]) -> Callable[..., None]:
        def publish(*order: str) -> None:
            command = [sys.executable, "-m", "examples.consumer", "order", *order]
            subprocess.run(command, env={**os.environ, **worker_env}, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        return publish

    @pytest.fixture
    def broker(self, broker_url: str) -> Iterator[redis.Redis]:
        with open_client(broker_url) as client:
            yield client

    def acknowledged(self, broker: redis.Redis, count: int) -> Callable[[], bool]:
        """Tell whether so many messages were delivered, and none of them is pending any more."""

        def look() -> bool:
            [group] = broker.xinfo_groups("orders") or [{}]  # type: ignore[misc]
            delivered = len(broker.xrange("orders", "-", group["last-delivered-id"]))  # type: ignore[arg-type]
            return bool(delivered == count and group["pending"] == 0)

        return look

    @pytest.mark.nightly
    @pytest.mark.smoke
    def test_an_order_that_is_published_twice_is_charged_once(
        self,
        start: Callable[[], Consumer],
        order: Callable[..., None],
        broker: redis.Redis,
        ledger: Callable[[], list[str]],
    ) -> None:
        for _ in range(2):
            order("ORD-1", "999")
        order("ORD-1", "111")
        order("", "1")
        start()
        start()
        wait_until(self.acknowledged(broker, 4), 60)
        assert ledger() == ["charged ORD-1 999"]
        dead: Any = broker.xrange("orders:dead")
        assert sorted(fields[b"error"].split(b" ")[0] for _, fields in dead) == [b"Expected", b"The"]

    @pytest.mark.nightly
    def test_an_order_whose_consumer_is_killed_is_charged_by_another(
        self,
        start: Callable[[], Consumer],
        order: Callable[..., None],
        broker: redis.Redis,
        worker_env: dict[str, str],
        ledger: Callable[[], list[str]],
    ) -> None:
        worker_env["SECONDS"] = "5"  # a busy machine must not let it end before it is killed; its lease is as long
        first = start()
        worker_env["SECONDS"] = SECONDS
        order("ORD-1", "999")
        first.says("charges ORD-1")
        processes.end(first.process)
        second = start()
        order("ORD-2", "999")
        wait_until(self.acknowledged(broker, 2), 60, lambda: second.log)
        assert ledger().count("charged ORD-1 999") == ledger().count("charged ORD-2 999") == 1
        second.says("TakenOver key=idem:payments.charge::ORD-1")

    @pytest.mark.nightly
    def test_a_consumer_that_is_told_to_end_gives_its_order_back(
        self,
        start: Callable[[], Consumer],
        order: Callable[..., None],
        broker: redis.Redis,
        worker_env: dict[str, str],
        ledger: Callable[[], list[str]],
    ) -> None:
        worker_env["SECONDS"] = "60"  # a busy machine must not let it end before it is told to
        first = start()
        worker_env["SECONDS"] = SECONDS
        order("ORD-1", "999")
        first.says("charges ORD-1")
        first.process.terminate()
        assert first.process.wait(30) == 0
        assert "Released key=idem:payments.charge::ORD-1" in first.log
        second = start()
        wait_until(self.acknowledged(broker, 1), 60, lambda: second.log)
        assert ledger() == ["charged ORD-1 999"]
        assert "TakenOver" not in second.log
