"""Plain functions and jobs of RQ, in an environment that has neither Celery nor kombu nor what they bring."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import celery_idempotent

#: What belongs to Celery alone.
WEIGHT = ("celery", "kombu", "billiard", "amqp", "vine", "prompt_toolkit")

SHOP = """
import sys
for name in {weight}:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} is there")

from datetime import date
from decimal import Decimal
from celery_idempotent import current_lease, idempotent

ran = []

@idempotent(store={store!r}, key="order_id", name="shop.charge")
def charge(order_id, cents):
    ran.append(order_id)
    return {{"cents": cents, "on": date(2026, 11, 25)}}

first = charge("ORD-1", Decimal("9.99"))
assert charge("ORD-1", Decimal("9.99")) == first == {{"cents": Decimal("9.99"), "on": date(2026, 11, 25)}}, first
assert ran == ["ORD-1"], ran
"""

JOBS = """
from redis import Redis
from rq import Queue, SimpleWorker
from celery_idempotent.rq import idempotent

@idempotent(key="order_id")
def send_invoice(order_id):
    redis.rpush("invoices", order_id)
    return order_id

redis = Redis.from_url({store!r})
send_invoice.__module__ = send_invoice.__wrapped__.__module__ = "invoices"
sys.modules["invoices"] = sys.modules["__main__"]
queue = Queue("invoices", connection=redis)
jobs = [queue.enqueue(send_invoice, "ORD-1") for _ in range(2)]
SimpleWorker([queue], connection=redis).work(burst=True, logging_level="ERROR")
assert [job.latest_result().return_value for job in jobs] == ["ORD-1", "ORD-1"], jobs
assert redis.lrange("invoices", 0, -1) == [b"ORD-1"]
"""


def closure(*names: str) -> set[str]:
    """Return the distributions that `pip install NAMES` would install, of those that are installed here."""
    found: set[str] = set()
    open_ = set(names)
    while open_:
        name = open_.pop()
        found.add(name)
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_ |= {requirement.name} - found
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library, redis-py and RQ, and what these need."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "celery_idempotent").symlink_to(Path(celery_idempotent.__file__).parent)
    for name in closure("redis", "hiredis", "rq"):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(installed.locate_file(top))
    return folder


def run(environment: Path, script: str) -> str:
    code = "import sys; sys.path.append(sys.argv[1]); exec(sys.argv[2])"
    command = [sys.executable, "-S", "-E", "-c", code, str(environment), script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_function_takes_effect_once_on_redis(environment: Path, redis_url: str) -> None:
    run(environment, SHOP.format(weight=WEIGHT, store=redis_url))


def test_the_commands_show_what_a_function_has_left(environment: Path, redis_url: str) -> None:
    call = SHOP.format(weight=WEIGHT, store=redis_url)
    for words in (["list"], ["explain", "idem:shop.charge::ORD-1"]):
        command = f"from celery_idempotent.cli import main\nmain(['--store', {redis_url!r}, *{words}])"
        assert "idem:shop.charge::ORD-1" in run(environment, call + command)
        call = ""


def test_a_function_takes_effect_once_on_sqlite(environment: Path, tmp_path: Path) -> None:
    run(environment, SHOP.format(weight=WEIGHT, store=f"sqlite:///{tmp_path}/shop.db"))


def test_a_job_takes_effect_once(environment: Path, redis_url: str) -> None:
    run(environment, SHOP.format(weight=WEIGHT, store="memory://") + JOBS.format(store=redis_url))
