"""The worker of examples/shop_api, killed where a test has armed that; it looks every second for what is late."""

from __future__ import annotations

import os
from datetime import timedelta

from examples.shop_api import gateway, tasks
from tests.support.http.shop_points import ANY, WORKER, ShopPoints

app = tasks.app
app.conf.idempotency = {"lease_ttl": 1}
app.conf.beat_schedule["late"]["schedule"] = 1.0
tasks.LATE = timedelta(seconds=1)

points = ShopPoints(os.environ["FAIL_POINTS"])
points.operation = ANY
points.around(gateway, "charge", after=WORKER)
