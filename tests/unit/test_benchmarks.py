"""Every part of the benchmarks measures something sane on a real server; how fast it is, no test says.

Those that start many processes run in `tox -e soak`: what they would catch harms who measures, and no user.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from celery_idempotent import events as library_hooks
from celery_idempotent.core.binding import confirmations
from celery_idempotent.stores import open_store
from tests.conftest import missing
from tests.support.servers import RedisServer, ServerMissing, redis_binary

pytest.importorskip("benchmarks", reason="the benchmarks are in the source tree only")

from benchmarks import (
    commands,
    duplicates,
    growth,
    held,
    hooks,
    http,
    http_rivals,
    latency,
    memory,
    noting,
    publishing,
    purging,
    recovery,
    renewals,
    scale,
    table,
    throughput,
    within,
)
from benchmarks.__main__ import main
from benchmarks.figure import Figure, as_dicts, as_table
from benchmarks.http_servers import ROOT
from benchmarks.parts import PARTS, chosen
from benchmarks.places import NAMES, places
from benchmarks.sampling import Sample, difference, interleave, ratio
from benchmarks.subject import Subject
from benchmarks.worker import STORE_DB

pytestmark = pytest.mark.thorough  # figures are made on one Python, with the newest of everything


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    try:
        redis_binary()
    except ServerMissing as error:
        raise missing(error) from None
    with RedisServer() as server:
        yield server


@pytest.fixture
def subject(server: RedisServer) -> Iterator[Subject]:
    with Subject(server) as subject:
        subject.client.flushall()
        yield subject
        subject.client.flushall()


def by_name(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def test_a_first_run_costs_two_store_commands_a_replay_and_a_conflict_one(subject: Subject) -> None:
    assert [figure.value for figure in commands.measure(subject, operations=5)] == [2, 1, 1]


def test_the_latencies_are_ratios_within_their_spread(subject: Subject) -> None:
    figures = latency.measure(subject, blocks=4, calls=3)
    assert len(figures) == 4
    for figure in figures:
        assert figure.spread is not None
        assert 0 < figure.spread[0] <= figure.value <= figure.spread[1]


def test_what_hooks_cost_is_measured_and_nobody_listens_afterwards_who_did_not_before(subject: Subject) -> None:
    before = list(library_hooks._hooks)
    figures = hooks.measure(subject, blocks=4, calls=3)
    assert [figure.reach for figure in figures] == [2.0, 2.0, 2.0, None, None, None]
    assert all(figure.value > 0 for figure in figures)  # shares of what a loaded machine makes long
    assert list(library_hooks._hooks) == before


def test_memory_is_that_of_a_small_hash() -> None:
    for binary in memory.servers():
        assert all(50 < figure.value < 1000 for figure in memory.measure(binary))


def test_noting_is_timed_against_not_noting_and_takes_room(subject: Subject) -> None:
    figures = by_name(noting.measure(subject, blocks=3, calls=2, replays=60))
    assert all(value > 0 for name, value in figures.items() if "not noted" in name)  # ratios of what a load makes long
    assert figures["history of 1 note"] < figures["history of 50 notes"] < 20_000


def test_a_tick_renews_all_leases(subject: Subject) -> None:
    figures = by_name(renewals.measure(subject, leases=20, ticks=2))
    assert figures["round trips per tick of 20 leases"] == 1
    assert 0 <= figures["share of a core, 20 leases"] < 100


@pytest.mark.nightly
@pytest.mark.parametrize("kind", scale.REACH)
def test_a_filled_store_holds_what_it_was_filled_with(kind: str) -> None:
    with places((kind,)) as few, places((kind,)) as many:
        figures = scale.measure(kind, few[kind], many[kind], sizes=(3, 30), blocks=2, calls=2)
        assert all(figure.value > 0 for figure in figures)
        store = open_store(many[kind])
        runs = 6 + 1  # of the blocks, the first that warms up among them, and the model
        assert len(list(store.scan())) == 30 + runs
        store.close()


@pytest.mark.soak
def test_a_worker_is_looked_at_while_it_refreshes_what_it_holds(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark itself asserts that the guarded worker does, and the plain one does not."""
    monkeypatch.setattr(held, "REST", 0.5)
    share, stall = held.measure(server, messages=30, seconds=3.5, rounds=1, visibility=6)
    assert share.note.endswith("refreshed every 2 s")
    assert 0 < stall.value < 3500


@pytest.mark.soak
def test_every_kind_of_store_is_timed_and_taken_over_from_a_killed_holder() -> None:
    with places() as urls:
        figures = by_name(table.measure(urls, blocks=1, calls=2))
        assert {name.partition(",")[0] for name in figures} == set(NAMES)
        for kind in NAMES[1:]:
            (figure,) = recovery.measure(kind, urls[kind], rounds=1)
            assert recovery.LEASE * 0.9 < figure.value < 30


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_settle_is_timed_within_a_transaction_and_after_it(kind: str) -> None:
    with places((kind,)) as urls:
        figures = within.measure(kind, urls[kind], blocks=2, calls=2)
        assert all(figure.value > 0 for figure in figures)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_purge_beside_others_removes_what_has_expired(kind: str) -> None:
    with places((kind,)) as urls:
        purging.measure(kind, urls[kind], records=300)
        store = open_store(urls[kind])
        assert not [record for record in store.scan() if record.retention < 3600]
        store.close()


def test_publishing_asks_nothing_of_the_store_and_leaves_nothing_behind(server: RedisServer, subject: Subject) -> None:
    before = subject.commands().get("evalsha", 0)
    figures = publishing.measure(server, blocks=2, calls=2)
    assert all(figure.value > 0 for figure in figures)
    assert subject.commands().get("evalsha", 0) == before
    assert subject.client.dbsize() == 0


