"""The lines that protect, each taken away in a copy of the source: how many schedules it takes to find out.

`python -m tests.simulation.breaks [SCHEDULES] [NAME ...]` prints the table.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.gauntlet.breaks import PACKAGE, ROOT, Edit

from .__main__ import UNENDED

RULES, GUARD, HEARTBEAT, LEASE = "stores/rules.py", "core/guard.py", "core/heartbeat.py", "core/lease.py"
CANVAS, HTTP = "celery/canvas.py", "http/delivery.py"
DJANGO = "http/django.py"
RESERVED, UNIQUE = "core/reservations.py", "celery/unique.py"
RQ_DELIVERY, RQ_JOB, RQ_WORKER = "rq/delivery.py", "rq/job.py", "rq/worker.py"
DELIVERY, MESSAGE, REQUEST = "celery/delivery.py", "celery/message.py", "celery/request.py"
SHUTDOWN, BACKOFF = "celery/worker.py", "core/backoff.py"
TASK, POOL = "celery/task.py", "celery/pool.py"

#: One lease for each process, where each thread has its own.
ONE_LEASE = """
class _OfProcess(dict):  # type: ignore[type-arg]
    def get(self):
        return self.setdefault(_process(), [None])[-1]

    def set(self, held):
        self.setdefault(_process(), [None]).append(held)
        return held

    def reset(self, held):
        self[_process()].remove(held)


def _process():
    from greenlet import getcurrent

    return getattr(getattr(getcurrent(), "host", None), "whole", None)


