"""Canvas: the ids of callbacks and errbacks, the parts of chords, and keys, which no group may have.

A task that is answered twice must not set them off twice. They get ids that follow from the parent's id, the run and
their place, so that a second dispatch (after a crash in the middle of the first) carries the same ids; and once they
are dispatched, the record has a mark of it.
"""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Callable
from typing import Any

from celery.canvas import Signature, _basemap, _chain, _chord, chunks, group, maybe_signature

from ..core.keys import compose_part
from ..errors import ConfigurationError, StoreError
from ..events import in_words, logger
from ..stores.records import NO_CRASH_LOOP, Claim, Lease, Record, new_owner
from .app import is_guarded, is_in_django
from .declarations import refuse_mistakes
from .message import KEY_HEADER, DeliveryState, given_key

#: Seconds after a member of a chord has settled in which a process that lives has certainly returned its part, beside
#: those for which Celery waits for the results of the other members.
RETURNING = 2.0
#: What a signature is that is made of others; what a plain task calls tasks, header or body are its own arguments.
CANVASES = ("group", "chain", "chord")
#: Beside a chord's counter, how the key begins under which the result backend notes that a member's part was counted.
COUNTED = ".part."
NAMESPACE = uuid.UUID("0b2b41ab-7b4a-5c39-9d1a-6c8a3a6a4f0e")


def clear_continuations(task: Any, request: Any) -> None:
    """Remove the continuations that were dispatched before, and a chord's part where a second one is counted."""
    request.callbacks = request.errbacks = request.chain = None
    if counts_parts(task, request):
        request.chord = None


def counts_parts(task: Any, request: Any) -> bool:
    """Return whether the result backend only counts the parts of the request's chord, and counts one twice.

    Celery's memcached, DynamoDB and GCS backends do, and django-celery-results in Django's database. On others a second
    part of a member makes no difference: Redis knows the members by their ids, and Celery's own databases hold which
    members are done.
    """
    return bool(request.chord and request.group and _counts(task.backend))


def _counts(backend: Any) -> bool:
    return bool(getattr(backend, "implements_incr", False)) or is_in_django(backend)


def count_parts_once(backend: Any) -> None:
    """Have backends of this kind count one part of each guarded member of a chord; to call twice is the same as once.

    The backend itself notes whose parts it has counted. Celery returns parts from many places, in the main process too:
    for a member that was revoked, that hit its hard limit, or whose chain has failed before it. A failure frees the
    key, so that the record of the operation cannot hold what an earlier run of it has returned.
    """
    kind = type(backend)
    if _counts(backend) and not hasattr(kind.on_chord_part_return, "counts_once"):
        kind.on_chord_part_return = _counting_once(kind.on_chord_part_return)


