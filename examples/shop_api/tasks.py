"""The worker: it charges orders, and publishes again what has not been charged.

With Redis and PostgreSQL on localhost: `celery -A examples.shop_api.tasks worker -B`
"""

import os
from datetime import timedelta

from celery import Celery
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from celery_idempotent import IdempotentTask

from . import gateway
from .models import URL, Order, engine

#: Once an order is that old, its message is taken for lost. To be wrong costs a message, and no charge.
LATE = timedelta(minutes=1)

app = Celery("shop", broker=os.environ.get("BROKER_URL", "redis://localhost/0"))
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {"visibility_timeout": 30}  # workers refresh it while they run
app.conf.idempotency_store = URL
app.conf.beat_schedule = {"late": {"task": "examples.shop_api.tasks.publish_late", "schedule": 60.0}}


@app.task(bind=True, base=IdempotentTask, ignore_result=True, idempotency={"key": "order_id", "result_ttl": "7d"})
def charge(self, order_id: str, cents: int) -> str:
    """Charge an order once, however many messages say so; the gateway does the same for a run that is repeated."""
    receipt = gateway.charge(order_id, cents, idempotency_key=self.lease.derived_key("gateway"))
    with Session(engine) as session:
        session.get_one(Order, order_id).receipt = receipt
        self.lease.settle(receipt, using=session)
        session.commit()
    return receipt


@app.task(ignore_result=True)
def publish_late() -> None:
    """Publish the orders that wait for their charge: the server died before it did, or the broker lost the message."""
    with Session(engine) as session:
        late = select(Order).where(Order.receipt.is_(None), Order.placed_at < func.now() - LATE)
        for order in session.scalars(late):
            charge.delay(order.id, order.cents)