_current = _OfProcess()
"""

BREAKS: dict[str, tuple[Edit, ...]] = {
    name: tuple(Edit(*edit) for edit in edits)
    for name, edits in {
        "a live lease is no conflict": [(RULES, "State.IN_PROGRESS and row.lease_end > now", "None")],
        "a settled record is run again": [(RULES, "    if settled:\n", "    if False:\n")],
        "any holder settles": [
            (
                RULES,
                "row.owner != lease.owner:\n        return None\n    return Row(",
                "False:\n        return None\n    return Row(",
            )
        ],
        "any holder renews": [
            (
                RULES,
                "row.owner != lease.owner:\n        return None\n    _extend",
                "False:\n        return None\n    _extend",
            )
        ],
        "any holder releases": [(RULES, "if row.owner != lease.owner or row.state not in", "if row.state not in")],
        "fences do not rise": [(RULES, "row.fence = max(now, row.fence + 1)", "row.fence = 1")],
        "a claim that is repeated is refused": [(RULES, "row.owner == claim.owner:\n", "None:\n")],
        "copies of a message are all alike": [
            (RULES, "return claim.copy < copy or (claim.copy == copy and", "return False and (claim.copy == copy and")
        ],
        "any retry overtakes": [(RULES, "bool(claim.sender) and claim.sender == row.owner", "bool(claim.sender)")],
        "no retry overtakes": [(RULES, "bool(claim.sender) and claim.sender == row.owner", "False")],
        "a duplicate does not wait for a retry": [(RULES, "row.not_before > now and not goes_on", "False")],
        "crashes are not counted": [(RULES, "row.crashes += died", "pass")],
        "the first crash is one too many": [
            (RULES, "row.crashes >= claim.max_crashes and", "bool(row.crashes) and"),
        ],
        "tasks that take turns are no crash loop": [
            (RULES, "crashed and row.crashes >= 2 * claim.max_crashes", "False")
        ],
        "trust counts from the reply": [
            (GUARD, "self._hold(delivery, found, since)", "self._hold(delivery, found, monotonic())")
        ],
        "a late grant is trusted": [(GUARD, "if not found.doubtful:", "if True:")],
        "a lease is trusted beyond its end": [("core/lease.py", "MARGIN = 0.1", "MARGIN = -0.5")],
        "a lease is not renewed": [(GUARD, "self.heartbeat.watch(held)  # first", "pass  # first")],
        "a renewal that failed loses the lease": [
            ("core/heartbeat.py", "holding.due = monotonic() + min(", "holding.lost = True or min(")
        ],
        "a lease that is lost is trusted": [
            ("core/heartbeat.py", "if (holding.lease.key, holding.lease.owner) not in lost:", "if True:")
        ],
        "a settle that failed is a failure": [
            (
                GUARD,
                "                delivery.emit_end(held, events.SettleFailed, error=str(failure), ran=ran)\n"
                "                return True\n",
                "                raise\n",
            )
        ],
        "a lost run answers with its own value": [
            (GUARD, "decision = Ran(value) if settled or not self.policy.result_ttl else None", "decision = Ran(value)")
        ],
        "a failure is not released": [
            (
                GUARD,
                "released: bool = retry_if_interrupted(lambda: held.store.release(held.lease, release))",
                "released = True",
            )
        ],
        "a replay is None": [(GUARD, "return Replayed(payload.data, record)", "return Replayed(None, record)")],
        "a duplicate of what is done is dropped": [
            (
                GUARD,
                "case Verdict.COMPLETED | Verdict.FAILED:\n                return self._replay(delivery, record)",
                "case Verdict.COMPLETED | Verdict.FAILED:\n                return Dropped()",
            )
        ],
        "a redelivery of what is done is refused": [
            (GUARD, 'on_duplicate == "raise" and _is_anothers(delivery, record)', 'on_duplicate == "raise"'),
        ],
        "a duplicate of what is done is not refused": [
            (GUARD, 'completed and self.policy.on_duplicate == "raise"', "False"),
        ],
        "what a late run raises is stored": [
            (GUARD, "if (recorded or not self.policy.result_ttl) and not isinstance(error, LeaseLost):", "if True:")
        ],
        "a duplicate is acked without a copy": [
            ("celery/delivery.py", "publish = partial(message.publish_copy, ", "publish = partial(lambda *_, **__: 0, ")
        ],
        "the task id is the owner": [("celery/request.py", "self._owner = new_owner()", "self._owner = self.id")],
        "an owner in the message counts": [
            (
                "celery/request.py",
                "self._owner = new_owner()",
                'self._owner = (self._request_dict.get(DELIVERY_ENTRY) or {}).get("owner") or new_owner()',
            ),
            ("celery/message.py", "headers.pop(name, None)", "headers.get(name)"),
        ],
        "a lost child keeps its lease": [
            ("celery/request.py", "record = lease.release(binding.guard.store, claim, reason)", "record = None")
        ],
        "messages are acked before they run": [
            ("celery/task.py", "    acks_late = True", "    acks_late = False"),
            ("celery/declarations.py", "if not task.acks_late and not policy.allow_early_ack:", "if False:"),
        ],
        "a settle is tried once": [
            (
                GUARD,
                "pauses = pauses or _settle_pauses(held, since)\n                if retry_if_interrupted(pauses.wait):",
                "if False:",
            )
        ],
        "a lost run that cannot settle answers": [
            (
                GUARD,
                "if held.lost:\n                    return self._lost(delivery, held, error)\n                # The",
                "if False:\n                    pass\n                # The",
            )
        ],
        "a settle that is repeated is refused": [
            (RULES, "    if row.state is outcome.state and row.fence == lease.fence:\n        return row\n", "")
        ],
        "a release that is repeated is refused": [
            (
                RULES,
                "    if row.state is State.RELEASED:\n        return True\n    row.state, row.reason",
                "    row.state, row.reason",
            ),
            (RULES, "row.state not in (State.IN_PROGRESS, State.RELEASED):", "row.state is not State.IN_PROGRESS:"),
        ],
        "a quick retry is a lost lease": [
            (GUARD, "if release.reason is Reason.RETRY and not (held.lost or held.doubtful):", "if False:")
        ],
        "what a retry leaves is answered as a duplicate": [
            (GUARD, "if isinstance(ending, Release) and ending.reason is Reason.RETRY:", "if False:")
        ],
        "a run that gave up answers": [
            (
                GUARD,
                "        if held.given_up:\n            events.logger.info(",
                "        if False:\n            events.logger.info(",
            )
        ],
        "what was given up is renewed": [
            (
                GUARD,
                "        self.heartbeat.forget(held)\n        held.given_up = True\n",
                "        held.given_up = True\n",
            )
        ],
        "a run that loses its lease acks for good": [
            (GUARD, " and not isinstance(error, LeaseLost):\n            return None", ":\n            return None")
        ],
        "an interrupted acquire keeps its lease": [
            (
                GUARD,
                "would never be released\n            self.give_back(delivery, error)\n",
                "would never be released\n",
            ),
            (DELIVERY, "if not self.state.begun:  # perhaps", "if False:  # perhaps"),
        ],
        "a lease that was granted late is kept": [(GUARD, "if delivery.granted_late:", "if False:")],
        "an interrupted ending is not repeated": [
            (
                "core/backoff.py",
                'trying again", interruption)\n        return call()',
                'trying again", interruption)\n        raise',
            )
        ],
        "a renewal is trusted from its reply": [(HEARTBEAT, "holding.trust(since)", "holding.trust(monotonic())")],
        "a renewal that failed waits for its turn": [
            (HEARTBEAT, "min(RETRY_PAUSE, holding.lease.claim.lease_ttl / 10)", "holding.lease.claim.lease_ttl / 2")
        ],
        "an error ends the heartbeat": [
            (HEARTBEAT, "holding.due = monotonic() + min(", "raise  # min("),
            (HEARTBEAT, "except Exception:  # whatever it was", "except LookupError:  # whatever it was"),
        ],
        "a lease is renewed once a ttl": [(LEASE, "RENEWALS_PER_TTL = 3", "RENEWALS_PER_TTL = 1")],
        "a lease in doubt is not looked up": [
            (LEASE, "if not (self.lost or self.given_back) and self.fence and self.doubtful:", "if False:")
        ],
        "a look at a lease is trusted from its reply": [
            (
                LEASE,
                "                self.trust(since)\n                return\n",
                "                self.trust(monotonic())\n                return\n",
            )
        ],
        "a look that finds a lease lost says nothing": [
            (
                LEASE,
                "            if self.within is None:\n                self.lost = True\n",
                "            if self.within is None:\n",
            )
        ],
        "a lost child is no crash": [
            (
                LEASE,
                "store.release(Lease(claim, 0), Release(reason))",
                "store.release(Lease(claim, 0), Release(Reason.FAILED))",
            )
        ],
        "a message is put back before its lease": [
            (REQUEST, "self._within_limit(lambda: self._release(self._reason_of_loss(error)))", "pass"),
            (
                REQUEST,
                "            # Perhaps the child could not",
                "            self._release(self._reason_of_loss(error))\n            # Perhaps the child could not",
            ),
        ],
        "a copy waits as long as its number says": [
            (MESSAGE, "max(remaining, 0.1) if remaining else LONGEST_DELAY", "LONGEST_DELAY")
        ],
        "a copy does not wait for an open transaction": [(MESSAGE, " if remaining else LONGEST_DELAY", "")],
        "a copy waits longer than its broker": [(MESSAGE, "delay = min(delay, 0.45 * float(visibility))", "pass")],
        "a copy is always the first": [(MESSAGE, "copy = identity.copy + 1", "copy = 1")],
        "copies have one token": [(MESSAGE, "token=new_token()", 'token="copy"')],
        "what the broker does not take is acked": [
            (DELIVERY, "raise put_back(reason) from error", "raise Ignore(reason) from error")
        ],
        "a retry that the broker does not take is dropped": [
            ("celery/task.py", "raise put_back(reason) from rejected", "raise")
        ],
        "a message goes back without a pause": [(DELIVERY, "    _requeue_pauses.wait()\n", "")],
        "an attempt that was retried may run again": [
            (DELIVERY, "(self.request.retries or 0) + 1)", "self.request.retries or 0)")
        ],
        "a retry is not marked": [(RULES, "        _mark_attempt(row, release.next_attempt)\n", "")],
        "a lease that lapsed is forgotten": [(RULES, "row.lease_end + int(claim.keep_ttl * SECOND)", "row.lease_end")],
        "a store that failed is not asked again": [("core/breaker.py", "if now < known.probe_at:", "if True:")],
        "a retry waits for its own time": [
            (
                RULES,
                "goes_on = mine and claim.nesting >= row.attempts.get(claim.task_id, 0) // RETRIES_LIMIT",
                "goes_on = False",
            )
        ],
        "a reservation that has ended is revived": [
            (RESERVED, "            revive=False,\n", "            revive=True,\n")
        ],
        "a message that starts keeps its slot": [
            (UNIQUE, "        reservations.release(self.store, self.token, Reason.STARTED)\n", "")
        ],
        "what is not confirmed stands for a call": [
            (RESERVED, "record.remaining > UNCONFIRMED", "record.remaining > 0")
        ],
        "a slot is taken for good before it is published": [
            (RESERVED, "token.claim(UNCONFIRMED, sender=sender, note", "token.claim(3600.0, sender=sender, note")
        ],
        "a slot that cannot be given back is forgotten": [
            (
                UNIQUE,
                'raise" or not pauses.wait():\n                    raise',
                'raise" or not pauses.wait():\n                    return None',
            ),
            (
                UNIQUE,
                "pauses = Backoff(STORE_PAUSE, patience, stopping)",
                "pauses = Backoff(STORE_PAUSE, 0.0, stopping)",
            ),
        ],
        "a debounce waits for as long as calls come": [
            (UNIQUE, "self.countdown = min(wanted.debounce, left)", "self.countdown = wanted.debounce")
        ],
        "a throttle gathers no calls": [(UNIQUE, "                self.countdown = remaining\n", "")],
        "a throttle publishes beside what it has gathered": [
            (UNIQUE, "now = time() + self._most_skew() if throttle else 0.0", "now = 0.0")
        ],
        "a message that is due later will do": [(UNIQUE, 'return "due later"', 'return ""')],
        "a call takes the place of what gathers the rest of its period": [
            (UNIQUE, "gathers = throttle and not own.eta and later < throttle", "gathers = False")
        ],
        "a body is skipped for its own message": [(UNIQUE, 'return "own message"', 'return ""')],
        "a deferred message gives its slot back": [
            (DELIVERY, "if going_on or not isinstance(error", "if not isinstance(error")
        ],
        "a call takes nothing over": [
            (RESERVED, "        instead = record\n    return LATE", "        instead = None\n    return LATE")
        ],
        "what is newest is dropped in doubt": [
            (RESERVED, "return met.before_id if met.before > token.fence else None", "return met.task_id")
        ],
        "a message is replaced by one that began": [
            (RESERVED, 'return "" if record.reason == Reason.STARTED else None', 'return ""')
        ],
        "nothing is confirmed": [(RESERVED, "self.breaker.call(store, store.renew, sent)", "pass")],
        "callbacks have random ids": [(CANVAS, "if request.callbacks and fence:", "if False:")],
        "a part is counted as often as it is returned": [
            (CANVAS, "if guarded and _part_is_counted(self, request):", "if False:")
        ],
        "a part is returned beside another": [
            (CANVAS, "return max(0.0, returning - record.age) or _claim_part(task, request, returning)", "return 0.0")
        ],
        "several later deliveries return a part at once": [(CANVAS, "or _claim_part(task, request, returning)", "")],
        "a lost member whose result is stored is done": [
            (REQUEST, "if self._context.chord and self.task.reject_on_worker_lost:", "if False:")
        ],
        "what was dispatched is not dispatched again": [
            (DELIVERY, "if request.id in record.dispatched:\n            canvas", "if True:\n            canvas")
        ],
        "what follows is marked before it is dispatched": [
            (CANVAS, "fans_out = state.continues or bool(request.callbacks or request.chain)", "fans_out = False"),
            (
                DELIVERY,
                "if request.id in record.dispatched:\n            canvas",
                "if record.age > 0 or record.dispatched:\n            canvas",
            ),
        ],
        "a request kills its servers for ever": [(HTTP, "    alone = True\n", "    alone = False\n")],
        "a response that failed is recorded": [(HTTP, "        if not wish:\n", "        if False:\n")],
        "a response is sent before it is recorded": [
            ("functions.py", "ended.exception(timeout)  # which", "ended.exception(0.0)  # which")
        ],
        "what is not committed is a result": [(GUARD, "        if found is Commit.NO:\n", "        if False:\n")],
        "what raises after its commit has failed": [
            (
                GUARD,
                "if held.within is not None and self._find_commit(delivery, held, error) is Commit.YES:",
                "if False:",
            ),
            (
                GUARD,
                "if recorded or held.within is None or self._find_commit(delivery, held, error) is not Commit.YES:",
                "if True:",
            ),
        ],
        "any settled record is the run's own": [
            (
                GUARD,
                "if record is None or (record.fence == held.fence and record.state is State.COMPLETED):",
                "if record is None or record.state is State.COMPLETED:",
            )
        ],
        "a lost child fails its task": [
            ("celery/task.py", "    reject_on_worker_lost = True", "    reject_on_worker_lost = False")
        ],
        "what is published on purpose is superseded": [(RULES, "    if not claim.is_copy:\n", "    if False:\n")],
        "an attempt that was retried runs again": [
            (RULES, "if claim.attempt < row.attempts.get(claim.task_id, 0):", "if False:")
        ],
        "a lease that ran out is not taken over": [
            (RULES, "row.state is State.IN_PROGRESS and row.lease_end > now", "row.state is State.IN_PROGRESS")
        ],
        "any settle of what is settled is accepted": [
            (RULES, "if row.state is outcome.state and row.fence == lease.fence:", "if row.state is outcome.state:")
        ],
        "a renewal does not extend the lease": [
            (RULES, "    _extend(row, lease.claim, now)\n    if now", "    if now")
        ],
        "a record is gone with its lease": [
            (RULES, "row.expires = row.lease_end + int(claim.keep_ttl * SECOND)", "row.expires = row.lease_end")
        ],
        "a record is gone before its retry is due": [(RULES, "row.expires += int(release.retry_in * SECOND)", "pass")],
        "a result is not kept": [(RULES, "expires=now + int(ttl * SECOND),", "expires=now,")],
        "a run whose record is gone is not settled": [
            (
                RULES,
                "        row = forgotten(lease)\n    if row.state is outcome",
                "        return None\n    if row.state is outcome",
            )
        ],
        "a lease whose record is gone is not renewed": [
            (
                RULES,
                "        if not lease.claim.revive:\n            return None\n        row = forgotten",
                "        return None\n        row = forgotten",
            )
        ],
        "a retry that overtakes counts as a crash": [
            (
                RULES,
                "lapsed = row.state is State.IN_PROGRESS and not ended_by_publishing",
                "lapsed = row.state is State.IN_PROGRESS",
            )
        ],
        "a crash that was noticed is not counted": [(RULES, "        row.crashes += 1\n", "        pass\n")],
        "a failure does not end a row of crashes": [
            (
                RULES,
                "elif release.reason not in _KEEPS_CRASHES:\n        row.crashes = 0",
                "elif release.reason not in _KEEPS_CRASHES:\n        pass",
            )
        ],
        "a run does not clear the mark of its attempts": [
            (RULES, "    row.attempts.pop(claim.task_id, None)\n    if claim", "    if claim")
        ],
        "a failure does not clear the mark of its attempts": [
            (
                RULES,
                "elif release.reason not in _KEEPS_MARK:\n        row.attempts.pop(row.task_id, None)",
                "elif release.reason not in _KEEPS_MARK:\n        pass",
            )
        ],
        "a run does not end its task's waiting": [
            (RULES, "    row.waiting.pop(claim.task_id, None)\n    row.attempts", "    row.attempts")
        ],
        "a copy of an older attempt does not wait its turn": [
            (RULES, "        return claim.attempt < attempt\n", "        return claim.attempt > attempt\n")
        ],
        "a released record still has its lease": [
            (RULES, "row.state, row.reason, row.holder = State.RELEASED, release", "row.reason, row.holder = release")
        ],
        "a renewal goes on while a result is recorded": [
            (GUARD, "        self.heartbeat.forget(held)  # not before: a large", "        # not before: a large")
        ],
        "a settle that is refused counts as done": [
            (
                GUARD,
                "            except LeaseLost:\n                return self._lost(delivery, held, error)",
                "            except LeaseLost:\n                return True",
            )
        ],
        "a settle that was given up on counts as lost": [
            (
                GUARD,
                "                if held.lost:\n                    return self._lost(delivery, held, error)\n        ",
                "                if True:\n                    return self._lost(delivery, held, error)\n        ",
            )
        ],
        "a duplicate that meets a holder is dropped": [
            (GUARD, "                    return _busy_with(found.record)\n", "                    return Dropped()\n")
        ],
        "a superseded copy waits": [
            (GUARD, "        delivery.emit(events.Superseded)\n        return Dropped()", "        return Busy(1.0)")
        ],
        "a lost run whose record is gone is dropped": [
            (
                GUARD,
                "        if record is None:\n            return Busy(STORE_PAUSE[1])",
                "        if record is None:\n            return Dropped()",
            )
        ],
        "a lost run is dropped": [
            (
                GUARD,
                "            return self._replay(delivery, record)\n        return _busy_with(record)",
                "            return self._replay(delivery, record)\n        return Dropped()",
            )
        ],
        "without the store a task runs": [(GUARD, 'if self.policy.on_store_error == "run":', "if True:")],
        "without the store a task fails": [
            (
                GUARD,
                'if self.policy.on_store_error == "raise":\n            raise error\n        if',
                "if True:\n            raise error\n        if",
            )
        ],
        "a refused release counts as accepted": [(GUARD, "        if not released:\n", "        if False:\n")],
        "a check does not hear that the lease is lost": [
            (
                LEASE,
                "            if not self.store.renew([self.lease]):",
                "            self.store.renew([self.lease])\n            if True:",
            )
        ],
        "a lease is renewed when it has run out": [
            (LEASE, "self.due = since + ttl / RENEWALS_PER_TTL", "self.due = since + ttl")
        ],
        "a dead child's lease is not given back": [
            (LEASE, "released = store.release(Lease(claim, 0), Release(reason))", "released = False")
        ],
        "a renewal that failed is the last": [
            (
                HEARTBEAT,
                "holding.due = monotonic() + min(RETRY_PAUSE, holding.lease.claim.lease_ttl / 10)",
                "holding.due = monotonic() + 3600.0",
            )
        ],
        "a lease that was settled is found lost": [(HEARTBEAT, "elif id(holding) in self.holdings:", "else:")],
        "a failure counts as a crash": [(DELIVERY, "Reason.CRASHED if fatal else Reason.FAILED", "Reason.CRASHED")],
        "callbacks of a replay get ids of their own": [
            (
                DELIVERY,
                "        canvas.assign_callback_ids(request, task.app, record.fence)",
                "        canvas.assign_callback_ids(request, task.app, 0)",
            )
        ],
        "callbacks are dispatched by every replay": [(DELIVERY, "if request.id in record.dispatched:", "if False:")],
        "a lease is given back before its child is killed": [(REQUEST, "if _is_gone(self.worker_pid):", "if True:")],
        "a child that hit its hard limit keeps its lease": [
            (REQUEST, "            self._in_background(self._release_when_gone)\n", "            pass\n")
        ],
        "a hard limit with its message back is no crash": [
            (REQUEST, "Reason.FAILED if acks_on_timeout(self.task) else Reason.CRASHED", "Reason.FAILED")
        ],
        "a final failure is released": [(DELIVERY, "if self.binding.is_final(error):", "if False:")],
        "a final failure is a result": [
            (
                DELIVERY,
                "return Outcome(State.FAILED, codec.encode_exception",
                "return Outcome(State.COMPLETED, codec.encode_exception",
            )
        ],
        "a message fails for its own operation": [
            (GUARD, 'on_conflict == "raise" and _is_anothers(delivery, record)', 'on_conflict == "raise"')
        ],
        "a coroutine begins with a lease in doubt": [("functions.py", "found.fence and found.doubtful", "False")],
        "what is granted to who was cancelled is kept": [
            ("functions.py", "future.add_done_callback(functools.partial(_give_back, guard, delivery, held))", "pass")
        ],
        "a body that was cancelled has no end": [
            (
                "functions.py",
                "                value = await body()\n        except BaseException as raised:",
                "                value = await body()\n        except Exception as raised:",
            )
        ],
        "what is replaced by itself is done": [
            (DELIVERY, "                if state.continued:\n", "                if False:\n")
        ],
        "what is replaced by another task is not done": [
            (DELIVERY, "                if state.continued:\n", "                if True:\n")
        ],
        "a duplicate of what was replaced has no result": [
            (DELIVERY, "                value = self._result_of(reference)\n", "                value = None\n")
        ],
        "a retry of what goes on frees the key": [
            (DELIVERY, "self.binding.policy.failure_ttl if self.state.nesting else 0.0", "0.0")
        ],
        "what is replaced by itself is its continuation": [
            (
                RULES,
                "goes_on = mine and claim.nesting >= row.attempts.get(claim.task_id, 0) // RETRIES_LIMIT",
                "goes_on = mine",
            )
        ],
        "a body begins with a lease that ran out in a hook": [
            (GUARD, "if not held.lost and monotonic() < held.deadline:", "if True:")
        ],
        "a look at a lease counts however late it is answered": [
            (LEASE, "if self.lost or monotonic() < since + self.lease.claim.lease_ttl * (1 - MARGIN):", "if True:")
        ],
        "a coroutine looks at its lease once": [
            ("functions.py", "found.fence and found.doubtful", "found.fence and found.doubtful and not looks")
        ],
        "a lost horse keeps its lease": [(RQ_WORKER, "if self._reaped[1] != 0:", "if False:")],
        "a worker renews no lease of its horse": [(RQ_WORKER, 'self._act("renewed", self._renew)', "pass")],
        "a horse is an owner that its worker does not know": [
            (RQ_DELIVERY, "self.handover.owner if self.handover is not None else new_owner()", "new_owner()")
        ],
        "a job that is interrupted before its body keeps its lease": [
            (
                RQ_DELIVERY,
                "self.binding.guard.give_back(self, error, ending if isinstance(ending, Release) else None)",
                "pass",
            )
        ],
        "a job whose lease was lost is done": [
            (RQ_DELIVERY, "return self._stand_aside(Busy(jobs.FIRST_DELAY))", "return None")
        ],
        "a job begins before the retry of another": [
            (RQ_DELIVERY, "return Release(Reason.RETRY, job.get_retry_interval())", "return Release(Reason.RETRY, 0.0)")
        ],
        "a retry that a body returns is a result": [
            (RQ_DELIVERY, "if isinstance(value, Retry):\n            raise", "if False:\n            raise")
        ],
        "a deferral is a retry": [
            (RQ_JOB, "job.number_of_retries = (job.number_of_retries or 0) - 1", "pass"),
        ],
        "a shutdown that was announced is a crash": [
            (RULES, "died = lapsed and row.reason != Reason.SHUTDOWN", "died = lapsed")
        ],
        "a shutdown is not announced": [(SHUTDOWN, "self.mark_running()", "pass")],
        "what a shutdown cuts off is not announced": [(REQUEST, "cut_off.append(self)", "pass")],
        "a child that a shutdown cuts off has crashed": [
            (
                DELIVERY,
                "if pool.is_stopping() or self.request.is_eager:\n            return",
                "if False:\n            return",
            ),
            (DELIVERY, "error.code in SIGNALLED and pool.stops_soon()", "False"),
        ],
        "a slot waits on in a worker that is to end": [
            (BACKOFF, "if left <= 0 or self.stopping():", "if left <= 0:"),
            (BACKOFF, "    if not stopping():\n", "    if True:\n"),  # else it would not even sleep
        ],
        "a body that leaves keeps its lease": [
            (
                GUARD,
                "recorded = retry_if_interrupted(lambda: self._record_failure(delivery, held, ending, error))",
                "recorded = isinstance(error, SystemExit) or self._record_failure(delivery, held, ending, error)",
            )
        ],
        "a child at its limit that was overtaken keeps what it is granted then": [
            (REQUEST, "if self.worker_pid and shared.enforces_limits:", "if not self._overtaken and self.worker_pid:")
        ],
        "a job is scheduled before its scheduler knows it": [
            (RQ_JOB, "if pipeline is None and status is JobStatus.SCHEDULED:", "if False:")
        ],
        "a crash loop is retried": [
            (RQ_DELIVERY, "if self._is_permanent(error) and self.job.retries_left:", "if False:"),
        ],
        "the alarm of a worker rings in its release": [
            (RQ_WORKER, "signal.alarm(0)  # nothing is waited for any more, and to release must not", "pass  #")
        ],
        "a job comes back though nothing would enqueue it": [
            (RQ_DELIVERY, "if self._can_be_scheduled:\n            delay", "if True:\n            delay")
        ],
        "one body's end ends all renewals": [
            (HEARTBEAT, "server.holdings.pop(id(holding), None)", "server.holdings.clear()")
        ],
        "what ends stops the renewal of its heir": [
            (HEARTBEAT, "self.holdings[id(holding)] = holding", "self.holdings[holding.key] = holding"),
            (HEARTBEAT, "server.holdings.pop(id(holding), None)", "server.holdings.pop(holding.key, None)"),
            (HEARTBEAT, "elif id(holding) in self.holdings:", "elif holding.key in self.holdings:"),
        ],
        "a lease that is lost takes its batch along": [
            (HEARTBEAT, "if (holding.lease.key, holding.lease.owner) not in lost:", "if not lost:")
        ],
        "bodies of a process have one lease": [
            (
                LEASE,
                "_current: ContextVar[HeldLease | LeaseSlot | None] = "
                'ContextVar("celery_idempotent_lease", default=None)\n',
                ONE_LEASE,
            )
        ],
        "a task has one lease": [
            (
                DELIVERY,
                "        state.holding, state.entered = held,",
                "        task.held = state.holding = held\n        state.entered =",
            ),
            (TASK, "if state is None else state.holding\n", "if state is None else self.held\n"),
        ],
        "deliveries of a worker have one owner": [
            (REQUEST, "self._owner = new_owner()", "self._owner = self._hostname")
        ],
        "what ends hides what runs": [
            (POOL, "_shown.pop(id(held), None), _memory, slot", "_shown.clear(), _memory, slot"),
        ],
        "a shutdown announces one body": [
            (
                SHUTDOWN,
                "if request not in self._marked and self._mark(request):",
                "if not self._marked and self._mark(request):",
            )
        ],
        "a cold shutdown fails where bodies cannot be ended": [
            (REQUEST, "            if shared.enforces_limits:\n                raise\n", "            raise\n")
        ],
        "a body that leaves a thread is no crash": [
            (DELIVERY, "comes_back = isinstance(error, (SystemExit, KeyboardInterrupt))", "comes_back = False")
        ],
        "a body that leaves takes its message along": [
            (DELIVERY, "if pool.enforces_limits or request.is_eager or type(leaving) is not SystemExit:", "if True:"),
            (REQUEST, "if error is None or error.__context__ is None or meant:", "if True:"),
        ],
        "what is no exception has no answer in a thread": [
            (REQUEST, "            answer.exception = error.__context__\n", "            return inner(self, answer)\n")
        ],
        "a greenlet that is put back at its limit is no crash": [
            (DELIVERY, "comes_back or (_is_time_limit(error) and not acks_on_timeout(self.task))", "comes_back")
        ],
        "a greenlet that was killed acks its message": [
            (REQUEST, "        if not self._cut_off:\n            super()", "        if True:\n            super()")
        ],
        "an ending that is interrupted is not recorded": [
            (BACKOFF, "interruption)\n        return call()", "interruption)\n        raise")
        ],
        "a failure that is retried frees the key": [
            (RQ_DELIVERY, "if again and isinstance(ending, Release)", "if False and isinstance(ending, Release)")
        ],
        "a view of Django that its server ends keeps its lease": [
            (
                DJANGO,
                "            if held.fence:\n                self.binding.guard.finish(delivery, held, error=error)\n",
                "",
            )
        ],
        "a stream of Django that its server ends keeps its lease": [
            (
                DJANGO,
                "        except BaseException as error:  # noqa: BLE001 - recorded, and raised again\n"
                "            failure = error\n        try:\n            timeout",
                "        try:\n            timeout",
            )
        ],
        "a stream of Django that is dropped does not end": [
            (DJANGO, "        if self._open:\n            with", "        if False:\n            with")
        ],
        "a stream of Django keeps its response": [
            (DJANGO, "return map(partial(_encoded, response.charset), response._iterator)", "return iter(response)")
        ],
        "a stream of Django finds no lease": [
            (
                DJANGO,
                "        with running(held):\n            part = next",
                "        if True:\n            part = next",
            )
        ],
        "a stream of Django that breaks off is done": [
            (DJANGO, "            self(error)\n            raise\n", "            self()\n            raise\n")
        ],
        "a view of Django that begins is recorded before its stream": [
            (
                DJANGO,
                "if failure is None and pending.delivery is not None and",
                "if False and pending.delivery is not None and",
            )
        ],
        "a view of Django answers though it has settled": [
            (
                DJANGO,
                "            answer = delivery.answer_error(error)\n        return response if answer is own else",
                "            answer = delivery.answer_error(error)\n        return response if own.status else",
            )
        ],
        "a client that goes cancels its view of Django": [
            (DJANGO, "            await self._end_alone(task, passed)\n", "            task.cancel()\n")
        ],
        "Django does not wait for what goes on alone": [
            (
                DJANGO,
                "FIRST_COMPLETED)\n        if passed.done():\n            demand",
                "ALL_COMPLETED, timeout=0)\n        if passed.done():\n            demand",
            ),
            (DJANGO, "(response.close)()\n        await asyncio.wait([task])\n", "(response.close)()\n"),
        ],
        "Django does not wait for the end of a stream": [(DJANGO, "            await self._demand.ended.wait()\n", "")],
        "a stream that its client has left is not closed": [
            (DJANGO, "            await sync_to_async(response.close)()\n", "            pass\n")
        ],
        "a stream that its client has left waits for its own thread": [
            (DJANGO, "            demand.outer_waits = True\n", "            pass\n")
        ],
        "a stream of asyncio keeps its response": [
            (DJANGO, "passed.result().pop() if passed.done()", "passed.result()[-1] if passed.done()")
        ],
        "who makes a stream keeps its response": [(DJANGO, "                    del response, reader, parts\n", "")],
        "a stream of asyncio that is left is made on": [(DJANGO, "            self._asked.put_nowait(None)\n", "")],
        "a stream of asyncio that is left has failed": [
            (DJANGO, "if self._closed and isinstance(error, asyncio.CancelledError):", "if False:")
        ],
        "a stream runs in the thread that waited for it": [
            (DJANGO, "                _leave_outer_thread()\n", "                pass\n")
        ],
        "a stream of threads is read in any thread": [
            (DJANGO, "await sync_to_async(_gather)(map", "await sync_to_async(_gather, thread_sensitive=False)(map"),
            (
                DJANGO,
                "sync_to_async(lambda: next(parts, None))",
                "sync_to_async(lambda: next(parts, None), thread_sensitive=False)",
            ),
        ],
        "a lease comes to a heartbeat that is about to end": [
            (
                HEARTBEAT,
                "        with self._lock:\n            server = self",
                "        if True:\n            server = self",
            )
        ],
    }.items()
}

#: What is found where threads take turns between two statements.
BETWEEN = ("a lease comes to a heartbeat that is about to end",)

#: What finds a break, where that is not what charges orders; some follow from their files.
KINDS = {
    RQ_DELIVERY: "rq",
    RQ_JOB: "rq",
    RQ_WORKER: "rq",
    "a body begins with a lease that ran out in a hook": "rq",
    "a look at a lease counts however late it is answered": "rq",
    RESERVED: "unique",
    UNIQUE: "unique",
    CANVAS: "canvases",
    HTTP: "http",
    DJANGO: "asyncio",
    "a view of Django that its server ends keeps its lease": "http",
    "a stream of Django that its server ends keeps its lease": "http",
    "a stream of Django that is dropped does not end": "http",
    "a stream of Django keeps its response": "http",
    "a stream of Django finds no lease": "http",
    "a stream of Django that breaks off is done": "http",
    "a view of Django that begins is recorded before its stream": "http",
    "a view of Django answers though it has settled": "http",
    "functions.py": "http",
    "a coroutine begins with a lease in doubt": "asyncio",
    "a coroutine looks at its lease once": "asyncio",
    "what is granted to who was cancelled is kept": "asyncio",
    "a body that was cancelled has no end": "asyncio",
    "a deferred message gives its slot back": "unique",
    "a lost member whose result is stored is done": "canvases",
    "what was dispatched is not dispatched again": "canvases",
    "callbacks of a replay get ids of their own": "canvases",
    "callbacks are dispatched by every replay": "canvases",
    "a copy does not wait for an open transaction": "transactions",
    "what is not committed is a result": "transactions",
    "what raises after its commit has failed": "transactions",
    "any settled record is the run's own": "transactions",
    "one body's end ends all renewals": "threads",
    **dict.fromkeys(BETWEEN, "threads"),
    "what ends stops the renewal of its heir": "threads",
    "a lease that is lost takes its batch along": "threads",
    "bodies of a process have one lease": "threads",
    "a task has one lease": "threads",
    "deliveries of a worker have one owner": "threads",
    "what ends hides what runs": "threads",
    "a shutdown announces one body": "threads",
    "a cold shutdown fails where bodies cannot be ended": "threads",
    "a body that leaves a thread is no crash": "threads",
    "a body that leaves takes its message along": "threads",
    "what is no exception has no answer in a thread": "threads",
    "a greenlet that is put back at its limit is no crash": "greenlets",
    "a greenlet that was killed acks its message": "greenlets",
    "an ending that is interrupted is not recorded": "greenlets",
}


def found_after(name: str, schedules: int) -> tuple[int | None, str]:
    """Return how many schedules it takes to find a break, None if so many do not, and what they find."""
    with tempfile.TemporaryDirectory() as folder:
        caches = shutil.ignore_patterns("__pycache__", ".tox")
        for part in (PACKAGE, "tests"):
            shutil.copytree(ROOT / part, Path(folder) / part, ignore=caches)
        for edit in BREAKS[name]:
            edit.apply(Path(folder))
        command = [
            sys.executable,
            "-m",
            "tests.simulation.statements" if name in BETWEEN else "tests.simulation",
            "--runs",
            str(schedules),
            "--stop",
            "--only",
            kind_of(name),
        ]
        env = {**os.environ, "PYTHONPATH": folder}
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    found = re.search(r"^seed (\d+): (.*)", run.stdout, re.MULTILINE)
    if found is None:
        assert run.returncode in (0, UNENDED), run.stdout + run.stderr
        return None, ""
    return int(found[1]) + 1, found[2]


def kind_of(name: str) -> str:
    """Return which schedules are to find a break."""
    return next((KINDS[each] for each in (name, *(edit.file for edit in BREAKS[name])) if each in KINDS), "charges")


def main() -> None:
    """Print the table."""
    schedules = int(sys.argv[1]) if sys.argv[1:] else 2000
    missed, names = 0, sys.argv[2:] or list(BREAKS)
    for name in names:
        count, why = found_after(name, schedules)
        missed += count is None
        print(f"{name:45} {count if count is not None else 'not found':>9}  {why}", flush=True)
    print(f"{len(names) - missed} of {len(names)} found within {schedules} schedules")


if __name__ == "__main__":
    main()
