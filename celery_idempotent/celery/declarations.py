"""Declarations that protect less than they promise: found when a task is declared or published, or a worker starts."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from celery.app.defaults import DEFAULTS
from celery.app.task import Task
from celery.utils.imports import symbol_by_name

from ..core.binding import GUARDED_AS
from ..core.policy import OPTIONS, UNIQUE_OPTIONS, Policy, Unique
from ..errors import (
    ConfigurationError,
    Conflict,
    IdempotencyError,
    StoreError,
    StoreRefused,
    StoreUnreachable,
)
from ..stores import SCHEMES
from .app import TaskBinding, idempotent_tasks, is_idempotent
from .message import DELIVERY_ENTRY, KEY_HEADER, META_FIELDS, META_HEADER, UNGUARDED

#: What makes the requests of idempotent tasks. It is imported by workers alone, as their steps are.
REQUEST = "celery_idempotent.celery.request:IdempotentRequest"
#: What to do about a body that returns before its work is done.
UNFINISHED = (
    "Write a plain function that runs it to its end: asyncio.run(...) for a coroutine, a loop or list(...) for a "
    "generator."
)
#: The packages whose pools await what tasks return.
AWAITING = {"celery_aio_pool", "celery_pool_asyncio"}
#: The settings of an app that the library reads.
SETTINGS = (
    "idempotency",
    "idempotency_namespace",
    "idempotency_renew_from_main",
    "idempotency_store",
    "idempotency_unique",
    "idempotency_visibility_refresh",
)
#: By option of a task, the setting with what all of its kind begin with.
SETTING = {"idempotency": "idempotency", "unique": "idempotency_unique"}
#: How names of Celery's settings begin, and what is read without a namespace does not.
GROUPS = ("celery_", "task_", "worker_")
#: How an app reads Django's settings, whose names are all in capitals.
NAMESPACED = 'app.config_from_object("django.conf:settings", namespace="CELERY")'
#: The setting of the middleware for Django, which an app without a namespace finds among its own.
MIDDLEWARE_SETTING = "IDEMPOTENCY_HTTP"
#: What Celery reads from a task beside the attributes of its class: options of publishing, of autoretry, and those of
#: its other releases.
CELERY_OPTIONS = {
    *("queue", "exchange", "exchange_type", "routing_key", "delivery_mode", "immediate", "mandatory", "compression"),
    *("autoretry_for", "dont_autoretry_for", "retry_kwargs", "retry_backoff", "retry_backoff_max", "retry_jitter"),
    *("acks_on_failure", "acks_on_timeout", "retry_on_worker_lost", "override_max_retries", "store_eager_result"),
    *("options", "run", "app", "on_replace", "filter", "lazy", "shared"),
}
#: Options of a policy whose names are so common that a class may use them for something else.
COMMON_WORDS = {"store", "key", "scope", "history"}
DISTINCT_OPTIONS = tuple(name for name in OPTIONS if name not in {*COMMON_WORDS, "compression"})
#: What celery-once takes in a task's option ``once``.
ONCE_OPTIONS = {"keys", "graceful", "timeout", "unlock_before_run", "blocking", "blocking_timeout"}
#: How alike a word must be to be taken for a slip, of 1: nothing that Celery knows comes near.
LIKENESS = 0.85
LIKE_IDEMPOTENCY = LIKE_UNIQUE = 0.8


def check_declarations(app: Any) -> None:
    """Refuse an app whose declarations would protect less than they promise.

    Raises:
        ConfigurationError: a task is declared wrongly, or a setting is none of this library's.
    """
    check_settings(app)
    check_unprotected(app)
    for task in idempotent_tasks(app):  # what was raised when it was declared may have been caught
        check_declaration(task)


def check_declaration(task: Any) -> None:
    """Refuse a task that is declared wrongly.

    Raises:
        ConfigurationError: it is; the message has the remedy.
    """
    check_batches(task)
    cls, binding = type(task), TaskBinding(task)
    policy = binding.policy
    root = next(base for base in reversed(cls.__mro__) if "_binding" in vars(base))  # IdempotentTask
    check_options(task, root)
    check_inner_guard(task, binding)
    check_call(task, root)
    check_retries(task, policy)
    check_body(task, getattr(cls.__call__, "__wrapped__", None))
    if not task.acks_late and not policy.allow_early_ack:  # which Celery reads from the instance
        raise ConfigurationError(
            f"Expected {task.name} to be acknowledged late, got acks_late=False: a message that is acked before it "
            "runs is lost with its worker, and nothing would run again. Leave acks_late out, or accept that with "
            'idempotency={"allow_early_ack": True}.'
        )
    if task.Request != REQUEST and REQUEST not in _names_of_bases(symbol_by_name(task.Request)):
        raise ConfigurationError(
            f"Expected the Request of {task.name} to derive from celery_idempotent.celery.IdempotentRequest, "
            f"got {task.Request!r}: without it a lost child's lease is not released."
        )


def check_name(cls: type[Any]) -> None:
    """Refuse options of a policy under a name of those tasks that are never guarded.

    Raises:
        ConfigurationError: the class has such a name, and options of its own rather than those of an app's task class.
    """
    options = [name for name in ("idempotency", "unique") if name in vars(cls)]
    if options and (cls.name or "").startswith(UNGUARDED):
        raise ConfigurationError(
            f"Expected the name of an idempotent task to begin with neither {' nor '.join(UNGUARDED)}, got {cls.name} "
            f"with {options[0]}=: the tasks of these names, Celery's and the library's, are never guarded. Give it "
            "another name."
        )


def _names_of_bases(cls: type) -> set[str]:
    """Return how a class and its bases are written in ``Request``."""
    return {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}


def check_body(task: Any, call: Any) -> None:
    """Refuse a task whose body has done nothing yet when it returns.

    Celery neither awaits nor iterates what a body returns. A decorator may do both, so what it wraps is not examined
    (``__wrapped__`` is not followed); what a body returns is checked once more when it has returned.

    Arguments:
        task: The task, bound to its app.
        call: The ``__call__`` that its class puts around ``run``, or None.

    Raises:
        ConfigurationError: it is a coroutine function or a generator function.
    """
    # With a __call__ of its own, a class may run coroutines to their end. Where `pydantic=True` hides the function
    # behind a wrapper of Celery's, that is known not to.
    bodies = [call] if call else [getattr(task, "_orig_run", task.run), getattr(task, "_decorated_fun", None)]
    for body in bodies:
        kind = _kind_of(body)
        if kind is None:
            continue
        advice = (
            "Write a plain function whose body is asyncio.run(...) of the coroutine. Outside Celery, @idempotent "
            "guards coroutine functions as they are."
            if kind == "a coroutine function"
            else "Return a list, or publish a task for each item."
        )
        raise ConfigurationError(
            f"Expected {task.name} to do its work before it returns, got {kind}: Celery does not run what it returns, "
            f"and the operation would be recorded as done before it began. {advice}"
        )


def _kind_of(body: Any) -> str | None:
    while isinstance(body, functools.partial):
        body = body.func
    # A callable object may have an async __call__; that of a plain function is none of these.
    for function in (body, type(body).__call__ if callable(body) else None):
        if inspect.isasyncgenfunction(function):
            return "an asynchronous generator function"
        if inspect.iscoroutinefunction(function):
            return "a coroutine function"
        if inspect.isgeneratorfunction(function):
            return "a generator function"
    return None


def check_batches(task: Any) -> None:
    """Refuse a task of celery-batches, which calls its body once for many messages, and outside of the guard.

    Many projects have a copy of it, or of ``celery.contrib.batches``, as which Celery had it before its release 4.

    Raises:
        ConfigurationError: it is one.
    """
    copied = not isinstance(task.Strategy, str) and hasattr(task, "flush_every") and hasattr(task, "flush_interval")
    if copied or any(base.__module__.partition(".")[0] == "celery_batches" for base in type(task).__mro__):
        raise ConfigurationError(
            f"Expected {task.name} to be called once for each message, got a class of celery-batches, which calls the "
            "body once for many. Guard the function that the body calls for each item with @idempotent."
        )


def check_pool(cls: type) -> None:
    """Refuse a pool that awaits what tasks return.

    It calls a task in another thread than that in which the tracer has pushed its request, where each delivery looks
    like a direct call.

    Raises:
        ConfigurationError: it is one.
    """
    package = next((found for base in cls.__mro__ if (found := base.__module__.partition(".")[0]) in AWAITING), None)
    if package:
        raise ConfigurationError(
            f"Expected one of Celery's own pools, got {cls.__name__} of {package}, which calls tasks where their "
            "messages are not known: nothing would be guarded. Start the worker with -P prefork, threads or gevent, "
            "and have bodies call asyncio.run(...); or have plain tasks await functions with @idempotent."
        )


def check_inner_guard(task: Any, binding: Any) -> None:
    """Refuse a task whose body is guarded under the same keys: each delivery would meet its own lease.

    Raises:
        ConfigurationError: it is.
    """
    inner = getattr(getattr(task, "_orig_run", task.run), GUARDED_AS, None)
    if inner == (binding.namespace, binding.name) and binding.policy.key is not None:
        raise ConfigurationError(
            f"Expected one guard of {task.name}, got base=IdempotentTask around @idempotent with keys of the same "
            "name: each delivery would be refused as its own duplicate. Leave @idempotent out."
        )


def check_call(task: Any, root: type) -> None:
    """Refuse a class whose ``__call__``, as that of Flask's documentation, stands where nothing calls it.

    Arguments:
        task: The task, bound to its app.
        root: The class behind which it would stand.

    Raises:
        ConfigurationError: it does.
    """
    cls = type(task)
    if cls.__call__ is not root.__call__:
        return
    for base in cls.__mro__[cls.__mro__.index(root) + 1 :]:
        if "__call__" in vars(base) and not issubclass(Task, base):
            raise ConfigurationError(
                f"Expected the __call__ of {base.__name__} to be called around the body of {task.name}, got it behind "
                f"{root.__name__}, which calls the body itself. Write {base.__name__} before {root.__name__} among the "
                f"bases: class Base({base.__name__}, {root.__name__})."
            )


def check_retries(task: Any, policy: Policy) -> None:
    """Refuse automatic retries for an error that the guard raises, as ``autoretry_for`` surrounds the body alone.

    Raises:
        ConfigurationError: such an error is named, and the policy has it raised. ``Exception`` may be named.
    """
    raised = {
        "on_conflict": (policy.on_conflict, (Conflict,), "defer"),
        "on_store_error": (policy.on_store_error, (StoreError, StoreUnreachable, StoreRefused), "wait"),
    }
    for option, (value, errors, patient) in raised.items():
        named = [error for error in getattr(task, "autoretry_for", ()) if error in (*errors, IdempotencyError)]
        if value == "raise" and named:
            raise ConfigurationError(
                f"Expected autoretry_for of {task.name} to name errors of its body, got {named[0].__name__} with "
                f'{option}="raise": that is raised before the body runs, and never retried. Write '
                f'{option}="{patient}": the message then comes back, or waits, by itself. One that something in the '
                "body raises: catch it there, and raise self.retry()."
            )


def check_options(task: Any, root: type) -> None:
    """Refuse options of the policy that stand beside ``idempotency`` and not in it.

    Celery makes an attribute of the task of every option that it does not know, and nothing reads it.

    Arguments:
        task: The task, bound to its app.
        root: The class whose subclasses are examined.

    Raises:
        ConfigurationError: there is such an attribute.
    """
    signature = inspect.signature(getattr(task, "_orig_run", task.run))
    for name, advice in _misplaced(type(task), root, signature):
        raise ConfigurationError(
            f"Expected the idempotency options of {task.name} in idempotency={{...}}, got {name}= beside it: Celery "
            f"makes an attribute of the task of that, and nothing reads it. {advice}"
        )


def _misplaced(cls: type, root: type, signature: inspect.Signature) -> Iterator[tuple[str, str]]:
    """Yield each attribute that is meant as an option, and what to write instead."""
    bases = [base for base in cls.__mro__ if not issubclass(root, base)]
    for index, base in enumerate(bases):
        decorated = "_decorated" in vars(base)  # its attributes are what @app.task was given
        own = {name for other in bases[index + 1 :] for name in (*vars(other), *_annotated(other))}
        for name, value in vars(base).items():
            if name.startswith("_") or name in CELERY_OPTIONS or name in own or hasattr(Task, name):
                continue
            if is_like_idempotency(name) and not isinstance(value, bool):
                yield name, _instead(name, value)
            elif not decorated and isinstance(value, (FunctionType, property)):
                continue  # a method under the name of an option, as celery-singleton's on_duplicate()
            elif option := _option_meant(name):
                yield name, f'Write idempotency={{"{option}": ...}}.'
            elif name in UNIQUE_OPTIONS or (name == "until" and value in ("start", "done")):
                yield name, f'Write unique={{"{name}": ...}}.'
            elif advice := _unique_meant(name, value, signature, decorated) or _options_meant(name, value, signature):
                yield name, advice
            elif name in COMMON_WORDS and (decorated or _is_unmistakable(name, value, signature)):
                yield name, f'Write idempotency={{"{name}": ...}}.'


def _annotated(cls: type) -> Iterable[str]:
    return vars(cls).get("__annotations__") or ()


def is_like_idempotency(name: str) -> bool:
    """Return whether this is a slip for ``idempotency``."""
    word = _spelled(name)
    if word == "idempotency":
        return False
    return word.startswith("idempot") or _likeness(word, "idempotency") >= LIKE_IDEMPOTENCY


def _instead(name: str, value: object) -> str:
    if isinstance(value, (Mapping, Policy)) or value is None:
        return "Did you mean idempotency=?"
    return 'Did you mean idempotency={"key": ...}?' if "key" in name.lower() else "Did you mean idempotency={...}?"


def _option_meant(name: str) -> str:
    """Return the option of a policy that this is, or is a slip for; "" if it is none."""
    word = _spelled(name)
    for option in DISTINCT_OPTIONS:  # leaseTTL, and not store_errors for on_store_error
        words_alike = word.count("_") == option.count("_") and _likeness(word, option) >= LIKENESS
        if words_alike or word.replace("_", "") == option.replace("_", ""):
            return option
    return ""


def _unique_meant(name: str, value: object, signature: inspect.Signature, decorated: bool) -> str:
    """Return what to write instead of an attribute that is meant as ``unique``; "" where it is not."""
    word = _spelled(name)
    if name == "once" and decorated and isinstance(value, Mapping) and value and ONCE_OPTIONS.issuperset(value):
        return 'Write unique={"key": ..., "until": "done"}.'
    if word.startswith("unique_"):  # celery-singleton's unique_on, and the like; or a word for something else
        return 'Write unique={"key": ...}.' if _is_unmistakable("key", value, signature) else ""
    return "Did you mean unique=?" if name != "unique" and _likeness(word, "unique") >= LIKE_UNIQUE else ""


def _options_meant(name: str, value: object, signature: inspect.Signature) -> str:
    """Return what to write for an attribute whose value is a policy's options, whatever it is called; "" for others."""
    if name in ("idempotency", "unique"):
        return ""
    if isinstance(value, (Policy, Unique)):
        return f"Did you mean {'idempotency' if isinstance(value, Policy) else 'unique'}=?"
    if not isinstance(value, Mapping) or not set(value) <= set(OPTIONS):
        return ""
    distinct = not set(DISTINCT_OPTIONS).isdisjoint(value)
    return "Did you mean idempotency=?" if distinct or _is_unmistakable("key", value.get("key"), signature) else ""


