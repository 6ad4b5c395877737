"""An app that takes its settings from a module of prefixed names. In Django the module is "django.conf:settings".

celery -A examples.namespaced.tasks worker --concurrency 2
python -c 'from examples.namespaced.tasks import welcome; print(welcome.delay(7).get(timeout=10))'
"""

import os
from pathlib import Path

from celery import Celery

from celery_idempotent import IdempotentTask

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))

app = Celery("site")
app.config_from_object("examples.namespaced.settings", namespace="CELERY")


@app.task(bind=True, base=IdempotentTask, idempotency={"key": "user_id"})
def welcome(self, user_id: int) -> str:
    """Send one welcome mail per user."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"welcomed {user_id}\n")
    return self.lease.key
