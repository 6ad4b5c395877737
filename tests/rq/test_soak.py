"""What the table of RQ's ways stages with a time that lies ahead, with RQ's own minutes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rq import Retry

from tests.support.rq import shop
from tests.support.rq.twice import AFTER, MODES, Mode, Stage
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.soak, pytest.mark.timeout(400)]
#: Seconds: a minute until RQ takes a job for abandoned, and as long again on a machine that is busy.
LONG = 240.0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.replace(" ", "-"))
@pytest.mark.parametrize("alive", [True, False], ids=["horse-alive", "both-killed"])
def test_a_job_that_rq_takes_for_abandoned_after_a_minute_is_charged_once_with_the_decorator(
    mode: Mode, alive: bool, fresh_redis: Callable[[], str], tmp_path: Path
) -> None:
    with closing(Stage(mode, fresh_redis(), tmp_path)) as stage:
        job, worker, horse = stage.enqueue_and_hold(AFTER, retry=Retry(max=3))
        worker.kill()
        if not alive:
            worker.kill_horse(horse)
        stage.fault()
        # It looks after its registries whenever it has waited for a job for a second.
        stage.open(mode.worker, "--worker-ttl", "16", "--maintenance-interval", "2")
        wait_until(lambda: stage.again(job).retries_left == 2, LONG, stage.logs)
        stage.gates.open_all()
        count = stage.counted(job)
    bare = mode.function is shop.plain
    assert count.effects == (2 if bare else 1)
    assert count.runs == (2 if bare or not alive else 1)
    print(f"\n{mode.name}, {'horse alive' if alive else 'both killed'}: {count}")