def _is_unmistakable(name: str, value: object, signature: inspect.Signature) -> bool:
    """Return whether the value of an attribute that a class has under a common word is one of the policy's."""
    if name == "key":
        names = [value] if isinstance(value, str) else value
        return isinstance(names, (list, tuple)) and bool(names) and all(each in signature.parameters for each in names)
    if name == "store":
        return isinstance(value, str) and value.partition("://")[0].removeprefix("cached+").lower() in SCHEMES
    return False


def check_unprotected(app: Any) -> None:
    """Refuse tasks that have options of a policy and are not idempotent.

    Raises:
        ConfigurationError: the app has such a task.
    """
    for task, name in unprotected(app):
        of_all = any(name in (each.annotate_any() or ()) for each in app.annotations if hasattr(each, "annotate_any"))
        remedy = (
            f'In task_annotations name the tasks instead of "*"; for all idempotent ones, set app.conf.{SETTING[name]}.'
            if of_all and name in SETTING
            else f"Write @app.task(base=IdempotentTask, {name}=...)."
        )
        raise ConfigurationError(
            f"Expected base=IdempotentTask where a task has {name}=, got {task} without it: the task is not protected "
            f"at all. {remedy}"
        )


def unprotected(app: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each task that has options of a policy and is not idempotent, and what the options are called.

    Arguments:
        app: A Celery app; only tasks that it has evaluated are examined.
    """
    for task in list(app._tasks.values()):
        if is_idempotent(task) or str(task.name).startswith(UNGUARDED):  # Celery's own, which an annotation may meet
            continue
        bases = [base for base in type(task).__mro__ if not issubclass(Task, base)]
        body = getattr(task, "_orig_run", task.run)
        for base in bases:
            decorated = "_decorated" in vars(base)
            for name, value in vars(base).items():
                if value is None or value is False:
                    continue
                unique = name == "unique" and not any(name in vars(other) for other in bases if other is not base)
                if _is_protection(name, value, body) or (decorated and (unique or _is_base(value))):
                    yield str(task.name), name


def _is_protection(name: str, value: object, body: Any) -> bool:
    """Return whether an attribute of a plain task is meant as options or a key, and is no word of another library's."""
    if not isinstance(value, (Policy, Mapping, str, list, tuple)):  # first: to compare names takes much longer
        return value is True and name == "idempotency"
    if name.startswith("_") or not _means_idempotency(name):
        return False
    if isinstance(value, Mapping):
        return name == "idempotency" or bool(set(value) & set(OPTIONS))
    return isinstance(value, Policy) or _is_unmistakable("key", value, inspect.signature(body))


@functools.lru_cache(maxsize=512)
def _means_idempotency(name: str) -> bool:
    return _spelled(name) == "idempotency" or is_like_idempotency(name)


def _is_base(value: object) -> bool:
    return isinstance(value, type) and is_idempotent(value)


def mistaken_settings(app: Any) -> dict[str, str]:
    """Return the settings of an app that are meant for this library and are none of it, with a suggestion for each."""
    found = {}
    for name in sorted(str(name) for name in app.conf.keys()):  # noqa: SIM118 - its own iterator fails on modules
        meant = _setting_meant(app, name)
        if meant is not None:
            found[name] = meant
    return found


def _setting_meant(app: Any, written: str) -> str | None:
    """Return what to write instead of a setting; "" for one to be left out, None for one that is right or another's."""
    prefix = in_namespace(app, "")
    name = written.removeprefix(prefix).lower() if prefix and written.startswith(prefix) else written
    own = in_namespace(app, name)
    if prefix and name != written and name in SETTINGS:
        return None if written == own else own
    if prefix and name != name.lower():  # Django's settings are everybody's
        return own if name.lower() in SETTINGS and own not in app.conf and _is_setting(name, app.conf[name]) else None
    if name in DEFAULTS or name == MIDDLEWARE_SETTING or name in SETTINGS:  # Celery's own are most
        return None
    # Celery reads its own settings in capitals too, and finds others in lower case alone.
    word = name.lower()
    near = [rest for group in GROUPS if (rest := word.removeprefix(group)) in SETTINGS]
    near = near or (["idempotency"] if _option_in(name) else [])
    near = near or difflib.get_close_matches(word, SETTINGS, n=1, cutoff=LIKE_IDEMPOTENCY)
    if not near and not name.startswith("idempot"):
        return None
    near = near or difflib.get_close_matches(word, SETTINGS, n=1)
    return in_namespace(app, near[0]) if near else ""


def in_namespace(app: Any, name: str) -> str:
    """Return how an app reads a setting from what it is configured by: as Celery does, in the case of its namespace."""
    if not app.namespace:
        return name
    prefix = app.namespace if app.namespace.endswith("_") else f"{app.namespace}_"
    return f"{prefix}{name.upper() if prefix.isupper() else name.lower()}"


def _option_in(setting: str) -> str:
    """Return the option that a setting is meant as, as ``idempotency_result_ttl``; "" if it is meant as none."""
    option = setting.removeprefix("celery_").removeprefix("task_").removeprefix("idempotency_")
    return option if option in OPTIONS and option != setting and "idempotency_" in setting else ""


def _is_setting(name: str, value: object) -> bool:
    """Return whether a setting of Django's that lacks the namespace has a value that is this library's."""
    if isinstance(value, Mapping):
        return bool(value) and set(value) <= set(OPTIONS)
    is_store = name == "IDEMPOTENCY_STORE" and _is_unmistakable("store", value, inspect.Signature())
    return is_store or isinstance(value, Policy)


def check_settings(app: Any) -> None:
    """Refuse settings that are meant for this library and are none of it.

    Raises:
        ConfigurationError: there is such a setting.
    """
    for name, meant in mistaken_settings(app).items():
        hint = f"Did you mean {meant}?" if meant else "Leave it out."
        option = _option_in(name.lower())
        if option and meant == in_namespace(app, "idempotency"):
            hint = f'Write {meant} = {{"{option}": ...}}.'
        if meant and name.isupper() and not app.namespace:
            hint += f" In Django's settings, write CELERY_{meant.upper()}, and {NAMESPACED}."
        raise ConfigurationError(
            f"Expected settings of idempotency to be of {', '.join(SETTINGS)}, got {name}, which nothing reads. {hint}"
        )


def mistaken_key(options: Mapping[str, Any], *, guarded: bool = True) -> str:
    """Return what is wrong with the options of one message, as the end of a sentence; "" if nothing is.

    Arguments:
        options: The options, by name.
        guarded: Whether the message is an idempotent task's (default: it is). Of another, which may have options of its
            own, only a slip for the key's whole name is wrong.
    """
    stamps = options.get("stamped_headers") or ()
    for name in options:
        advice = _advice_on(name) if guarded else _advice_on_key(name)
        if advice and name not in stamps:
            return advice
    return ""


@functools.lru_cache(maxsize=512)
def _advice_on(name: str) -> str:
    if advice := _advice_on_key(name):
        return advice
    if name == "key":
        return f"got {name}=. Write {KEY_HEADER}= for the key of one message."
    if name in DISTINCT_OPTIONS:
        return f'got {name}=, which is an option of the task. Write idempotency={{"{name}": ...}} where it is declared.'
    return ""


@functools.lru_cache(maxsize=512)
def _advice_on_key(name: str) -> str:
    if name in (KEY_HEADER, META_HEADER + "_key", DELIVERY_ENTRY):
        return ""
    word = _spelled(name)
    if word.startswith(("idempot", "idem_")) or _likeness(word, KEY_HEADER) >= LIKE_IDEMPOTENCY:
        return f"got {name}=. Did you mean {KEY_HEADER}=?"
    return ""


def refuse_mistakes(what: str, options: Mapping[str, Any], *, guarded: bool = True) -> None:
    """Refuse options of one message that are meant for this library, and that nothing reads; see `mistaken_key`.

    Raises:
        ConfigurationError: there is one.
    """
    wrong = mistaken_key(options, guarded=guarded)
    if wrong:
        raise ConfigurationError(f"Expected options that Celery or {KEY_HEADER}= knows for {what}, {wrong}")
    if guarded and options.get(KEY_HEADER) == "":
        raise ConfigurationError(
            f"Expected {KEY_HEADER}= of {what} to name the operation, got an empty one. Leave it out or fill it."
        )
    written = (options.get("headers") or {}).get(META_HEADER)
    # A newer version may have written more: a retry carries the header of its message on.
    own = isinstance(written, dict) and (not written or written.keys() & META_FIELDS)
    if guarded and written is not None and not own:
        raise ConfigurationError(
            f"Expected headers of {what} beside {META_HEADER!r}, which is the library's own and reaches no body. Give "
            "your header another name."
        )


def refuse_key_argument(task: Any, kwargs: Collection[str] | None) -> None:
    """Refuse a key that is given to the body in place of the message.

    Raises:
        ConfigurationError: there is one, and the body has no argument of that name.
    """
    if kwargs and KEY_HEADER in kwargs and KEY_HEADER not in task._binding.signature.parameters:
        raise ConfigurationError(
            f"Expected {KEY_HEADER} as an option of the message, got it among the arguments of {task.name}, which has "
            f"none of that name: delay() and s() hand all they are given to the body. Write "
            f"apply_async(args, kwargs, {KEY_HEADER}=...), or s(...).set({KEY_HEADER}=...)."
        )


def _spelled(name: str) -> str:
    return name.lower().replace("-", "_")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()
