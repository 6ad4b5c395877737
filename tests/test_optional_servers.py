"""Servers that a machine may lack, and what that means to the tests which need them."""

from __future__ import annotations

import pytest

from tests.conftest import missing
from tests.support.memcached import memcached_binary
from tests.support.rabbitmq import rabbitmq_scripts
from tests.support.servers import ServerMissing


@pytest.mark.parametrize(
    ("ci", "promises", "outcome"),
    [
        ("", "", pytest.skip),
        ("", "rabbitmq", pytest.skip),
        ("true", "", pytest.skip),
        ("true", "postgres", pytest.skip),
        ("true", "postgres rabbitmq", pytest.fail),
    ],
)
def test_a_missing_optional_server_is_a_failure_where_ci_promised_it(
    monkeypatch: pytest.MonkeyPatch, ci: str, promises: str, outcome: type
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("CI_PROMISES", promises)
    assert isinstance(missing(ServerMissing("none"), optional="rabbitmq"), outcome.Exception)


def test_a_missing_redis_is_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv("CI_PROMISES", raising=False)
    assert isinstance(missing(ServerMissing("none")), pytest.fail.Exception)


def test_where_no_rabbitmq_can_be_found_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ServerMissing, match="apt install rabbitmq-server"):
        rabbitmq_scripts()


def test_where_no_memcached_can_be_found_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ServerMissing, match="apt install memcached"):
        memcached_binary()