def _counting_once(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counting_once(self: Any, request: Any, state: str, result: Any, **options: Any) -> Any:
        guarded = request.group and is_guarded(self.app.tasks.get(request.task))
        if guarded and _part_is_counted(self, request):
            logger.info("%s[%s] has returned its part of chord %s before", request.task, request.id, request.group)
            return None
        answer = method(self, request, state, result, **options)
        if guarded:
            try:
                _note_counted(self, request)
            except Exception as error:  # noqa: BLE001 - the backend's own; the part itself was counted
                logger.warning(
                    "%s[%s]: cannot note that its part was counted: %s", request.task, request.id, in_words(error)
                )
        return answer

    counting_once.counts_once = True  # type: ignore[attr-defined]
    return counting_once


def _part_is_counted(backend: Any, request: Any) -> bool:
    try:
        if is_in_django(backend):
            return bool(_in_django(backend.GroupModel).filter(group_id=_counted_in_django(request)).exists())
        return backend.get(_counted_key(backend, request)) is not None
    except Exception as error:  # noqa: BLE001 - the backend's own; Celery meets the same outage next
        logger.warning(
            "%s[%s]: cannot read whether its part was counted: %s", request.task, request.id, in_words(error)
        )
        return False


def _note_counted(backend: Any, request: Any) -> None:
    if not is_in_django(backend):
        backend.set(_counted_key(backend, request), b"1")
        return
    notes = _in_django(backend.GroupModel)  # of which Celery removes what a chord that never ends leaves
    if _is_over_in_django(request.group):
        notes.filter(group_id__startswith=f"{request.group}{COUNTED}").delete()
    else:
        notes.create(group_id=_counted_in_django(request))


def _counted_key(backend: Any, request: Any) -> Any:
    return backend.get_key_for_chord(request.group, f"{COUNTED}{request.id}")


def _counted_in_django(request: Any) -> str:
    return f"{request.group}{COUNTED}{request.id}"


def _is_over_in_django(group_id: str) -> bool:
    """Return whether a chord has no counter any more: the last part removes it."""
    counters = _in_django(sys.modules["django_celery_results.models"].ChordCounter)
    return not counters.filter(group_id=group_id).exists()


def _in_django(model: Any) -> Any:
    """Return the rows of a model in the database that it is written to; a replica may lag behind."""
    from django.db import router

    return model._default_manager.using(router.db_for_write(model))


def chord_is_over(task: Any, request: Any) -> bool:
    """Return whether the parts of the request's chord were all counted; the last one removes what it is known by."""
    try:
        if is_in_django(task.backend):
            return _is_over_in_django(request.group)
        return task.app.GroupResult.restore(request.group, backend=task.backend) is None
    except Exception as error:  # noqa: BLE001 - the backend's own; Celery meets the same outage next
        logger.warning("%s[%s]: cannot read the group of its chord: %s", task.name, request.id, in_words(error))
        return False


def chord_claim(task: Any, request: Any, record: Record) -> float:
    """Return for how many seconds another process may be returning the part of this replayed task; 0 if none is.

    A Redis backend of Celery >= 5.7 has the process that completes a chord claim its body. If that one dies, no other
    looks once the claim has expired, unless a member's part is returned again.

    A backend that only counts the parts must not get one twice. Just after the task has settled, its process may not
    have returned the part yet, or the backend not have noted that it did. Of several deliveries that come later, one
    returns it at a time.
    """
    backend = task.backend
    if not (request.chord and request.group) or request.is_eager:
        return 0.0
    if counts_parts(task, request):
        if request.id in record.dispatched or record.task_id not in ("", request.id):
            return 0.0
        if _part_is_counted(backend, request):
            return 0.0
        returning = float(task.app.conf.result_chord_join_timeout) + RETURNING
        return max(0.0, returning - record.age) or _claim_part(task, request, returning)
    if not hasattr(type(backend), "_chord_claim_extend_script"):
        return 0.0
    try:
        claim = backend.get_key_for_group(request.group, ".c")
        if backend.client.get(claim) in (None, b"done", "done"):
            return 0.0
        return float(max(backend.client.pttl(claim), 1)) / 1000
    except Exception:  # noqa: BLE001 - the backend's own; Celery meets the same outage next, and raises
        return 0.0


def _claim_part(task: Any, request: Any, ttl: float) -> float:
    """Claim for so many seconds to return a part; return for how many another delivery has that claim, 0 for this."""
    key = compose_part(task._binding.namespace, request.group, request.id)
    claim = Claim(key, new_owner(), ttl, RETURNING, max_crashes=NO_CRASH_LOOP)
    guard = task._binding.guard
    try:
        found = guard.breaker.call(guard.store, guard.store.acquire, claim)
    except StoreError as error:
        logger.warning("%s[%s]: whether another returns its part is not known yet: %s", task.name, request.id, error)
        return ttl
    return 0.0 if isinstance(found, Lease) else max(found.record.remaining, RETURNING)


def assign_callback_ids(request: Any, app: Any, fence: int) -> None:
    """Give every callback that will be dispatched an id that follows from the request's id, the run and its place.

    The steps of a chain have had their ids since it was published, the groups of its chords among them.

    Arguments:
        request: The request of this delivery.
        app: Its app.
        fence: The fence of the run whose value is returned: a task id may be used again, and its callbacks run again.
            0 for an unprotected run, which is never replayed: its callbacks get ids of their own.
    """
    state = DeliveryState.of(request)
    # Also where the body took them away: a redelivery has them again, and must not set them off.
    state.fans_out = state.continues or bool(request.callbacks or request.chain)
    if request.callbacks and fence:
        request.callbacks = _placed(request.callbacks, f"{_run(request)}/{fence}/callbacks", app)


def forget_errbacks(request: Any, record: Record) -> None:
    """Take away the errbacks of a remembered failure, if this message has set them off before."""
    if request.id in record.dispatched:
        request.errbacks = None


def give_errback_ids(request: Any, app: Any, *, remembered: bool) -> None:
    """Give the errbacks of a task that fails ids that follow from this sending of its message, and their places.

    Unlike a success, a failure is not the end, unless it is remembered: a message that is sent again under its id has
    the task run again, and its errbacks too if it fails.
    """
    state = DeliveryState.of(request)
    state.fans_out_failed = remembered and bool(request.errbacks)
    if request.errbacks and state.identity.sending:
        request.errbacks = _placed(request.errbacks, f"{_run(request)}/{state.identity.sending}/errbacks", app)


def _run(request: Any) -> str:
    """Return what names a run of a task: its id, and the worker where all of them run it."""
    place = DeliveryState.of(request).identity.place
    return f"{request.id}@{place}" if place else str(request.id)


def parts_of(signature: Any) -> list[Any]:
    """Return the tasks that a signature is made of, as signatures that may be changed in place."""
    if signature.get("subtask_type") not in CANVASES:
        return [signature]
    found = []

    def collect(member: Any, place: str) -> Any:
        found.extend(parts_of(member))
        return member

    _replace_members(signature, collect)
    return found


def _replace_members(signature: Any, change: Callable[[Any, str], Any]) -> None:
    """Put into a canvas what ``change`` makes of each of its members, given the member and its place."""
    kwargs, app = signature.kwargs, signature.app
    for name in ("tasks", "header"):
        members = kwargs.get(name)
        if isinstance(members, dict):  # the header of a chord that was frozen before
            kwargs[name] = change(maybe_signature(members, app=app), name)
        elif members is not None:
            kwargs[name] = [change(maybe_signature(each, app=app), f"{name}/{i}") for i, each in enumerate(members)]
    if kwargs.get("body") is not None:
        kwargs["body"] = change(maybe_signature(kwargs["body"], app=app), "body")


def last_of(signature: Any) -> Any:
    """Return the task whose result is that of the signature, after `parts_of`; None if Celery adds one that has it."""
    kind = signature.get("subtask_type")
    if kind == "chain" and signature.kwargs.get("tasks"):
        return last_of(signature.kwargs["tasks"][-1])
    if kind == "chord" and signature.kwargs.get("body") is not None:
        return last_of(signature.kwargs["body"])
    return None if kind in CANVASES else signature


def _placed(signatures: Any, place: str, app: Any) -> list[Any]:
    return [_with_ids(maybe_signature(sig, app=app), f"{place}/{i}") for i, sig in enumerate(signatures)]


def _with_ids(signature: Any, place: str) -> Any:
    signature = signature.clone()
    signature.options.setdefault("task_id", str(uuid.uuid5(NAMESPACE, place)))
    if signature.get("subtask_type") in CANVASES:
        _replace_members(signature, lambda member, at: _with_ids(member, f"{place}/{at}"))
    return signature


def refuse_keys() -> None:
    """Have Celery's canvas refuse a key for several tasks, and a slip for a key; to call twice is the same as once.

    Celery hands the options of a group to each of its members, and those of a chord to its body too. A receiver of
    ``before_task_publish`` can neither distinguish that from a key of each member's own, nor refuse: Celery logs what a
    receiver raises, and publishes.
    """
    if not hasattr(Signature.set, "refuses_mistakes"):
        setattr(Signature, "set", _checking(Signature.set))  # noqa: B010 - mypy knows no other way
    for kind in (group, _chord, _basemap, chunks):
        for name in ("__init__", "set", "apply_async", "apply"):
            method = getattr(kind, name)
            if not hasattr(method, "refuses_keys"):
                setattr(kind, name, _refusing(method))
    for name in ("set", "__init__"):
        method = getattr(_chain, name)
        if not hasattr(method, "hands_keys_on"):
            setattr(_chain, name, _handing_on(method))
    if not hasattr(_chain.apply, "names_steps"):
        setattr(_chain, "apply", _naming_steps(_chain.apply))  # noqa: B010


def _checking(method: Any) -> Any:
    @functools.wraps(method)
    def checking(self: Any, immutable: Any = None, **options: Any) -> Any:
        refuse_mistakes(f"a signature of {self.task}", options, guarded=False)  # any task's
        return method(self, immutable, **options)

    checking.refuses_mistakes = True  # type: ignore[attr-defined]
    return checking


def _handing_on(method: Any) -> Any:
    """Have a chain hand its key to its first task at once: Celery drops a chain's options where it is continued."""

    @functools.wraps(method)
    def handing_on(self: Any, *args: Any, **options: Any) -> Any:
        answer = method(self, *args, **options)
        key = self.options.pop(KEY_HEADER, None)
        if key is not None and self.tasks:
            first, *rest = self.tasks
            keyed = maybe_signature(first, app=self._app).clone()  # others may hold the same signature
            self.tasks = [keyed.set(**{KEY_HEADER: key}), *rest]
        return answer

    handing_on.hands_keys_on = True  # type: ignore[attr-defined]
    return handing_on


def _naming_steps(method: Any) -> Any:
    """Have a chain that runs in place give its key to its first task and its id to the last one, as published ones do.

    Celery hands both to each of them, where the second would be taken for a duplicate of the first.
    """

    @functools.wraps(method)
    def naming_steps(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options = {**self.options, **options}
        headers = options.get("headers") or {}
        key, task_id = given_key(options), options.pop("task_id", None)
        options.pop(KEY_HEADER, None)
        if not self.tasks or (key is None and task_id is None):
            return method(self, args, kwargs, **options)
        if KEY_HEADER in headers:
            options["headers"] = {name: value for name, value in headers.items() if name != KEY_HEADER}
        steps = self.clone()  # others may hold the same signatures
        steps.options.clear()
        if key is not None:
            steps.tasks[0].set(**{KEY_HEADER: key})
        if task_id is not None:
            steps.tasks[-1].set(task_id=task_id)
        return method(steps, args, kwargs, **options)

    naming_steps.names_steps = True  # type: ignore[attr-defined]
    return naming_steps


def _refusing(method: Any) -> Any:
    @functools.wraps(method)
    def refusing(self: Any, *args: Any, **options: Any) -> Any:
        if options.get(KEY_HEADER, (self.get("options") or {}).get(KEY_HEADER)) is not None:
            what = type(self).__name__.strip("_").removeprefix("x")  # xmap is that of map()
            raise ConfigurationError(
                f"Expected {KEY_HEADER} to name one operation, got one for a {what}, which is several. Give each task "
                f"a key of its own, as in group(charge.s(order).set({KEY_HEADER}=order) for order in orders)."
            )
        return method(self, *args, **options)

    refusing.refuses_keys = True  # type: ignore[attr-defined]
    return refusing
