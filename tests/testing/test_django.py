"""The kit in a real Django: what was remembered is rolled back with the rows that tasks made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from celery import Celery
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from celery_idempotent import IdempotentTask
from celery_idempotent.testing import IdempotencyTestMixin, assert_takes_effect_once, crash_at, redeliver
from shop.models import Payment

app = Celery("shop")
app.conf.update(task_always_eager=True, task_eager_propagates=True, idempotency_store="redis://127.0.0.1:1/0")


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def pay(order_id):
    return Payment.objects.create(order_id=order_id).order_id


@app.task(bind=True, base=IdempotentTask, idempotency={"key": "order_id"})
def pay_within(self, order_id):
    with transaction.atomic():
        Payment.objects.create(order_id=order_id)
        self.lease.settle(order_id, using="default")
    return order_id


class Rollback(IdempotencyTestMixin, TestCase):
    @classmethod
    def setUpTestData(cls):
        pay.delay("class")

    def setUp(self):  # without super().setUp()
        pay.delay("setup")

    def test_a(self):
        assert {each.order_id for each in Payment.objects.all()} == {"class", "setup"}
        for order_id in ("class", "setup", "test", "test"):
            pay.delay(order_id)
        assert Payment.objects.count() == 3
        assert len(list(self.idempotency_store.scan())) == 3

    test_b = test_a

    def test_a_payment_within_its_transaction_is_safe(self):
        count = lambda: Payment.objects.filter(order_id="ORD-1").count()
        assert_takes_effect_once(pay_within, ("ORD-1",), effects=count)
        with self.assertRaisesMessage(AssertionError, "dies after_effect"):
            assert_takes_effect_once(pay, ("ORD-2",), effects=Payment.objects.values_list)

    def test_an_error_rolls_both_back(self):
        with self.assertRaises(ZeroDivisionError):
            pay_and_fail.delay("A")
        assert Payment.objects.filter(order_id="A").count() == 0
        [record] = [each for each in self.idempotency_store.scan() if "pay_and_fail" in each.key]
        assert record.state.value == "released"


@app.task(bind=True, base=IdempotentTask, idempotency={"key": "order_id"})
def pay_and_fail(self, order_id):
    with transaction.atomic():
        Payment.objects.create(order_id=order_id)
        self.lease.settle(order_id, using="default")
        raise ZeroDivisionError


class Flush(IdempotencyTestMixin, TransactionTestCase):
    def test_a(self):
        pay.delay("A")
        pay.delay("A")
        assert Payment.objects.count() == 1

    test_b = test_a


class OnItsDatabase(TransactionTestCase):
    def test_a_crash(self):
        with crash_at("after_effect") as crash:
            stored.delay("A")
        assert redeliver(crash).get() == "A"
        assert Payment.objects.count() == 1


disk = Celery("disk", set_as_current=False)
disk.conf.update(task_always_eager=True, idempotency_store=f"sqlite:///{connection.settings_dict['TEST']['NAME']}")


@disk.task(bind=True, base=IdempotentTask, idempotency={"key": "order_id"})
def stored(self, order_id):
    with transaction.atomic():
        Payment.objects.create(order_id=order_id)
        self.lease.settle(order_id, using="default")
    return order_id
"""

SETTINGS = """
import os
SECRET_KEY = "test"
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
HERE = os.path.dirname(__file__)
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{HERE}/db", "TEST": {"NAME": f"{HERE}/test.db"}}
}
"""

MODELS = """
from django.db import models


class Payment(models.Model):
    order_id = models.CharField(max_length=20)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    for name, text in {"settings": SETTINGS, "shop/__init__": "", "shop/models": MODELS, "shop/tests": TESTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.nightly
def test_what_was_remembered_is_rolled_back_with_the_rows(project: Path) -> None:
    command = [sys.executable, "-m", "django", "test", "--noinput", "--settings", "settings", "--pythonpath", "."]
    run = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert "Ran 7 tests" in run.stderr
