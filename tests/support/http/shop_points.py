"""Moments at which processes of examples/shop_api are killed; the example knows nothing of them."""

from __future__ import annotations

from tests.support.faults.failpoints import FailPoints

#: Of its server, and of its worker.
SERVER = (
    "before the order is written",
    "before the commit",
    "after the commit",  # and before the task is published
    "while the response is sent",
)
WORKER = "after the charge, before its commit"
#: Whatever is done when it strikes.
ANY = "an order"


class ShopPoints(FailPoints):
    """The fail points of the example."""

    points = (*SERVER, WORKER)
