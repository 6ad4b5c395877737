"""A consumer to kill: `python -m tests.support.functions.killed URL`; its environment names journal and gates."""

from __future__ import annotations

import asyncio
import os
import sys

from celery_idempotent import idempotent
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

URL, HOW = sys.argv[1:3]


def work(order: str) -> int:
    Journal.from_env().write("charged", order)
    Gates.from_env().wait("charged")
    return os.getpid()


@idempotent(store=URL, key="order", name="shop.charge")
def charge(order: str) -> int:
    return work(order)


@idempotent(store=URL, key="order", name="shop.charge")
async def charge_later(order: str) -> int:
    return await asyncio.to_thread(work, order)


print(charge("ORD-1") if HOW == "sync" else asyncio.run(charge_later("ORD-1")))
