"""Names that nothing reads are refused, with what was meant: of options, of keys, of settings, of the base."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from celery import Celery, Task, chain
from celery.app.amqp import AMQP
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.canvas import Signature, StampingVisitor
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool
from celery.utils import uuid
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from kombu.messaging import Producer

from celery_idempotent import ConfigurationError, IdempotentTask, Policy, Unique
from celery_idempotent.celery import declarations, monitoring
from celery_idempotent.celery import pool as shared
from celery_idempotent.celery.task import check_when_started
from celery_idempotent.celery.worker import DeclarationStep, IdempotencyStep, RenewalStep
from celery_idempotent.stores.memory import MemoryStore
from tests.celery.test_declaration import declare
from tests.support.celery.fixtures import StartWorker
from tests.support.waiting import wait_until


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("unread", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = MemoryStore()
    app.conf.task_eager_propagates = True
    yield app
    app.close()


# -- beside idempotency= -----------------------------------------------------------------------------------------------


class WithStore(IdempotentTask):
    store = "redis://localhost/1"


class WithKey(IdempotentTask):
    key = "order_id"


class WithKeys(IdempotentTask):
    key = ("order_id", "cents")


class WithTtl(IdempotentTask):
    result_ttl = "7d"


class Vendored(IdempotentTask):
    """A project's own copy of celery-once, which reads what its tasks are given."""

    once: ClassVar[dict[str, bool]] = {"graceful": False}


class WithMethod(IdempotentTask):
    def idempotency_key(self, order_id: str) -> str:
        return order_id


