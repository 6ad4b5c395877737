"""Which options a policy takes, and whose it is when several declare one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest

from celery_idempotent.core import compression
from celery_idempotent.core.policy import Policy, Unique
from celery_idempotent.core.serialization import serialization
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.units import parse_duration, parse_size


class Store:
    def acquire(self) -> None: ...


def test_the_defaults_are_those_of_the_specification() -> None:
    policy = Policy()
    assert {
        field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name[0] != "_"
    } == {
        "store": None,
        "key": None,
        "scope": None,
        "lease_ttl": 60.0,
        "result_ttl": 86400.0,
        "failure_ttl": 86400.0,
        "on_conflict": "defer",
        "on_duplicate": "replay",
        "remember_failures": (),
        "store_result": True,
        "compress_above": 1024,
        "compression": "zlib",
        "result_max_bytes": 1048576,
        "large_results": None,
        "wait_timeout": 10.0,
        "max_crashes": 5,
        "on_store_error": "wait",
        "max_lease": None,
        "fingerprint": True,
        "history": True,
        "allow_early_ack": False,
    }


@pytest.mark.parametrize(
    ("option", "value", "kept"),
    [
        ("store", "redis://localhost/1", "redis://localhost/1"),
        ("key", "order_id", "order_id"),
        ("key", ["account", "order_id"], ("account", "order_id")),
        ("key", len, len),
        ("scope", "tenant", "tenant"),
        ("scope", len, len),
        ("lease_ttl", 0.5, 0.5),
        ("lease_ttl", "15m", 900.0),
        ("result_ttl", timedelta(days=7), 604800.0),
        ("failure_ttl", 90, 90.0),
        ("on_conflict", "wait", "wait"),
        ("on_conflict", "raise", "raise"),
        ("on_duplicate", "raise", "raise"),
        ("remember_failures", ValueError, (ValueError,)),
        ("remember_failures", [ValueError, KeyError], (ValueError, KeyError)),
        ("store_result", False, False),
        ("compress_above", 0, 0),
        ("compress_above", "64KiB", 65536),
        ("compression", "bzip2", "bzip2"),
        ("compression", "application/x-lzma", "application/x-lzma"),
        ("compression", "none", "none"),
        ("result_max_bytes", "1 MiB", 1048576),
        ("large_results", None, None),
        ("large_results", "backend", "backend"),
        ("large_results", "file:///var/results", "file:///var/results"),
        ("large_results", "simplecache::s3://bucket/prefix", "simplecache::s3://bucket/prefix"),
        ("wait_timeout", 0.1, 0.1),
        ("max_crashes", 1, 1),
        ("on_store_error", "run", "run"),
        ("max_lease", None, None),
        ("max_lease", "1h", 3600.0),
        ("fingerprint", False, False),
        ("fingerprint", {"b", "a"}, ("a", "b")),
        ("fingerprint", [], ()),
        ("history", False, False),
        ("allow_early_ack", True, True),
    ],
)
def test_a_fit_value_is_kept_in_one_form(option: str, value: Any, kept: Any) -> None:
    found = getattr(Policy(**{option: value}), option)
    assert found == kept
    assert type(found) is type(kept)


def test_a_store_may_be_an_object() -> None:
    store = Store()
    assert Policy(store=store).store is store


UNFIT: dict[str, list[Any]] = {
    "store": ["", 3, b"redis://", Store, object()],
    "key": ["", "order.id", "order id", [], ["a", ""], ["a", 1], {"a"}, 3, b"a"],
    "scope": ["", 3, ["a"]],
    "lease_ttl": [
        0,
        -1,
        True,
        False,
        None,
        "",
        "5",
        "5x",
        "-5s",
        "s",
        "1h30m",
        float("nan"),
        float("inf"),
        10**400,
        0.4,
    ],
    "result_ttl": [-1, "100ms", timedelta(microseconds=1), "99999999d", "9" * 400 + "s", b"1s"],
    "failure_ttl": [0.1, timedelta(seconds=-1)],
    "on_conflict": ["ignore", None, True, ["defer"]],
    "on_duplicate": ["wait", ""],
    "remember_failures": [None, "ValueError", ValueError("x"), (ValueError, int), BaseException, {ValueError}],
    "store_result": [1, None, "yes"],
    "compress_above": [-1, True, 1.5, "64kb", "KiB", "-1KiB", None],
    "compression": [None, "", "zlb", 1, True],
    "result_max_bytes": [-1, None],
    "large_results": ["", "Backend", "/var/results", "file:", 1, b"backend"],
    "wait_timeout": [0, None],
    "max_crashes": [0, -1, True, 1.0, "5", None],
    "on_store_error": ["defer"],
    "max_lease": [0, "x", True],
    "fingerprint": [None, "amount", 1, ["a", 1], [""]],
    "history": [0, None, "no"],
    "allow_early_ack": [0, None],
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in UNFIT.items() for value in values])
def test_an_unfit_value_is_refused_with_option_wish_value_and_advice(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Policy(**{option: value})
    text = str(caught.value)
    assert text.startswith(f"{option}: expected ")
    assert f", got {value!r}: write " in text


@pytest.mark.parametrize("url", ["://x", "s3://", "s3://bucket#part", "s3://bucket?versionId=1"])
def test_large_results_go_below_a_plain_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^large_results: expected"):
        Policy(large_results=url)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("order.id", "key=lambda order: order.id"),
        ("order.customer.id", "key=lambda order: order.customer.id"),
        ("order['id']", "key=lambda order: order['id']"),
        ("order[id]", 'key=lambda order: order["id"]'),
        ("order[0].id", "key=lambda order: order[0].id"),
        (["shop", "order.id"], "key=lambda shop, order: (shop, order.id)"),
        (["order.id", "order.line"], "key=lambda order: (order.id, order.line)"),
    ],
)
def test_a_key_that_names_a_part_of_an_argument_is_refused_with_the_callable_that_is_meant(key: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"write a callable: {hint}") + "$"):
        Policy(key=key)


def test_a_compression_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "ZSTD_MODULES", ())
    monkeypatch.setattr(serialization, "compressor", unknown)
    with pytest.raises(ConfigurationError) as caught:
        Policy(compression="zstd")
    assert str(caught.value) == (
        "compression: expected a compression that is installed, as 'none', got 'zstd': "
        "write 'zlib', or install it: pip install \"celery-idempotent[zstd]\""
    )


def unknown(name: str) -> None:
    raise KeyError(name)


def test_a_password_is_shown_nowhere() -> None:
    assert "secret" not in repr(Policy(large_results="ftp://user:secret@host/results"))
    policy = Policy(store="redis://user:secret@host/1")
    assert "secret" not in repr(policy)
    assert "host" in repr(policy)
    with pytest.raises(ConfigurationError) as caught:
        Policy(scope="", key="redis://user:secret@host/1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda options: Policy(**options), Policy.of])
def test_an_unknown_option_is_refused_with_a_suggestion(make: Callable[[dict[str, Any]], Policy]) -> None:
    with pytest.raises(ConfigurationError, match=r"options of Policy, got 'lese_ttl': did you mean 'lease_ttl'\?"):
        make({"lese_ttl": 3})
    with pytest.raises(ConfigurationError, match=r"got 'qqq': write one of store, key, scope, lease_ttl"):
        make({"qqq": 3})
    with pytest.raises(ConfigurationError, match=r"got 'until': a Celery task .* as in unique=\{'until': \.\.\.\}"):
        make({"until": "done"})
    with pytest.raises(ConfigurationError, match=r"got 'unique': .*@app.task\(base=IdempotentTask, unique=\.\.\.\)"):
        make({"unique": "order_id"})


def test_an_option_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got '3'"):
        Policy.of({3: 4})  # type: ignore[dict-item]


def test_a_policy_takes_no_positional_argument() -> None:
    with pytest.raises(TypeError):
        Policy("order_id")  # type: ignore[call-arg]


def test_max_lease_is_at_least_one_lease() -> None:
    assert Policy(max_lease=60).max_lease == 60
    with pytest.raises(
        ConfigurationError, match=r"max_lease: expected at least lease_ttl, 60 s, got 30\.0: give a longer"
    ):
        Policy(max_lease=30)
    assert Policy.of({"max_lease": 30}, base=Policy(lease_ttl=10)).max_lease == 30
    with pytest.raises(ConfigurationError, match="max_lease"):
        Policy.of({"lease_ttl": 300}, base=Policy(max_lease=120))


def test_an_enum_of_text_is_a_choice() -> None:
    class Choice(str, Enum):
        WAIT = "wait"

    assert Policy(on_conflict=Choice.WAIT).on_conflict == "wait"  # type: ignore[arg-type]


# -- layers ------------------------------------------------------------------------------------------------------------


def test_what_a_task_gives_overrides_what_the_app_gives_and_nothing_else() -> None:
    app = Policy(lease_ttl=30, result_ttl="7d", on_conflict="wait")
    for task in (Policy(lease_ttl=60, key="order_id"), {"lease_ttl": 60, "key": "order_id"}):
        policy = Policy.of(task, base=Policy.of(app))
        assert (policy.lease_ttl, policy.key) == (60, "order_id")  # 60 is given, though it is the library's default
        assert (policy.result_ttl, policy.on_conflict) == (604800, "wait")
        assert policy.failure_ttl == 86400


def test_nothing_given_leaves_the_base() -> None:
    app = Policy(lease_ttl=30)
    assert Policy.of(None, base=app) == Policy.of({}, base=app) == Policy.of(Policy(), base=app) == app
    assert Policy.of(None) == Policy()


@pytest.mark.parametrize("value", [3, "order_id", ["key"], True])
def test_anything_but_a_policy_or_a_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="idempotency: expected a Policy or a mapping of its options, got"):
        Policy.of(value)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy)), dataclasses.replace]
)
def test_a_copy_gives_the_same_options(copied: Callable[[Policy], Policy]) -> None:
    policy = copied(Policy(lease_ttl=60, key=["a", "b"]))
    assert policy == Policy(lease_ttl=60, key=("a", "b"))
    assert repr(policy) == "Policy(key=('a', 'b'), lease_ttl=60.0)"
    assert Policy.of(policy, base=Policy(lease_ttl=30, max_crashes=3)) == Policy(key=("a", "b"), max_crashes=3)


def test_replace_gives_what_it_changes_and_what_was_given_before() -> None:
    policy = dataclasses.replace(Policy(lease_ttl=60), max_crashes=3)
    assert repr(policy) == "Policy(lease_ttl=60.0, max_crashes=3)"


def test_policies_are_equal_by_their_options_however_they_were_given() -> None:
    assert Policy() == Policy(lease_ttl="60s")
    assert hash(Policy(fingerprint=["a"])) == hash(Policy(fingerprint=("a",)))
    assert Policy() != Policy(lease_ttl=61)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().lease_ttl = 3  # type: ignore[misc]


# -- signature ---------------------------------------------------------------------------------------------------------


def charge(order_id: str, amount: int, *, note: str = "") -> None: ...


def collect(order_id: str, **kwargs: Any) -> None: ...


async def nowhere(order_id: str) -> str:
    return order_id


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key": "order_id"},
        {"key": ["order_id", "note"]},
        {"key": lambda order_id, anything=None: order_id},
        {"key": lambda **arguments: arguments["order_id"]},
        {"key": "order_id", "fingerprint": ["amount", "note"]},
        {"fingerprint": False},
    ],
)
def test_names_that_the_task_has_are_fit(options: dict[str, Any]) -> None:
    Policy(**options).check_signature(inspect.signature(charge), "shop.charge")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": "zzz"}, "amount, note, or key=lambda: 'zzz' for one key of all calls"),
        ({"key": "ordr_id"}, "key: expected names of arguments of shop.charge(order_id"),
        ({"key": lambda self, order_id: order_id}, "key: expected a callable over arguments of shop.charge(order_id"),
        (
            {"scope": lambda tenant: tenant},
            "got 'tenant': it is called before the task runs, with arguments alone: ord",
        ),
        ({"key": nowhere}, "key: expected a plain function, got <function nowhere at"),
        ({"key": ["order_id", "ordr_id"]}, "got 'ordr_id': did you mean 'order_id'?"),
        ({"key": "zzz"}, "got 'zzz': write one of order_id, amount, note"),
        ({"fingerprint": ["amuont"]}, "got 'amuont': did you mean 'amount'?"),
        ({"fingerprint": ["amuont"]}, "fingerprint: expected names of arguments"),
    ],
)
def test_a_name_that_the_task_has_not_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Policy(**options).check_signature(inspect.signature(charge), "shop.charge")
    assert text in str(caught.value)


def test_a_name_where_the_task_has_no_arguments_is_refused_with_what_may_have_taken_it() -> None:
    refused = r"got 'order_id': it has none; with bind=True the first one is .*, or key=lambda: 'order_id' for one key"
    with pytest.raises(ConfigurationError, match=refused):
        Policy(key="order_id").check_signature(inspect.Signature(), "t")


@pytest.mark.parametrize(("key", "constant"), [([], "'all'"), ("", "'all'"), ("sync-lock", "'sync-lock'")])
def test_what_names_no_argument_is_refused_with_a_key_of_all_calls(key: Any, constant: str) -> None:
    for options in (Policy, Unique):
        with pytest.raises(ConfigurationError, match=f"or lambda: {constant} for one key of all calls"):
            options(key=key)


def test_a_task_with_kwargs_has_any_name_but_that_of_kwargs() -> None:
    Policy(key="invoice", fingerprint=["order_id", "at"]).check_signature(inspect.signature(collect), "t")
    with pytest.raises(ConfigurationError, match="got 'kwargs'"):
        Policy(key="kwargs").check_signature(inspect.signature(collect), "t")


# -- durations and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        (0.25, 0.25),
        ("90s", 90),
        ("15m", 900),
        ("24h", 86400),
        ("7d", 604800),
        ("500ms", 0.5),
        (" 1.5 h ", 5400),
    ],
)
def test_a_duration_is_seconds(value: Any, seconds: float) -> None:
    assert parse_duration(value, "option") == seconds
    assert type(parse_duration(value, "option")) is float


def test_a_duration_has_bounds() -> None:
    assert parse_duration("36525d", "option") == 36525 * 86400
    with pytest.raises(
        ConfigurationError, match=r"^option: expected a duration from 2 s to 100 years, got 1: write 90"
    ):
        parse_duration(1, "option", least=2)
    with pytest.raises(ConfigurationError, match="100 years, got '36526d'"):
        parse_duration("36526d", "option")


def test_a_size_is_bytes() -> None:
    assert [parse_size(value, "option") for value in (0, 7, "7B", "7KiB", "7 MiB", "7GiB")] == [
        0,
        7,
        7,
        7168,
        7340032,
        7516192768,
    ]


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(order_id: str, *args: Any, **kwargs: Any) -> Any:
        return function("session", order_id, *args, **kwargs)

    return wrapper


@decorated
def within(session: str, order_id: str, cents: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"key": "cents"}, r"^key: expected names of arguments of shop.charge\(order_id.*'cents': a decorator hides"),
        ({"key": ["order_id", "cents"]}, "use a callable, as key=lambda args, \\*\\*kwargs"),
        ({"key": "session"}, "key"),
        ({"key": "kwargs"}, "key"),
        ({"key": "order_id", "fingerprint": ["cents"]}, r"^fingerprint: .*compare none, with fingerprint=False"),
    ],
)
def test_names_that_a_decorator_hides_are_refused(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        Policy(**options).check_signature(inspect.signature(within, follow_wrapped=False), "shop.charge", hidden=True)


def test_names_that_a_decorator_spells_are_known() -> None:
    signature = inspect.signature(within, follow_wrapped=False)
    Policy(key="order_id", fingerprint=["order_id"]).check_signature(signature, "shop.charge", hidden=True)
    Policy(key=lambda args: args[0], fingerprint=False).check_signature(signature, "shop.charge", hidden=True)


@pytest.mark.parametrize("option", ["key", "scope"])
def test_a_callable_is_refused_whose_decorator_hides_that_it_does_not_take_all(option: str) -> None:
    signature = inspect.signature(charge)

    @decorated
    def of_one(session: str, order_id: str) -> str:
        return order_id

    @decorated
    def of_all(session: str, order_id: str, **others: Any) -> str:
        return order_id

    with pytest.raises(ConfigurationError, match=f"{option}: expected a callable that declares .* lambda order_id"):
        Policy(**{option: of_one}).check_signature(signature, "shop.charge")
    Policy(**{option: of_all}).check_signature(signature, "shop.charge")
    Policy(**{option: of_one}).check_signature(inspect.signature(lambda order_id: None), "shop.charge")
    Policy(**{option: functools.lru_cache(lambda order_id: order_id)}).check_signature(signature, "shop.charge")


def of_first(order_id: str, /, amount: int = 0) -> str:
    return order_id


@pytest.mark.parametrize(
    ("source", "given"),
    [
        (lambda *args: str(args), "nothing for \\*args"),
        (of_first, "nothing for order_id"),
        (lambda order_id="A", /: order_id, "nothing for order_id"),
        (operator.itemgetter("order_id"), "nothing for the object"),
        (operator.attrgetter("order_id"), "nothing for the object"),
    ],
)
@pytest.mark.parametrize("option", ["key", "scope"])
def test_a_callable_that_takes_arguments_by_position_is_refused(option: str, source: Any, given: str) -> None:
    """It would be given none, and return one key for all calls, or raise at each."""
    expected = (
        rf"{option}: expected a callable that takes arguments of shop.charge\(.* {given}; write lambda order_id, "
    )
    with pytest.raises(ConfigurationError, match=expected):
        Policy(**{option: source}).check_signature(inspect.signature(charge), "shop.charge")


@pytest.mark.parametrize(
    "source",
    [dict, lambda **given: given["order_id"], lambda order_id, *more: order_id, functools.partial(of_first, "A")],
)
def test_a_callable_that_may_take_arguments_by_name_is_fit(source: Any) -> None:
    Policy(key=source).check_signature(inspect.signature(charge), "shop.charge")


@pytest.mark.parametrize(
    ("store", "text"),
    [("redsi://:secret@localhost/1", r"mean redis://\?"), ("localhost:6379", "has no scheme")],
)
def test_a_store_whose_url_is_none_is_refused_where_it_is_declared(store: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^(?!.*secret).*{text}"):
        Policy(store=store)
