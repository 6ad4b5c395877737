"""For each fault of the gauntlet, the lines that keep it out, and what stands there once they do not.

`test_breaks.py` makes each of these changes in a copy of the source, and the fault's test must fail there. Where a
fault is something that we never had (a second lock, a look at the store on the way out), the change adds it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "celery_idempotent"
#: Section 12 of the semantics.
FAULTS = range(1, 27)


@dataclass(frozen=True)
class Edit:
    """One change: in `file`, below the package, `old` (which is there once) becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        path = root / PACKAGE / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times {self.old!r}, expected one"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Break:
    """One way to let a fault in."""

    fault: int
    name: str
    edits: tuple[Edit, ...]

    def __str__(self) -> str:
        return f"{self.fault}-{self.name.replace(' ', '-')}"


def broken(fault: int, name: str, *edits: tuple[str, str, str]) -> Break:
    return Break(fault, name, tuple(Edit(*edit) for edit in edits))


ACQUIRE, SETTLE, RELEASE = (f"stores/redis/lua/{verb}.lua" for verb in ("acquire", "settle", "release"))

BREAKS = [
    broken(
        1,
        "the task id is the owner",
        ("celery/request.py", "self._owner = new_owner()", "self._owner = self.id"),
    ),
    broken(
        2,
        "a duplicate is acked and no copy of it published",
        ("celery/delivery.py", "publish = partial(message.publish_copy, ", "publish = partial(lambda *_, **__: 0, "),
    ),
    broken(
        3,
        "a retry does not say who published it",
        (
            "celery/task.py",
            'is_retry = options.get("retries") == (request.retries or 0) + 1',
            "is_retry = False",
        ),
    ),
    broken(4, "whoever asks settles", (SETTLE, " and last_owner == owner", "")),
    broken(4, "whoever asks releases", (RELEASE, "last_owner ~= owner or", "false or")),
    broken(
        5, "a claim that is repeated is refused", (ACQUIRE, "if running and last_owner == owner then", "if false then")
    ),
    broken(
        6,
        "the clients clock decides",
        (ACQUIRE, "redis.call('TIME')\n", "{ARGV[14], 0}\n"),
        (
            "stores/redis/records.py",
            'claim.holder,\n        written if attempt else "",\n',
            'claim.holder, written if attempt else "", int(__import__("time").time()),\n',
        ),
    ),
    broken(
        7,
        "an error ends the thread",
        ("core/heartbeat.py", "holding.due = monotonic() + min(", "raise  # min("),
        ("core/heartbeat.py", "except Exception:  # whatever it was", "except LeaseLost:  # whatever it was"),
    ),
    broken(
        7,
        "a renewal that failed is a lease that is lost",
        ("core/heartbeat.py", "holding.due = monotonic() + min(", "holding.lost = True or min("),
    ),
    broken(
        8,
        "a child goes on with its parents connection",
        ("stores/redis/connections.py", "if self._pid != os.getpid():", "if False:"),
    ),
    broken(
        8,
        "a child counts on its parents thread",
        ("core/heartbeat.py", "if self._pid != os.getpid():  # forked", "if False:  # forked"),
        ("core/heartbeat.py", "(after_in_child=_begin_again)", "(after_in_child=list)"),
    ),
    broken(
        9,
        "what is falsy is no value",
        ("core/guard.py", "if payload.kind is Kind.VALUE:", "if payload.kind is Kind.VALUE and payload.data:"),
        ("core/guard.py", "if delivery.wants_result:", "if False:"),
    ),
    broken(
        9,
        "values are kept as plain JSON",
        (
            "core/results.py",
            "content = serialization.dumps(value, self._serializer)",
            'content = __import__("json").dumps(value, default=str)',
        ),
    ),
    broken(
        10,
        "an error of the serializer is the tasks",
        (
            "core/results.py",
            "except Exception as exc:  # noqa: BLE001 - whatever",
            "except MemoryError as exc:  # whatever",
        ),
    ),
    broken(
        11,
        "a result lasts as long as a lease",
        (
            "core/guard.py",
            "held, outcome, ttl=self.policy.result_ttl",
            "held, outcome, ttl=self.policy.lease_ttl",
        ),
    ),
    broken(
        11,
        "a lease lasts as long as a result",
        ("core/binding.py", "lease_ttl=policy.lease_ttl,", "lease_ttl=policy.result_ttl,"),
    ),
    broken(
        12,
        "the guard remembers the call it is in",
        (
            "core/guard.py",
            "            if isinstance(found, HeldLease):\n",
            "            if isinstance(found, HeldLease):\n                self.held = found\n",
        ),
        (
            "core/guard.py",
            "return self._settle(delivery, held, outcome, ",
            "return self._settle(delivery, self.held, outcome, ",
        ),
    ),
    broken(
        12,
        "the task remembers the call it is in",
        ("celery/delivery.py", "state.holding, state.entered =", "task.__dict__['held'], state.entered ="),
        (
            "celery/task.py",
            "held = _loose_lease() if state is None else state.holding",
            "held = self.__dict__.get('held')",
        ),
    ),
    broken(
        13,
        "a second lock beside the lease",
        (
            ACQUIRE,
            "local died = lapsed and",
            "if not redis.call('SET', key .. ':lock', 1, 'NX') then return reply('conflict') end\n"
            "local died = lapsed and",
        ),
    ),
    broken(
        14,
        "defaults are left out",
        ("core/keys.py", "bound.apply_defaults()", "pass"),
        ("core/binding.py", "every = {**self._defaults, **named}", "every = named"),
    ),
    broken(14, "numbers are text", ("core/keys.py", "return int.__repr__(value) if", "return _quote(str(value)) if")),
    broken(
        15, "an empty key is a key", ("core/keys.py", """if encoded == '""' or (encoded""", "if False and (encoded")
    ),
    broken(
        15,
        "without a key the task runs unprotected",
        (
            "celery/delivery.py",
            "            self._prepare()\n",
            "            try:\n                self._prepare()\n"
            "            except Exception:\n                return self.run(*self.args, **self.kwargs)\n",
        ),
    ),
    broken(
        16,
        "the store is asked on the way out",
        (
            "celery/task.py",
            "    def apply(\n",
            "    def apply_async(self, *args, **options):\n        try:\n            self._binding.guard.store.ping()\n"
            "        except StoreError:\n            return None\n"
            "        return super().apply_async(*args, **options)\n\n    def apply(\n",
        ),
    ),
    broken(
        17,
        "a replay is None",
        ("core/guard.py", "return Replayed(payload.data, record)", "return Replayed(None, record)"),
    ),
    broken(
        17,
        "a duplicate is dropped",
        (
            "core/guard.py",
            "case Verdict.COMPLETED | Verdict.FAILED:\n                return self._replay(delivery, record)",
            "case Verdict.COMPLETED | Verdict.FAILED:\n                return Dropped()",
        ),
    ),
    broken(17, "None is made up where no value was kept", ("core/guard.py", "if delivery.wants_result:", "if False:")),
    broken(
        18,
        "an error while releasing is raised",
        (
            "core/guard.py",
            "except Exception as failure:  # noqa: BLE001 - the user",
            "except MemoryError as failure:  # the user",
        ),
    ),
    broken(
        19,
        "a lease has no end",
        (
            ACQUIRE,
            "redis.call('PEXPIRE', key, lease_ms + keep_ms)\n  return {'lease'",
            "return {'lease'",
        ),
    ),
    broken(19, "a settled record has no end", (SETTLE, "redis.call('PEXPIRE', key, ttl_ms)", "")),
    broken(
        20,
        "fences are counted in the record",
        (ACQUIRE, "math.max(now, (fence or 0) + 1)", "(fence or 0) + 1"),
        (ACQUIRE, "return grant(string.format('%.0f', now), '0'", "return grant('1', '0'"),
    ),
    broken(
        20,
        "numbers lose digits",
        (ACQUIRE, "fence = string.format('%.0f', math", "fence = tostring(math"),
        (ACQUIRE, "return grant(string.format('%.0f', now)", "return grant(tostring(now)"),
    ),
    broken(
        21,
        "a waiter that gives up tidies up",
        (
            "core/guard.py",
            "                    return _busy_with(found.record)\n",
            "                    self.store.delete(found.record.key)\n"
            "                    return _busy_with(found.record)\n",
        ),
    ),
    broken(
        22,
        "look first and then claim",
        (
            "core/guard.py",
            "            try:\n                found = self._request(delivery)\n",
            "            looked = self.store.get(delivery.claim.key)\n"
            "            if looked is not None and looked.state.value == 'completed':\n"
            "                return Refusal(Verdict.COMPLETED, looked)\n"
            "            try:\n                found = self._request(delivery)\n",
        ),
        (
            ACQUIRE,
            "if settled then\n  return reply(state)\nend",
            "if settled then\n  released = true\nend",
        ),
    ),
    broken(
        23,
        "every copy is alike",
        (
            ACQUIRE,
            "if mark < last_attempt or mark < arrived or (mark == arrived and token ~= last_token) then",
            "if false then",
        ),
    ),
    broken(
        24,
        "any retry overtakes",
        (ACQUIRE, "running and sender ~= '' and sender == last_owner", "running and sender ~= ''"),
    ),
    broken(
        24,
        "what a zombie raises is stored",
        (
            "core/guard.py",
            "if (recorded or not self.policy.result_ttl) and not isinstance(error, LeaseLost):",
            "if True:",
        ),
    ),
    broken(
        25,
        "the subclass decides",
        ("celery/task.py", 'if getattr(cls.__call__, "guard", None) is not cls.__call__:', "if False:"),
    ),
    broken(
        26,
        "an owner in the message counts",
        (
            "celery/request.py",
            "self._owner = new_owner()",
            'self._owner = (self._request_dict.get(DELIVERY_ENTRY) or {}).get("owner") or new_owner()',
        ),
    ),
    broken(
        26,
        "what is ours stays in the request",
        ("celery/message.py", "headers.pop(name, None)", "headers.get(name)"),
    ),
]


def shown_by() -> dict[int, list[tuple[str, str]]]:
    """Return the tests of each fault, as file below `tests/gauntlet` and name, read from their marks."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests/gauntlet").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    found.setdefault(ast.literal_eval(mark.args[0]), []).append((path.name, node.name))
    return found