class Inherits(WithTtl):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idempotent": {"key": "order_id"}}, r"got idempotent= beside it.* Did you mean idempotency=\?"),
        ({"idempotence": Policy(key="order_id")}, r"got idempotence= .* Did you mean idempotency=\?"),
        ({"idempotancy": None}, r"Did you mean idempotency=\?"),
        ({"idemptoency": {"key": "order_id"}}, r"Did you mean idempotency=\?"),
        ({"idempotency_key": "order_id"}, r'Did you mean idempotency=\{"key": \.\.\.\}\?'),
        ({"idempotent_by": "order_id"}, r"Did you mean idempotency=\{\.\.\.\}\?"),
        ({"key": "order_id"}, r'got key= beside it.* Write idempotency=\{"key": \.\.\.\}'),
        ({"store": "redis://:secret@localhost/1"}, r'^(?!.*secret).*got store= beside it.*idempotency=\{"store"'),
        ({"scope": "tenant"}, r'idempotency=\{"scope"'),
        ({"history": False}, r'idempotency=\{"history"'),
        ({"lease_ttl": 30}, r'got lease_ttl= .*idempotency=\{"lease_ttl"'),
        ({"lease_tll": 30}, r'got lease_tll= .*idempotency=\{"lease_ttl"'),
        ({"resultTTL": 30}, r'got resultTTL= .*idempotency=\{"result_ttl"'),
        ({"on_conflicts": "raise"}, r'idempotency=\{"on_conflict"'),
        ({"idempotency": {"key": "order_id"}, "max_crashs": 3}, r'idempotency=\{"max_crashes"'),
        ({"policy": Policy(key="order_id")}, r"got policy= beside it.* Did you mean idempotency=\?"),
        ({"idem": {"key": "order_id"}}, r"got idem= beside it.* Did you mean idempotency=\?"),
        ({"once_by": {"scope": "x", "lease_ttl": 5}}, r"got once_by= beside it.* Did you mean idempotency=\?"),
        ({"only": Unique(key="order_id")}, r"got only= beside it.* Did you mean unique=\?"),
        ({"uniqe": "order_id"}, r"got uniqe= beside it.* Did you mean unique=\?"),
        ({"unqiue": True}, r"got unqiue= beside it.* Did you mean unique=\?"),
        ({"Unique": True}, r"got Unique= beside it.* Did you mean unique=\?"),
        ({"unique_on": ["order_id"]}, r'got unique_on= beside it.* Write unique=\{"key": \.\.\.\}'),
        ({"once": {"keys": ["order_id"]}}, r'got once= beside it.* Write unique=\{"key": \.\.\., "until": "done"\}'),
        ({"once": {"graceful": True, "timeout": 60}}, r'got once= beside it.* Write unique=\{"key"'),
        ({"until": "done"}, r'got until= beside it.* Write unique=\{"until": \.\.\.\}'),
        ({"base": WithStore}, r'got store= beside it.*idempotency=\{"store"'),
        ({"base": WithKey}, r'got key= beside it.*idempotency=\{"key"'),
        ({"base": WithKeys}, r'got key= beside it.*idempotency=\{"key"'),
        ({"base": WithTtl}, r'got result_ttl= beside it.*idempotency=\{"result_ttl"'),
        ({"base": Inherits}, r'got result_ttl= beside it.*idempotency=\{"result_ttl"'),
        ({"base": WithMethod}, r'got idempotency_key= beside it.* Did you mean idempotency=\{"key"'),
    ],
    ids=str,
)
def test_an_option_beside_idempotency_is_refused_when_declared(
    app: Celery, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declare(app, **options)


def test_an_option_that_an_annotation_puts_beside_idempotency_is_refused(app: Celery) -> None:
    app.conf.task_annotations = {"charge": {"lease_ttl": 30}}
    with pytest.raises(ConfigurationError, match="got lease_ttl= beside it"):
        declare(app, name="charge")


class OwnWords(IdempotentTask):
    """A class that uses common words for something else."""

    store: Any = object()
    key = None
    scope = "read write"
    history: ClassVar[list[str]] = []
    idempotent = True
    leases = 3
    tenant_key = "tenant"

    def stores(self) -> None:
        """Stand for any method."""


class OwnMethods(IdempotentTask):
    """A class with methods under the names of options, as celery-singleton's has ``on_duplicate``."""

    def on_duplicate(self, existing_task_id: str) -> str:
        return existing_task_id

    @property
    def lease_ttl(self) -> int:
        return 3


def test_what_a_class_reads_of_celery_once_stays_its_own(app: Celery) -> None:
    task = declare(app, base=Vendored, once={"keys": ["order_id"]})
    assert (task.once, declare(app, name="other", once="daily").once) == ({"keys": ["order_id"]}, "daily")


def test_a_class_may_have_methods_under_the_names_of_options(app: Celery) -> None:
    task = declare(app, base=OwnMethods, idempotency={"key": "order_id", "on_duplicate": "raise"})
    assert task.apply(("A",)).get() == "A 5"
    assert (task.lease_ttl, task.on_duplicate("id")) == (3, "id")


def test_a_class_may_use_common_words_and_its_tasks_give_them_values(app: Celery) -> None:
    task = declare(app, base=OwnWords, idempotency={"key": "order_id"}, key="x", store="y", compression="gzip")
    assert task.apply(("A",)).get() == "A 5"
    assert (task.key, task.store, task.compression) == ("x", "y", "gzip")


#: Options of other libraries, and attributes as projects have them.
OTHERS = """
    once unique_on lock_expiry raise_on_duplicate singleton timeout lock_timeout keys cache_key lock_key unique_key
    ttl cache_ttl lock_ttl expires_in result_expires retries retry_delay retry_policy max_attempts on_commit
    on_error queue_name tags owner team description schedule run_every metadata context tenant tenants scopes stores
    store_errors storage backend_store histories conflict duplicates crashes crash large compress compressor
    result_url on_done failure_url release_url wait waits wait_for max_wait max_runs max_leaf idle identity
    identifier ident id_key potency important retry_key event_key api_key key_prefix keyspace primary_key result_key
    store_id store_name result_class result_type failures failure_handler lease_id lease_manager leases batch_size
    result_limit large_result_queue lock_on_conflict_key on_delete wait_for_timeout
"""


def celerys_names() -> set[str]:
    """Return what Celery knows of tasks and messages: attributes, settings, and what may be given at a publish."""
    app = Celery("names", set_as_current=False)
    publishing = (
        *(Celery._task_from_fun, Celery.send_task, AMQP.as_task_v1, AMQP.as_task_v2, Producer.publish),
        *(Task.apply_async, Task.apply, Task.retry, Task.signature_from_request, Signature.__init__, Signature.freeze),
    )
    names = {name for function in publishing for name in inspect.signature(function).parameters}
    return {*names, *dir(Task), *dir(Context), *dir(Request), *declarations.CELERY_OPTIONS, *app.conf}


@pytest.mark.parametrize("names", [celerys_names(), {*OTHERS.split()}], ids=["Celery's", "of projects"])
def test_names_that_mean_something_else_are_no_slips(names: set[str]) -> None:
    attributes = {name: 1 for name in names if not name.startswith("__")}
    cls = type("Task", (IdempotentTask,), {**attributes, "_decorated": True})
    signature = inspect.signature(lambda order_id: order_id)
    assert list(declarations._misplaced(cls, IdempotentTask, signature)) == []
    assert declarations.mistaken_key(attributes) == ""
    assert [name for name in names if declarations._is_protection(name, {"key": "order_id"}, None)] == []


# -- without the base --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"idempotency": {"key": "order_id"}},
        {"idempotency": {}},
        {"idempotency": Policy()},
        {"idempotent": {"key": "order_id"}},
        {"idempotence": Policy()},
        {"Idempotency": {"key": "order_id"}},
        {"idempotency": "order_id"},
        {"idempotency": ["order_id"]},
        {"idempotency": True},
        {"idempotency_key": "order_id"},
        {"bass": IdempotentTask},
    ],
    ids=str,
)
@pytest.mark.parametrize("plain_first", [True, False])
def test_options_of_a_task_without_the_base_are_refused_beside_one_that_has_it(
    app: Celery, options: dict[str, Any], plain_first: bool
) -> None:
    def charge(order_id: str) -> None: ...

    tasks = {"plain": options, "guarded": {"base": IdempotentTask}}
    for name in sorted(tasks, reverse=plain_first):
        app.task(name=name, shared=False, **tasks[name])(charge)
    with pytest.raises(ConfigurationError, match=r"got plain without it: .* Write @app\.task\(base=IdempotentTask"):
        app.finalize()


