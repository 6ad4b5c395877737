"""A task that replaces itself by a signature that contains the task: it ends as it does with Celery itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from celery import Celery, chain, chord

from tests.celery.test_canvas_as_celery import is_idle
from tests.celery.test_canvas_duplicates import Held
from tests.support.celery.canvases import anonymous
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import WaitTimeout, wait_until

REPLACING = "tests.support.celery.replacing_app"
#: What the operation's key is made of: the task, the options of each publish, given a name.
KEYS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "the task id": ("same", lambda name: {}),
    "its producer": ("same", lambda name: {"idempotency_key": name}),
    "its arguments": ("keyed", lambda name: {}),
}


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(REPLACING)


def canvases(app: Celery, which: str) -> dict[str, Any]:
    """Publish every shape, alone and in a canvas of each kind, and return the results."""
    name, options = KEYS[which]
    m = app.module
    results: dict[str, Any] = {}

    def begin(place: str, shape: str) -> Any:
        tag = f"{shape}, {place}"
        return getattr(m, name).s(order=tag, then=shape, tag=tag).set(**options(tag))

    for shape in (each for each in m.SHAPES if not each.startswith("back to")):
        results[f"{shape}, alone"] = begin("alone", shape).apply_async()
        place = "in a chain"
        results[f"{shape}, {place}"] = chain(begin(place, shape), m.collect.s(tag=f"{shape}, {place}")).apply_async()
    for shape in ("itself", "last", "first", "in a group", "in a header and a body", "three deep"):
        for place in ("in a header", "in a body", "with a callback"):
            tag = f"{shape}, {place}"
            sig, link, beside = begin(place, shape), m.collect.s(tag=tag), m.other.s(5, order=tag, tag=tag)
            if place == "with a callback":
                results[tag] = sig.set(link=[link]).apply_async()
            else:
                results[tag] = (chord([sig, beside], link) if place == "in a header" else chord([beside], sig))()
    return results


def sight(app: Celery, journal: Journal, which: str) -> dict[str, Any]:
    """Return, by canvas, what its caller got, if anything, and how often each body ran."""
    results = canvases(app, which)
    with suppress(WaitTimeout):  # what is missing then is told by name
        wait_until(lambda: all(result.ready() for result in results.values()), 45, "all results")
    wait_until(lambda: is_idle(app.conf.broker_url), 30, "all messages to be worked off")
    runs: dict[str, Counter[str]] = {name: Counter() for name in results}
    for entry in journal.entries("ran"):
        runs[entry.key][f"{entry.fields['task']} {entry.fields.get('order', '')} {entry.fields.get('then', '')}"] += 1
    return {name: (result.state, anonymous(result.result), runs[name]) for name, result in results.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("which", KEYS)
def test_a_task_replaced_by_what_contains_it_ends_as_it_does_with_celery_itself(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    fresh_redis: Callable[[], str],
    tmp_path: Path,
    worker_env: dict[str, str],
    which: str,
) -> None:
    plain = {
        "PLAIN": "1",
        "BROKER_URL": fresh_redis(),
        "RESULT_URL": fresh_redis(),
        "JOURNAL": str(tmp_path / "plain journal"),
    }
    urls = {"broker_url": plain["BROKER_URL"], "result_url": plain["RESULT_URL"]}
    nodes = [start_worker(REPLACING, ready=False), start_worker(REPLACING, ready=False, env=plain, **urls)]
    for node in nodes:
        node.ready()
    theirs = sight(client_app(REPLACING, **plain), Journal(plain["JOURNAL"]), which)
    ours = sight(client_app(REPLACING), Journal(worker_env["JOURNAL"]), which)
    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert not differing, pformat(differing, width=200)


def runs(journal: Journal) -> Counter[str]:
    """Return how often each body ran, by its task and what it was to be replaced by."""
    return Counter(f"{entry.fields['task']} {entry.fields['then']}".strip() for entry in journal.entries("ran"))


def seen(journal: Journal, event: str, count: int = 1) -> None:
    journal.wait_for_count(count, event, timeout=30)


BODIES = {
    "itself": {"same itself": 1, "same": 1},
    "last": {"same last": 1, "other": 1, "same": 1},
    "in a body": {"same in a body": 1, "other": 2, "same": 1},
    "by way of another": {"same by way of another": 1, "second back to same": 1, "same": 1},
}


@pytest.mark.parametrize("flagged", [True, False], ids=["flagged", "not flagged"])
@pytest.mark.parametrize("shape", BODIES)
def test_a_replaced_message_that_is_delivered_again_runs_nothing_again(
    app: Celery,
    start_worker: StartWorker,
    journal: Journal,
    gates: Gates,
    broker_url: str,
    shape: str,
    *,
    flagged: bool,
) -> None:
    """Not every broker says that it delivers a message again."""
    gate = gates.close(
        "same of A" if shape == "itself" else "other of A" if shape != "by way of another" else "same of A"
    )
    start_worker(REPLACING, pool="threads", concurrency=4)  # a child may be given two
    held = Held(broker_url)
    result = app.module.same.s(order="A", then=shape).apply_async(queue="held")
    message = held.take()
    held.deliver(message)
    gate.reached()
    message["properties"]["delivery_info"]["redelivered"] = flagged
    held.deliver(message)
    seen(journal, "replayed" if shape == "by way of another" else "superseded")
    gate.open()
    value = result.get(timeout=30)
    held.deliver(message)
    seen(journal, "replayed", 2 if shape == "by way of another" else 1)
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {each.replace("to same", f"to {REPLACING}.same"): n for each, n in BODIES[shape].items()}
    assert app.AsyncResult(result.id).result == value


@pytest.mark.parametrize("moment", ["before its ack", "in its continuation"])
def test_a_child_that_is_killed_around_a_replacement_runs_no_part_of_it_twice_but_the_one_it_was_killed_in(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str, moment: str
) -> None:
    gate = gates.close("released same" if moment == "before its ack" else "same of A")
    if moment == "before its ack":
        gates.close("other of A")
    node = start_worker(REPLACING)
    result = app.module.same.delay(order="A", then="last")
    [pid] = gate.reached()
    node.kill_child(pid)
    if moment == "before its ack":
        seen(journal, "superseded")
        gates["other of A"].open()
    gate.open()
    assert result.get(timeout=30) == ["A", [1], 2]
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"same last": 1, "other": 1, "same": 1 if moment == "before its ack" else 2}


@pytest.mark.parametrize("shape", ["itself", "last", "in a body"])
@pytest.mark.parametrize("which", ["its producer", "its arguments"])
def test_a_duplicate_of_what_is_being_replaced_waits_for_its_end_and_gets_its_result(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str, which: str, shape: str
) -> None:
    gate = gates.close("same of A" if shape == "itself" else "other of A")
    if shape == "itself" and which == "its arguments":
        gate = gates.close("keyed of A")
    start_worker(REPLACING, pool="threads", concurrency=4)  # a child may be given two
    name, options = KEYS[which]
    sig = getattr(app.module, name).s(order="A", then=shape).set(**options("A"))
    results = [sig.apply_async()]
    gate.reached()
    results += [sig.apply_async(), sig.apply_async()]
    seen(journal, "conflicted", 2)
    gate.open()
    first, *others = [result.get(timeout=30) for result in results]
    assert others == [first, first]
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {each.replace("same", name): n for each, n in BODIES[shape].items()}


@pytest.mark.ending("is replaced by another task")
def test_a_duplicate_of_what_another_task_goes_on_with_waits_for_its_result(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str
) -> None:
    gate = gates.close("other of A")
    start_worker(REPLACING, pool="threads", concurrency=4)
    sig = app.module.keyed.s(order="A", then="another")
    results = [sig.apply_async()]
    gate.reached()
    results += [sig.apply_async(), sig.apply_async()]
    seen(journal, "deferred", 2)
    gate.open()
    assert [result.get(timeout=30) for result in results] == [[1]] * 3
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"keyed another": 1, "other": 1}


@pytest.mark.parametrize("again", ["a duplicate", "the same message"])
def test_an_operation_whose_replacement_failed_before_its_end_is_free_to_run(
    app: Celery, start_worker: StartWorker, journal: Journal, broker_url: str, again: str
) -> None:
    start_worker(REPLACING)
    sig = app.module.keyed.s(order="A", then="after what fails", tag="A")
    failed = sig.apply_async()
    with pytest.raises(ValueError, match="no A"):
        failed.get(timeout=30)
    result = sig.apply_async(**({"task_id": failed.id} if again == "the same message" else {}))
    keyed = "keyed after what fails"
    journal.wait_for(lambda entries: runs(journal)["keyed"] == 1, 30)
    wait_until(lambda: app.AsyncResult(result.id).state == "SUCCESS", 30, "the result to take the failure's place")
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {keyed: 2, "broken": 2, "keyed": 1}


def test_a_replacement_with_another_operations_arguments_is_that_operation(
    app: Celery, start_worker: StartWorker, journal: Journal, broker_url: str
) -> None:
    """It must not be done once under the one key and once under the other."""
    start_worker(REPLACING)
    keyed = app.module.keyed
    results = [keyed.delay(order="A", then="for another order, last")]
    assert results[0].get(timeout=30) == ["A too", [1], 2]
    results += [keyed.delay(order="A too"), keyed.delay(order="A", then="for another order, last")]
    assert [result.get(timeout=30) for result in results] == [["A too", [1], 2]] * 3
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"keyed for another order, last": 1, "other": 1, "keyed": 1}


def test_the_key_of_a_producer_is_its_operations_and_of_no_other_part_of_what_replaces_it(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(REPLACING)
    result = app.module.same.s(order="A", then="in a header and a body").apply_async(idempotency_key="req")
    result.get(timeout=30)
    keys = {entry.fields["id"]: entry.fields["store_key"] for entry in journal.entries("ran")}
    ours = f"idem:{REPLACING}.same::req"
    assert [task_id for task_id, key in keys.items() if key == ours] == [result.id]
    assert len(keys) == 3
    assert all(task_id in key for task_id, key in keys.items() if key != ours)