def test_of_a_unique_task_what_is_published_is_confirmed_many_at_once_and_what_is_skipped_again_runs_no_script(
    server: RedisServer, subject: Subject
) -> None:
    before = subject.commands().get("evalsha", 0)
    figures = publishing.measure_unique(server, blocks=2, calls=2)
    assert all(figure.value > 0 for figure in figures)
    published, skipped = 2 + 6, 100 + 6 + 6 + 2
    confirmations.close()
    asked = subject.commands().get("evalsha", 0) - before
    assert published < asked < skipped  # to claim, to confirm, to skip the first, or one that is not confirmed yet
    assert subject.client.dbsize() == 0


@pytest.mark.nightly
@pytest.mark.worker
def test_a_worker_drains_what_was_published(server: RedisServer, subject: Subject) -> None:
    figures = throughput.measure(server, pool="threads", ignore_result=True, blocks=1, messages=5)
    assert [figure.part for figure in figures] == ["throughput"] * 5
    assert all(figure.value > 0 for figure in figures)
    with server.client(STORE_DB) as client:
        states = Counter(client.hget(key, "state") for key in client.scan_iter())
    # Of five messages to warm up and five that count, with and without a second script.
    assert states == {b"completed": 3 * 10, b"in_progress": 10}


@pytest.mark.soak
@pytest.mark.worker
def test_all_duplicates_get_the_result_of_one_run(server: RedisServer, subject: Subject) -> None:
    runs, equal, per_waiter = duplicates.measure(server, messages=5)
    assert (runs.value, equal.value) == (1, 5)
    assert per_waiter.value >= 1


@pytest.mark.soak
def test_requests_are_timed_with_the_middleware_and_without(server: RedisServer, subject: Subject) -> None:
    figures = by_name(http.measure(server, "gunicorn", blocks=2, calls=2, at_once=10))
    assert len(figures) == 10
    assert all(value > 0 for name, value in figures.items() if "added" not in name and " - plain" not in name)


@pytest.mark.soak
def test_of_clients_at_once_one_runs_and_with_get_then_set_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_rivals, "PROCESSES", 2)
    library, by_hand = http_rivals.HERE[0], http_rivals.HERE[-1]
    with http_rivals.trial(library) as trial:
        figure = http.race(library, trial, clients=20)
        assert (figure.value, figure.reached) == (1, True)
        assert figure.note.endswith("; 1 different; then 201, replayed")
        assert [trial.other_body(), trial.other_user(), trial.page()] == ["422", "runs: 201", "201, replayed"]
    with http_rivals.trial(by_hand) as trial:
        assert http.race(by_hand, trial, clients=20).value > 1


def test_the_page_that_compares_middlewares_has_the_versions_and_requests_of_the_command() -> None:
    page = (ROOT / "docs/guides/http-comparison.md").read_text()
    for middleware in http_rivals.MIDDLEWARES:
        assert (ROOT / "benchmarks/http_apps" / f"{middleware.app.partition(':')[0]}.py").exists()
        for requirement in middleware.requirements[:1]:
            name, _, version = requirement.partition("==")
            assert f"| {name.partition('[')[0]} | {version} |" in page
    for fault in http_rivals.FAULTS:
        assert page.count(f"| {str(fault.__doc__).rstrip('.')} |") == 2


def test_arms_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []
    arms = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = interleave(arms, blocks=2, calls=1)
    assert "".join(order) == "abbaab"
    assert [len(sample.blocks) for sample in samples.values()] == [2, 2]


def test_a_ratio_of_equals_is_one_and_the_spread_holds_it() -> None:
    value, (low, high) = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert low <= value == 2.0 <= high
    value, (low, high) = difference([2.0, 4.0, 6.0], [1.0, 3.0, 5.0])
    assert low <= value == 1.0 <= high


def test_a_sample_knows_its_median_and_its_slow_end() -> None:
    sample = Sample([[1.0, 2.0], [3.0]])
    assert (sample.median, sample.medians, sample.p99) == (2.0, [1.5, 3.0], 2.0)


@pytest.mark.soak
def test_processes_that_share_a_store_count_what_each_of_them_ran(server: RedisServer) -> None:
    with server.client() as client:
        for processes in (1, 2):
            client.flushall()
            figure = growth.measure_stores("redis", server.url(), processes=processes, seconds=0.3)
            counted = int(0.3 * figure.value)
            assert 0 < counted <= client.dbsize() - processes  # each made one before it began to count


def test_a_missed_figure_is_called_missed() -> None:
    slow, fast = Figure("p", "slow", 1.3, reach=1.15), Figure("p", "fast", 0.9, reach=0.85, at_least=True)
    told = Figure("p", "told", 184, "bytes", note="why")
    assert [entry["reached"] for entry in as_dicts([slow, fast, told])] == [False, True, None]
    table = as_table([slow, fast, told])
    assert "MISSED" in table
    assert "1.30 x" in table
    assert "184 bytes" in table


def test_a_hurry_leaves_the_million_records_out_and_a_misspelt_part_is_named() -> None:
    assert "scale" not in chosen(None, quick=True)
    assert chosen("memory, latency", quick=True) == ["memory", "latency"]
    with pytest.raises(ValueError, match="no part memry; write some of commands"):
        chosen("memry", quick=False)


def test_the_command_prints_json_and_fails_if_a_figure_was_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "memory", lambda quick: [Figure("memory", "record", 500, "bytes", reach=200)])
    assert main(["--only", "memory", "--json"]) == 1
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    assert figure["name"] == "record"
    assert main(["--only", "memory"]) == 1
    assert "MISSED" in capsys.readouterr().out
