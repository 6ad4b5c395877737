"""The model's reductions take nothing away: what it says is what happens on the real memory store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import message
from celery_idempotent.stores import memory, rules

from .programs import Points, clock, real_code
from .protocol import Configuration, Protocol, Tally, canonical
from .real import Real, comparable
from .search import Search

CONFIGURATIONS = [
    Configuration("AAB", faults=4, raises=2, retries=2, checks=True, broker=True, unmarked=True),
    Configuration("AB", faults=3, operator=True, data_loss=True),
]


WALKS = 20
#: What the model has as an event of its own, and for real is decided by how long a request took.
LATE = ", for too long"


def walk(configuration: Configuration, protocol: Protocol, seed: int, steps: int) -> int:
    """Let what a seed says happen in the model and for real; return how much did."""
    chance = Random(seed)
    core, tally = protocol.start()
    real = Real(configuration, protocol.points)
    done: list[str] = []
    for _ in range(steps):
        now = clock.now
        choices = {}
        for event in [*protocol.events(core, faults=False), *protocol.events(core, faults=True)]:
            after = tally.after(event.change)
            if event.core is not None and isinstance(after, Tally):
                choices[event.label] = (event, after)
        clock.now = now  # the model has looked up what it did not know
        labels = [label for label in choices if not label.endswith(LATE)]
        if not labels:
            break
        label = chance.choices(labels, [1 if choices[label][0].change.faults else 3 for label in labels])[0]
        done.append(label)
        real.happen(label, core)
        assert real.points_known(), "\n".join(["a point that the model does not know", *done])
        is_real = comparable(real.core())
        may_be = [choices[each] for each in (label, label + LATE) if each in choices]
        alike = [(event.core, after) for event, after in may_be if event.core and comparable(event.core) == is_real]
        models = [str(comparable(event.core)) for event, _ in may_be if event.core]
        assert alike, "\n".join([*done, "real:", str(is_real), "model:", *models])
        core, tally = alike[0]
    for worker in real.workers:
        real._leave(worker)
    return len(done)


def walks(configuration: Configuration, seeds: range) -> int:
    """Go as these seeds say, and return how much happened."""
    with real_code():
        protocol = Protocol(configuration)
        return sum(walk(configuration, protocol, seed, 50) for seed in seeds)


@pytest.fixture
def on_the_models_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "time", lambda: clock.now)
    monkeypatch.setattr(rules, "STEADY_RENEWALS", 10**6)  # the model has no lease that was renewed so often


@pytest.mark.usefixtures("on_the_models_clock")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_the_model_says_is_what_happens_for_real(configuration: Configuration) -> None:
    assert walks(configuration, range(WALKS)) > WALKS * 25


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("on_the_models_clock")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_the_model_says_is_what_happens_for_real_for_long(configuration: Configuration) -> None:
    assert walks(configuration, range(WALKS, 100 * WALKS)) > 99 * WALKS * 25


@pytest.mark.nightly
def test_paths_that_lead_to_one_point_go_on_alike() -> None:
    with real_code():
        search = Search(Configuration("AB", faults=2, checks=True, broker=True, states=8_000))
        assert not search.run().broken
        points, compared = search.protocol.points, 0
        for number, kind, path in points.merged:
            for (point, *told), (after, hold, emitted) in list(points._steps.items()):
                if point == number:
                    program = points.replay(kind, (*path, tuple(told)))  # type: ignore[arg-type]
                    assert points._numbers[Points.key(program)] == after, (kind, path, told)
                    assert (program.hold, tuple(program.emitted[program.before :])) == (hold, emitted)
                    program.kill()
                    compared += 1
    assert compared > 100


@pytest.fixture
def task() -> Iterator[Any]:
    """A task whose broker is in this process, while a retry of it is being delivered."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", idempotency={"history": False}, task_publish_retry=False)

    @app.task(name="charge", base=IdempotentTask, bind=True, shared=False)
    def charge(self: Any) -> None: ...

    meta = {"idempotency": {"copy": 3, "token": "t", "from": "publisher"}, "idempotency_delivery": {"owner": "me"}}
    context = {"id": "A", "args": (), "kwargs": {}, "retries": 1, "called_directly": False, "is_eager": False}
    charge.push_request(**context, delivery_info={"routing_key": "celery"}, headers=meta)
    yield charge
    charge.pop_request()


def published(task: Any) -> tuple[str, int, int, str | None, str]:
    """Return of the one message that was published: id, retries, number of the copy, sender and token."""
    with task.app.connection_for_write() as connection:
        channel = connection.default_channel
        found = channel.basic_get("celery", no_ack=True)
        assert found is not None
        assert channel.basic_get("celery") is None
    headers, own = found.headers, found.headers["idempotency"]
    return headers["id"], headers["retries"], own.get("copy", 0), own.get("from"), own.get("token", "")


def test_a_copy_has_the_next_number_another_token_and_the_same_sender(task: Any) -> None:
    message.publish_copy(task, task.request, message.DeliveryState.of(task.request).identity, 0.0)
    *said, token = published(task)
    assert said == ["A", 1, 4, "publisher"]
    assert token not in ("", "t")


def test_a_retry_has_the_next_attempt_no_number_and_its_run_as_sender(task: Any) -> None:
    message.DeliveryState.of(task.request)
    task.retry(throw=False, countdown=0, max_retries=3)
    assert published(task) == ("A", 2, 0, "me", "")


def test_a_core_stands_for_itself() -> None:
    with real_code():
        search = Search(replace(CONFIGURATIONS[0], states=4_000))
        assert not search.run().broken
    assert len(search.cores) > 3000
    assert all(canonical(core) == core for core in search.cores)