@pytest.mark.parametrize(
    "options",
    [
        {"idempotent": True},
        {"idempotent": {"of": "others"}},
        {"idempotency": "https://others"},
        {"idempotency": None},
        {"idempotency_key": "other"},
    ],
    ids=str,
)
def test_a_plain_task_may_have_words_of_its_own(app: Celery, options: dict[str, Any]) -> None:
    def plain() -> None: ...

    app.task(name="plain", shared=False, **options)(plain)
    assert declare(app).apply(("A",)).get() == "A 5"


# -- the key of a message ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idempotence_key": "k"}, r"got idempotence_key=\. Did you mean idempotency_key=\?"),
        ({"idempotent_key": "k"}, r"Did you mean idempotency_key=\?"),
        ({"idempotencykey": "k"}, r"Did you mean idempotency_key=\?"),
        ({"idem_key": "k"}, r"Did you mean idempotency_key=\?"),
        ({"idempotency_key": ""}, r"Expected idempotency_key= of .* got an empty one"),
        ({"idempotency": {"key": "k"}}, r"Did you mean idempotency_key=\?"),
        ({"key": "k"}, r"Write idempotency_key="),
        ({"lease_ttl": 3}, r'an option of the task.*idempotency=\{"lease_ttl"'),
        ({"headers": {"idempotency": "abc"}}, r"beside 'idempotency'.* Give your header another name"),
        ({"headers": {"idempotency": {"id": 7}}}, r"beside 'idempotency'.* Give your header another name"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "how", ["apply_async", "apply", "set", "signature", "subtask", "signature apply_async", "retry"]
)
def test_a_slip_for_the_key_of_a_message_is_refused_when_it_is_published(
    app: Celery, how: str, options: dict[str, Any], message: str
) -> None:
    task = declare(app)

    def again(self: Any) -> None:
        self.retry(**options)

    calls: dict[str, Callable[[], Any]] = {
        "apply_async": lambda: task.apply_async(("A",), **options),
        "apply": lambda: task.apply(("A",), **options),
        "set": lambda: task.s("A").set(**options).apply_async(),
        "signature": lambda: task.signature(("A",), {}, **options),
        "subtask": lambda: task.subtask(("A",), {}, **options),
        "signature apply_async": lambda: task.s("A").apply_async(**options),
        "retry": lambda: declare(app, again, name="again", bind=True).apply().get(),
    }
    with pytest.raises(ConfigurationError, match=message):
        calls[how]()


