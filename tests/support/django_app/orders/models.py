from __future__ import annotations

from django.db import models


class Payment(models.Model):
    order_id = models.TextField()
    cents = models.IntegerField()

    class Meta:
        app_label = "orders"
