"""What the table of RQ's ways stages with a time that lies ahead, with RQ's own minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rq import Retry
from rq.job import Job

from tests.support.rq import horses
from tests.support.rq.twice import MODES, Mode, Stage
from tests.support.rq.workers import kill_horse
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.soak, pytest.mark.timeout(400)]
#: Seconds: a minute until RQ takes a job for abandoned, and as long again on a machine that is busy.
LONG = 240.0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.replace(" ", "-"))
@pytest.mark.parametrize("alive", [True, False], ids=["horse-alive", "both-killed"])
def test_a_job_that_rq_takes_for_abandoned_after_a_minute_is_charged_once_with_the_decorator(
    mode: Mode, alive: bool, fresh_redis: Callable[[], str], tmp_path: Path
) -> None:
    with Stage(mode, fresh_redis(), tmp_path) as stage:
        job, worker, horse = stage.enqueue_and_hold("charged", retry=Retry(max=3))
        worker.kill()
        if not alive:
            kill_horse(horse)
        stage.fault()
        # It looks after its registries whenever it has waited for a job for a second.
        stage.start(mode.worker, "--worker-ttl", "16", "--maintenance-interval", "2")
        wait_until(lambda: Job.fetch(job.id, stage.client).retries_left == 2, LONG, stage.logs)
        stage.gates.open_all()
        count = stage.counted(job)
    bare = mode.function is horses.plain
    assert count.effects == (2 if bare else 1)
    assert count.runs == (2 if bare or not alive else 1)
    print(f"\n{mode.name}, {'horse alive' if alive else 'both killed'}: {count}")