def test_of_a_task_that_need_not_be_idempotent_a_slip_alone_is_refused(app: Celery) -> None:
    """Its options are its own affair, a key that Kafka wants, say."""
    elsewhere = app.signature("elsewhere")
    with pytest.raises(ConfigurationError, match=r"Did you mean idempotency_key=\?"):
        chain(declare(app).s("A"), elsewhere.set(idempotence_key="k"))
    assert elsewhere.set(key="k", lease_ttl=3).options == {"key": "k", "lease_ttl": 3}


def test_stamps_are_called_what_their_visitor_likes(app: Celery) -> None:
    class Visitor(StampingVisitor):  # type: ignore[misc]
        def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
            return {"key": "k", "idem_key": "k", "stamped_headers": ["key", "idem_key"]}

    signature = declare(app).s("A")
    signature.stamp(Visitor())
    assert signature.apply_async().id


@pytest.mark.parametrize("how", ["delay", "s", "si", "signature delay", "apply_async", "apply", "apply by name"])
@pytest.mark.parametrize("takes", ["nothing else", "whatever comes"])
def test_a_key_among_the_arguments_is_refused_when_it_is_published(app: Celery, how: str, takes: str) -> None:
    def charge(order_id: str, **options: Any) -> None: ...

    task = declare(app, charge if takes == "whatever comes" else None)
    key: dict[str, Any] = {"idempotency_key": "k"}
    calls: dict[str, Callable[[], Any]] = {
        "delay": lambda: task.delay("A", **key),
        "s": lambda: task.s("A", **key),
        "si": lambda: task.si("A", **key),
        "signature delay": lambda: task.s("A").delay(**key),
        "apply_async": lambda: task.apply_async(("A",), key),
        "apply": lambda: task.apply(("A",), key),
        "apply by name": lambda: task.apply(args=("A",), kwargs=key),
    }
    with pytest.raises(ConfigurationError, match=r"got it among the arguments.*Write apply_async\(args, kwargs, idem"):
        calls[how]()


def test_a_body_may_have_an_argument_of_that_name(app: Celery) -> None:
    def charge(order_id: str, idempotency_key: str) -> str:
        return f"{order_id} {idempotency_key}"

    task = declare(app, charge)
    assert task.apply(("A",), {"idempotency_key": "k"}).get() == "A k"
    assert task.s("A", idempotency_key="k").apply().get() == "A k"
    assert task.delay("A", idempotency_key="k").id


