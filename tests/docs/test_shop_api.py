"""The example of an HTTP API: its server and its worker are killed, and its clients notice nothing but time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
import requests

from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.docs.command_lines import command_lines
from tests.support.docs.pages import PYTHON, ROOT, blocks
from tests.support.http.shop_points import ANY, SERVER, WORKER, ShopPoints
from tests.support.processes import end, spawn
from tests.support.proxy import Proxy
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker

#: What makes the tables.
[TABLES] = [line.text for line in command_lines() if line.text.startswith("python -m examples.shop_api.")]


class Shop:
    """The example on real servers, and what is to be seen of it from outside."""

    def __init__(self, directory: Path, database: str, broker: str, proxy: Proxy) -> None:
        self.directory, self.database, self.charges = directory, database, directory / "charges"
        self.points, self.journal = ShopPoints(directory / "points"), Journal(directory / "journal")
        #: between the server and the broker
        self.proxy = proxy
        self.env = {
            **os.environ,
            "DATABASE_URL": database,
            "BROKER_URL": broker,
            "GATEWAY": str(self.charges),
            "FAIL_POINTS": str(self.points.directory),
            "JOURNAL": str(self.journal.path),
        }
        self.port, self.log = free_port(), directory / "server.log"
        beat = ["-B", f"--schedule={directory / 'beat'}"]
        self.worker = WorkerNode(
            "tests.support.http.shop_worker", broker, directory=directory, env=self.env, extra_args=beat
        )

    def start(self) -> None:
        env = {**self.env, "BROKER_URL": self.proxy.url(int(self.env["BROKER_URL"].rpartition("/")[2]))}
        with self.log.open("wb") as output:
            server = [sys.executable, "-m", "tests.support.http.shop_server", str(self.port)]
            self.server = spawn(server, env=env, cwd=ROOT, stdout=output, stderr=output)
        subprocess.run([sys.executable, *TABLES.split()[1:]], env=self.env, cwd=ROOT, check=True)
        self.worker.start()
        self.worker.ready()
        wait_until(lambda: "startup complete" in self.logs(), 60, self.logs)

    def stop(self) -> None:
        end(self.server)
        self.worker.teardown()

    def logs(self) -> str:
        return f"{self.log.read_text()}\n{self.worker.logs()}"

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def call(self, method: str, path: str, caller: str = "anna", key: str = "", **options: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer token-of-{caller}", **({"Idempotency-Key": key} if key else {})}
        return requests.request(method, self.url(path), headers=headers, timeout=20, **options)

    def place(self, order: dict[str, object], caller: str = "anna", key: str = "") -> requests.Response:
        return self.call("POST", "/orders", caller, key, json=order)

    def wait_until_charged(self, path: str) -> None:
        wait_until(lambda: self.call("GET", path).json()["status"] == "charged", 30, self.logs)

    def placed(self, item: str = "%") -> list[str]:
        """Return the ids of the orders of an item, or of all."""
        with psycopg.connect(self.database) as connection:
            return [row[0] for row in connection.execute("select id from orders where item like %s", (item,))]

    def charged(self) -> Counter[str]:
        """Return how often the gateway has charged each order, by its own books."""
        return Counter(path.read_text().removesuffix(" 999") for path in self.charges.glob("*"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, postgres_server: Any, redis_databases: Any) -> Iterator[Shop]:
    name, db = f"shop_{uuid4().hex}", redis_databases.take()
    url = postgres_server.url()
    broker = redis_databases.server.url(db)
    with psycopg.connect(url, autocommit=True) as connection, Proxy(urlsplit(broker).port or 6379) as proxy:
        connection.execute(f"create database {name}".encode())
        database = urlsplit(url)._replace(path=f"/{name}").geturl()
        shop = Shop(tmp_path_factory.mktemp("shop"), database, broker, proxy)
        try:
            shop.start()
            yield shop
        finally:
            shop.stop()
            connection.execute(f"drop database {name} with (force)".encode())
    redis_databases.give_back(db)


@pytest.fixture(scope="module")
def send() -> Callable[..., requests.Response]:
    """The client that the page for clients shows."""
    names: dict[str, Any] = {}
    for block in blocks("docs/guides/http-clients.md"):
        if block.language == PYTHON:
            exec(block.text, names)
    found: Callable[..., requests.Response] = names["send"]
    return found


@pytest.mark.parametrize("moment", [*SERVER, WORKER])
def test_whatever_is_killed_an_order_is_placed_and_charged_once_and_has_one_answer(
    shop: Shop, send: Callable[..., requests.Response], moment: str
) -> None:
    key, order = uuid4().hex, new_order()
    shop.points.arm(moment, ANY, group=moment == WORKER)
    answers = [send(shop.url("/orders"), order, ANNA, key)]
    path = answers[0].headers["Location"]
    if moment == WORKER:
        wait_until(lambda: not shop.worker.running, 30, shop.logs)
        shop.worker.start()
    shop.wait_until_charged(path)
    answers.append(send(shop.url("/orders"), order, ANNA, key))
    assert {(answer.status_code, answer.headers["Location"], answer.text) for answer in answers} == {
        (202, path, answers[0].text)
    }
    assert answers[-1].headers["Idempotent-Replayed"] == "true"
    [order_id] = shop.placed(order["item"])
    assert path == f"/orders/{order_id}"
    assert shop.charged()[order_id] == 1
    assert set(shop.charged()) <= set(shop.placed())
    assert shop.journal.entries("killed")[-1].fields["point"] == moment


def test_an_order_that_is_placed_while_the_broker_is_down_is_answered_and_charged_when_it_is_back(shop: Shop) -> None:
    key, order, refused = uuid4().hex, new_order(), shop.proxy.refused
    shop.proxy.refuse()
    shop.proxy.reset()
    answer = shop.place(order, key=key)
    shop.proxy.heal()
    assert answer.status_code == 202
    assert shop.proxy.refused > refused
    assert shop.place(order, key=key).text == answer.text
    shop.wait_until_charged(answer.headers["Location"])
    [order_id] = shop.placed(order["item"])
    assert shop.charged()[order_id] == 1


def test_a_key_is_its_callers_own_and_stands_for_one_order(shop: Shop) -> None:
    key, order = uuid4().hex, new_order()
    assert shop.place({**order, "cents": 0}, key=key).status_code == 422  # nothing was done: the key is free
    answer = shop.place(order, key=key)
    assert answer.status_code == 202
    reused = shop.place(new_order(), key=key)
    assert (reused.status_code, reused.json()["type"].rpartition(":")[2]) == (422, "key-reused")
    assert shop.place(order).status_code == 400
    assert shop.place(order, "nobody", key).status_code == 401
    of_ben = shop.place(order, "ben", key)
    assert of_ben.status_code == 202
    assert shop.call("GET", of_ben.headers["Location"]).status_code == 404
    assert shop.call("GET", of_ben.headers["Location"], "nobody").status_code == 401
    assert len(shop.placed(order["item"])) == 2


ANNA = {"Authorization": "Bearer token-of-anna"}


def new_order() -> dict[str, Any]:
    return {"item": uuid4().hex, "cents": 999}
