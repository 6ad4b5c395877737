"""`doctor`: what is wrong is printed with what to do about it, and the status says how bad it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from celery import Celery

from celery_idempotent.cli import doctor
from celery_idempotent.cli.common import Exit
from celery_idempotent.cli.doctor import any_store
from celery_idempotent.cli.doctor.findings import Finding, Section, error, info, ok, warning
from tests.cli.conftest import Said, by_app
from tests.support.doctor.apps import app_with as doctor_app
from tests.support.servers import RedisServer

Start = Callable[..., RedisServer]
#: As the guide on production has it.
GOOD = {"appendonly": "yes", "maxmemory": "200mb", "maxmemory-policy": "noeviction"}
DOWN = "redis://:hunter2@127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a busy machine answers is not what is tested here."""
    monkeypatch.setattr(any_store, "SLOW", 5.0)


@pytest.fixture
def server(own_redis: Start) -> RedisServer:
    return own_redis(**GOOD)


def app_on(server: RedisServer, **changes: object) -> Celery:
    urls = {"broker": server.url(0), "idempotency_store": server.url(1), "result_backend": server.url(2)}
    return doctor_app(**{**urls, **changes})  # type: ignore[arg-type]


def by_url(*arguments: str, **env: str) -> Said:
    command = [sys.executable, "-m", "celery_idempotent.cli", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


def test_an_app_as_the_guides_have_it_is_well(server: RedisServer) -> None:
    said = by_app(app_on(server), "doctor", "--strict")
    assert (said.status, said.err) == (Exit.OK, "")
    assert said.out.splitlines()[-1].startswith("Nothing to change; ")
    lines = [line for line in said.out.splitlines()[:-1] if line]
    assert [line.split()[0] for line in lines] == ["app", "ok", server.url(1), "ok"]


def test_what_is_well_is_listed_when_asked(server: RedisServer) -> None:
    said = by_app(app_on(server), "doctor", "-v")
    assert "ok       maxmemory-policy is noeviction\n" in said.out
    assert "ok       no lease is shorter than 5 s\n" in said.out
    assert "checks\n" not in said.out


def test_quiet_says_nothing_of_what_is_well(server: RedisServer) -> None:
    said = by_app(app_on(server, plain=True), "doctor", "--quiet")
    assert said == (Exit.OK, "", "")


def test_quiet_says_what_is_wrong(server: RedisServer) -> None:
    said = by_app(app_on(server, plain=True, policy={"key": "order_id", "lease_ttl": 2}), "doctor", "--quiet")
    assert "lease-short" in said.out
    assert "plain-tasks" not in said.out
    assert server.url(1) not in said.out


def test_a_warning_is_an_error_if_asked(server: RedisServer) -> None:
    app = app_on(server, policy={"key": "order_id", "lease_ttl": 2})
    assert by_app(app, "doctor").status == Exit.OK
    assert by_app(app, "doctor", "--strict").status == Exit.NO


def test_a_store_that_is_inherited_is_called_by_its_address(server: RedisServer) -> None:
    said = by_app(app_on(server, idempotency_store=None), "doctor")
    assert f"\n{server.url(2)}\n" in said.out


def test_an_error_of_either_part_is_told_by_the_status(server: RedisServer) -> None:
    assert by_app(app_on(server, task_always_eager=True), "doctor").status == Exit.NO
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    said = by_app(app_on(server), "doctor")
    assert said.status == Exit.NO
    assert "error    evicts-keys\n" in said.out
    assert "      -> CONFIG SET maxmemory-policy noeviction" in said.out


def test_a_store_that_is_down_does_not_hide_the_app(server: RedisServer) -> None:
    said = by_app(app_on(server, idempotency_store=DOWN, task_always_eager=True), "doctor")
    assert said.status == Exit.UNREACHABLE
    assert {"runs-eagerly", "store-unreachable"} <= set(said.out.split())
    assert "hunter2" not in said.out + said.err


def test_one_store_that_is_down_does_not_hide_another(server: RedisServer) -> None:
    app = app_on(server, policy={"key": "order_id", "store": DOWN})
    said = by_app(app, "doctor")
    assert said.status == Exit.UNREACHABLE
    assert "store-unreachable" in said.out
    assert f"{server.url(1)}\nok " in said.out


def test_a_wrong_declaration_is_told_by_the_status_of_a_wrong_option(server: RedisServer) -> None:
    said = by_app(app_on(server, idempotency_store="reddis://localhost/1"), "doctor")
    assert said.status == Exit.USAGE
    assert "Did you mean redis://?" in " ".join(said.out.split())


def test_scripts_get_json(server: RedisServer) -> None:
    app = app_on(server, policy={"key": "order_id", "lease_ttl": 2})
    said = by_app(app, "doctor", "--json", "--strict")
    report = json.loads(said.out)
    assert said.status == report["status"] == Exit.NO
    assert report["counts"]["warning"] == 1
    assert [section["name"] for section in report["sections"]] == ["app shop", server.url(1)]
    findings = [finding for section in report["sections"] for finding in section["findings"]]
    assert len(findings) == sum(report["counts"].values())
    (wrong,) = [finding for finding in findings if finding["severity"] == "warning"]
    assert wrong.keys() == {"severity", "code", "found", "remedy"}
    assert wrong["code"] == "lease-short"


def test_a_store_alone_is_examined_by_its_url(server: RedisServer) -> None:
    said = by_url("--store", server.url())
    assert (said.status, said.err) == (Exit.OK, "")
    assert said.out.startswith(f"{server.url()}\nok ")
    assert by_url(CELERY_IDEMPOTENT_STORE=server.url()) == said


def test_a_store_that_is_down_is_one_finding_and_no_password(server: RedisServer) -> None:
    said = by_url("--store", DOWN)
    assert said.status == Exit.UNREACHABLE
    assert said.out.startswith("redis://***@127.0.0.1:1/0\nerror    store-unreachable\n")
    assert "hunter2" not in said.out + said.err


def test_a_store_that_refuses_has_its_own_status(own_redis: Start) -> None:
    server = own_redis(requirepass="right")
    assert by_url("--store", server.url().replace("right", "hunter2")).status == Exit.REFUSED


def test_without_a_store_there_is_a_usage_error() -> None:
    said = by_url(CELERY_IDEMPOTENT_STORE="")
    assert said.status == Exit.USAGE
    assert "--store" in said.err


@pytest.mark.nightly
def test_celerys_own_command_line_has_it(server: RedisServer) -> None:
    command = [sys.executable, "-m", "celery", "-A", "tests.support.celery.shop", "idempotency", "doctor", "--json"]
    env = {**os.environ, "STORE_URL": server.url(1), "BROKER_URL": server.url(0), "RESULT_URL": server.url(2)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Exit.OK, done.stderr
    report = json.loads(done.stdout)
    assert [section["name"] for section in report["sections"]][1:] == [server.url(1)]


@pytest.mark.parametrize("fixture", ["redis_url", "cluster_url", "sqlite_url", "postgres_url", "dynamodb_url"])
def test_every_kind_of_server_can_be_asked(fixture: str, request: pytest.FixtureRequest) -> None:
    app = doctor_app(idempotency_store=request.getfixturevalue(fixture))
    report = json.loads(by_app(app, "doctor", "--json").out)
    codes = {finding["code"] for section in report["sections"][1:] for finding in section["findings"]}
    assert {"slow-store", "claims-refused"} <= codes
    assert not codes & {"store-unreachable", "store-refused", "configuration"}


class TestPage:
    """What a person sees."""

    def page(self, capsys: pytest.CaptureFixture[str], *findings: Finding, **options: bool) -> str:
        section = Section("redis://here", [*findings])
        page = doctor.DoctorReport(**options)
        page.show(section)
        page.sum_up([section])
        return capsys.readouterr().out

    def test_the_worst_comes_first_and_what_to_do_under_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        bad = replace(error("bad", "mend it"), code="worst")
        assert self.page(capsys, ok("fine"), info("so so", "do"), bad, warning("soon", "turn")) == (
            "redis://here\n"
            "error    worst\n         bad\n      -> mend it\n"
            "warning  \n         soon\n      -> turn\n"
            "info     \n         so so\n      -> do\n"
            "ok       1 check\n"
            "\n"
            "1 error (worst), 1 warning, 1 note; 1 of 4 checks are well.\n"
        )

    def test_no_line_is_wider_than_eighty_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        text = "some words of a sentence that is much longer than a line, " * 5
        assert max(map(len, self.page(capsys, error(text, text), ok(text), verbose=True).splitlines())) <= 80

    @pytest.mark.parametrize("columns", ["1", "9", "10"])
    def test_a_terminal_of_a_few_columns_gets_lines_of_some_words(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        page = self.page(capsys, replace(error("so many words are in it", "mend it"), code="worst"))
        assert "         so many words are in it\n      -> mend it\n" in page

    def test_a_name_from_elsewhere_commands_no_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        page = self.page(capsys, error("the task evil\x1b[2J\nok", "mend\x07 it"))
        assert "the task evil\\x1b[2J ok" in page
        assert "mend\\x07 it" in page

    def test_a_setting_is_never_cut_in_two(self, capsys: pytest.CaptureFixture[str]) -> None:
        setting = "app.conf.worker_cancel_long_running_tasks_on_connection_loss=" + "x" * 80
        assert setting in self.page(capsys, error("bad", setting))

    def test_a_terminal_gets_colours_unless_somebody_wants_none(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert doctor.DoctorReport()._word(error("", "").severity).startswith("\x1b[31m")
        monkeypatch.setenv("NO_COLOR", "1")
        assert doctor.DoctorReport()._word(error("", "").severity) == "error    "

    def test_a_pipe_gets_no_colours(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "\x1b" not in self.page(capsys, error("bad", "mend it"))


@pytest.mark.parametrize("option", ["-A", "--app"])
def test_the_option_for_an_app_without_celery_is_told_the_command_that_takes_one(option: str) -> None:
    said = by_url(option, "shop")
    assert said.status == Exit.USAGE
    assert "celery -A proj idempotency doctor" in said.err