def test_a_slip_in_a_message_by_name_is_logged_for_nothing_may_refuse_it(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    assert app.send_task("elsewhere", ("A",), idempotence_key="k").id
    assert "a message of elsewhere, got idempotence_key=. Did you mean idempotency_key=?" in caplog.text
    caplog.clear()
    assert app.send_task("elsewhere", ("A",), idempotency_key="k", headers={"tenant": "a"}).id
    assert caplog.text == ""


def trace(app: Celery, task: Any, **request: Any) -> Any:
    """Run a message as a worker does, and return what the result backend has of it."""
    task_id = uuid()
    request = {"id": task_id, "args": [], "kwargs": {}, "task": task.name, "retries": 0, **request}
    build_tracer(task.name, task, app=app)(task_id, (), {}, request)
    return app.AsyncResult(task_id)


def test_a_slip_in_what_follows_a_task_is_logged_and_leaves_that_task_its_success(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """An older release may have published the chain; to raise would make a failure of what has succeeded."""
    following = declare(app, name="following").si("A")
    following.options["idempotence_key"] = "k"

    def first() -> str:
        return "A"

    task = declare(app, first, name="first")
    assert trace(app, task, chain=[dict(following)]).state == "SUCCESS"
    assert "got idempotence_key=. Did you mean idempotency_key=?" in caplog.text


def test_a_header_of_the_librarys_name_in_what_follows_a_task_leaves_that_task_its_success(app: Celery) -> None:
    following = declare(app, name="following").si("A").on_error(declare(app, name="failed").si("A"))
    following.options["headers"] = {"idempotency": "abc"}

    def first() -> str:
        return "A"

    assert trace(app, declare(app, first, name="first"), chain=[dict(following)]).state == "SUCCESS"


def test_a_slip_in_a_retry_fails_the_task_and_does_not_drop_its_message(app: Celery) -> None:
    """Celery rejects the message of a retry that it cannot publish; before 5.7 it stores no result either."""

    def again(self: Any) -> None:
        self.retry(idempotence_key="k")

    assert isinstance(trace(app, declare(app, again, bind=True)).result, ConfigurationError)
    assert [record.reason for record in app.conf.idempotency_store.scan()] == ["failed"]


def test_a_slip_within_a_body_is_refused(app: Celery) -> None:
    following = declare(app, name="following")

    def first() -> None:
        following.apply_async(("A",), idempotence_key="k")

    task = declare(app, first, name="first")
    assert isinstance(trace(app, task).result, ConfigurationError)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "settings", "wrong"),
    [
        (None, {"idempotency_stores": "x"}, {"idempotency_stores": "idempotency_store"}),
        (None, {"idempotent": {}}, {"idempotent": "idempotency"}),
        (None, {"idempotence": {}}, {"idempotence": "idempotency"}),
        (None, {"idempotncy_store": "x"}, {"idempotncy_store": "idempotency_store"}),
        (None, {"idempotency_x": 1}, {"idempotency_x": "idempotency"}),
        (None, {"IDEMPOTENCY_STORE": "x"}, {"IDEMPOTENCY_STORE": "idempotency_store"}),
        (None, {"idempotency_visibility": True}, {"idempotency_visibility": "idempotency_visibility_refresh"}),
        ("CELERY", {"CELERY_IDEMPOTENCY_STOER": "x"}, {"CELERY_IDEMPOTENCY_STOER": "CELERY_IDEMPOTENCY_STORE"}),
        ("CELERY", {"IDEMPOTENCY_KEY": {}, "IDEMPOTENCY_STORE": "another library's"}, {}),
        (None, {"CELERY_IDEMPOTENCY": {}}, {"CELERY_IDEMPOTENCY": "idempotency"}),
        (None, {"celery_idempotency_store": "x"}, {"celery_idempotency_store": "idempotency_store"}),
        (None, {"worker_idempotency": {}, "STRIPE_IDEMPOTENCY": {}}, {"worker_idempotency": "idempotency"}),
        ("CELERY", {"CELERY_TASK_IDEMPOTENCY": {}}, {"CELERY_TASK_IDEMPOTENCY": "CELERY_IDEMPOTENCY"}),
        ("CELERY", {"IDEMPOTENCY": {"result_ttl": "30d"}}, {"IDEMPOTENCY": "CELERY_IDEMPOTENCY"}),
        ("CELERY", {"IDEMPOTENCY_STORE": "postgresql://db/x"}, {"IDEMPOTENCY_STORE": "CELERY_IDEMPOTENCY_STORE"}),
        ("CELERY", {"IDEMPOTENCY_STORE": "memory://", "CELERY_IDEMPOTENCY_STORE": "memory://"}, {}),
        ("CELERY", {"IDEMPOTENCY": {"header": "X-Idempotency"}, "IDEMPOTENCY_HTTP": {"store": "memory://"}}, {}),
        ("CELERY", {"CELERY_idempotency": {}}, {"CELERY_idempotency": "CELERY_IDEMPOTENCY"}),
        ("CELERY_", {"CELERY_IDEMPOTENCY": {}}, {}),
        ("CELERY_", {"CELERY_IDEMPOTENCY_STOER": "x"}, {"CELERY_IDEMPOTENCY_STOER": "CELERY_IDEMPOTENCY_STORE"}),
        ("celery", {"celery_idempotency": {}}, {}),
        ("celery", {"celery_idempotency_stoer": "x"}, {"celery_idempotency_stoer": "celery_idempotency_store"}),
        (None, {"idempotency_result_ttl": 60}, {"idempotency_result_ttl": "idempotency"}),
        ("CELERY", {"CELERY_IDEMPOTENCY_LEASE_TTL": 60}, {"CELERY_IDEMPOTENCY_LEASE_TTL": "CELERY_IDEMPOTENCY"}),
        (
            None,
            {"task_idempotency_history": False},
            {"task_idempotency_history": "idempotency"},
        ),
        (None, {"DEMO": 1, "result_expires": 60, "identity_store": 1}, {}),
        *((None, {name: "x"}, {}) for name in declarations.SETTINGS),
    ],
    ids=str,
)
def test_a_setting_that_nothing_reads_is_found(
    namespace: str | None, settings: dict[str, Any], wrong: dict[str, str]
) -> None:
    app = Celery("settings", set_as_current=False)
    app.config_from_object(type("Settings", (), settings), namespace=namespace)
    assert declarations.mistaken_settings(app) == wrong
    app.conf.update(idempotency_stroe="x")
    assert "idempotency_stroe" in declarations.mistaken_settings(app)


@pytest.mark.parametrize(
    ("namespace", "name", "hint"),
    [
        (
            None,
            "CELERY_IDEMPOTENCY",
            r"Did you mean idempotency\? In Django's settings, write CELERY_IDEMPOTENCY, and ",
        ),
        ("CELERY", "IDEMPOTENCY", r"Did you mean CELERY_IDEMPOTENCY\?$"),
        ("CELERY", "IDEMPOTENCY_STORE", r"Did you mean CELERY_IDEMPOTENCY_STORE\?$"),
        (
            None,
            "IDEMPOTENCY_STORE",
            r"Did you mean idempotency_store\? In Django's settings, write CELERY_IDEMPOTENCY_STORE, and ",
        ),
    ],
)
def test_a_setting_without_its_namespace_is_refused_with_what_reads_it(
    namespace: str | None, name: str, hint: str
) -> None:
    app = Celery("settings", set_as_current=False)
    value = "redis://localhost/1" if name.endswith("STORE") else {"result_ttl": "30d"}
    app.config_from_object(type("Settings", (), {name: value}), namespace=namespace)
    with pytest.raises(ConfigurationError, match=hint):
        declarations.check_settings(app)


@pytest.mark.parametrize(
    ("namespace", "name", "instead"),
    [
        (None, "idempotency_result_ttl", 'Write idempotency = {"result_ttl": ...}.'),
        ("CELERY", "CELERY_IDEMPOTENCY_ON_CONFLICT", 'Write CELERY_IDEMPOTENCY = {"on_conflict": ...}.'),
    ],
)
def test_an_option_as_a_setting_is_refused_with_where_it_belongs(
    namespace: str | None, name: str, instead: str
) -> None:
    app = Celery("settings", set_as_current=False)
    app.config_from_object(type("Settings", (), {name: "30d"}), namespace=namespace)
    with pytest.raises(ConfigurationError, match=re.escape(f"got {name}, which nothing reads. {instead}")):
        declarations.check_settings(app)


@pytest.mark.parametrize("pool", [TaskPool, PreforkPool])
def test_a_setting_that_is_no_switch_is_refused(app: Celery, pool: type[Any]) -> None:
    app.conf.idempotency_renew_from_main = "no"
    with pytest.raises(ConfigurationError, match=r"True or False, got 'no'\. Write True"):
        RenewalStep.include_if(cast(Any, None), SimpleNamespace(app=app, pool_cls=pool))


@pytest.mark.parametrize("namespace", [7, 0, False, [], ""])
def test_a_namespace_that_is_no_text_is_refused_when_declared(app: Celery, namespace: object) -> None:
    app.conf.idempotency_namespace = namespace
    with pytest.raises(ConfigurationError, match="to be a text, got " + re.escape(f"{namespace!r}.")):
        declare(app)


@pytest.mark.parametrize("options", [True, False, "order_id"])
def test_options_of_unique_tasks_that_make_none_unique_are_refused(app: Celery, options: object) -> None:
    app.conf.idempotency_unique = options
    with pytest.raises(ConfigurationError, match=rf"Expected idempotency_unique to be a mapping .*, got {options!r}\."):
        declare(app)


# -- when a worker starts ----------------------------------------------------------------------------------------------


def test_a_worker_of_which_no_task_has_the_base_does_not_start(start_worker: StartWorker) -> None:
    """Such an app imports nothing that could refuse it: the command line of Celery loads the library."""
    node = start_worker("tests.support.celery.unprotected_app", ready=False)
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert "got tests.support.celery.unprotected_app.charge without it" in node.logs()


def start(app: Celery, *steps: type[Any], pool: type[Any] = TaskPool) -> None:
    """Have the steps examine an app as a worker that starts has them."""
    stands_for = SimpleNamespace(app=app, pool_cls=pool, time_limit=None, soft_time_limit=None)
    check_when_started(stands_for)
    assert DeclarationStep in map(symbol_by_name, app.steps["worker"])
    for step in steps:
        step(stands_for).create(stands_for)


@pytest.mark.parametrize("step", [DeclarationStep, IdempotencyStep])
def test_a_worker_with_a_setting_that_nothing_reads_does_not_start(app: Celery, step: type[Any]) -> None:
    app.conf.idempotency_stores = "redis://localhost/1"
    with pytest.raises(ConfigurationError, match=r"got idempotency_stores, .* Did you mean idempotency_store\?"):
        start(app, step)


def test_a_worker_whose_tasks_were_declared_wrongly_and_somebody_caught_it_does_not_start(app: Celery) -> None:
    with pytest.raises(ConfigurationError):
        declare(app, key="order_id")
    with pytest.raises(ConfigurationError, match="got key= beside it"):
        start(app, DeclarationStep)


class OwnPool(PreforkPool):
    """A pool of processes with a hook of its owner's."""


@pytest.mark.parametrize("pool", [PreforkPool, OwnPool])
def test_a_pool_of_processes_and_what_derives_from_it_need_a_store_that_they_share(
    app: Celery, monkeypatch: pytest.MonkeyPatch, pool: type[Any]
) -> None:
    for name in ("limits", "enforces_limits"):
        monkeypatch.setattr(shared, name, getattr(shared, name))
    for module in (shared, monitoring):  # this process does not become a worker
        monkeypatch.setattr(module, "prepare", lambda **_: None)
    declare(app, idempotency={"key": "order_id"})
    with pytest.raises(ConfigurationError, match=r"got memory:// with a pool of processes"):
        start(app, IdempotencyStep, pool=pool)
    assert shared.enforces_limits


def test_a_pool_that_calls_tasks_where_their_messages_are_not_known_is_refused(app: Celery) -> None:
    declare(app, idempotency={"key": "order_id"})
    pool = type("AsyncIOPool", (BasePool,), {"__module__": "celery_aio_pool.pool"})
    with pytest.raises(ConfigurationError, match=r"got AsyncIOPool of celery_aio_pool, .* with -P prefork"):
        start(app, IdempotencyStep, pool=pool)


@pytest.mark.parametrize(("pool", "forks"), [(PreforkPool, True), (OwnPool, True), (TaskPool, False)])
def test_leases_are_renewed_for_the_children_of_every_pool_of_processes(
    app: Celery, pool: type[Any], forks: bool
) -> None:
    declare(app, idempotency={"key": "order_id"})
    app.conf.idempotency_renew_from_main = True
    assert RenewalStep.include_if(cast(Any, None), SimpleNamespace(app=app, pool_cls=pool)) is forks


def test_a_worker_with_nothing_wrong_starts(app: Celery) -> None:
    declare(app, idempotency={"key": "order_id"})
    start(app, DeclarationStep)


def test_a_worker_has_its_result_backend_keep_what_has_ended(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("limits", "enforces_limits"):
        monkeypatch.setattr(shared, name, getattr(shared, name))
    for module in (shared, monitoring):  # this process does not become a worker
        monkeypatch.setattr(module, "prepare", lambda **_: None)
    task = declare(app, idempotency={"key": "order_id"})
    kind = type(task.backend)
    monkeypatch.setattr(kind, "store_result", kind.store_result)
    start(app, IdempotencyStep)
    assert hasattr(kind.store_result, "keeps_ended")
