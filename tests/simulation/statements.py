"""Schedules in which threads take turns between any two statements of the library, and not only at its steps.

`python -m tests.simulation.statements --only threads --runs 2000` takes the options of `python -m tests.simulation`.
While a thread waits in mid-function, others run and nothing else happens. Neither greenlets nor event loops are
interrupted so.
"""

from __future__ import annotations

import ast
import builtins
import sys
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from greenlet import getcurrent

from .world import Process, World

PACKAGE = "celery_idempotent."
#: What a store does is one step of its server.
WHOLE = (f"{PACKAGE}stores", f"{PACKAGE}errors", f"{PACKAGE}units")
#: How many statements a thread may run before others do: 0 for all up to its next step.
STATEMENTS = (0, 0, *range(1, 10), *range(10, 120, 5))
#: What a law does where the library calls it, or before a body begins: it looks at one moment.
LOOKS = (
    *("asks", "watch", "told", "emitted", "published", "released", "stored"),
    *("check_turn", "check_lease", "check_claim", "check_answer", "robbed", "trusted"),
)


class Dividing(ast.NodeTransformer):
    """Put a call of `between` before each statement of a function."""

    def _divided(self, body: list[ast.stmt]) -> list[ast.stmt]:
        divided: list[ast.stmt] = []
        for statement in body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not isinstance(statement, ast.Global | ast.Nonlocal):
                call = ast.Expr(ast.Call(ast.Name("__between__", ast.Load()), [], []))
                divided.append(ast.fix_missing_locations(ast.copy_location(call, statement)))
            divided.append(statement)
        return divided

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        """Divide a function, with the blocks in it."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(inner, ast.ClassDef):
                for block in ("body", "orelse", "finalbody"):
                    if getattr(inner, block, None):
                        setattr(inner, block, self._divided(getattr(inner, block)))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast looks for


class Loader(SourceFileLoader):
    """Load a module whose functions are divided."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile its source."""
        path = self.get_filename(fullname)
        code: CodeType = compile(Dividing().visit(ast.parse(self.get_data(path), path)), path, "exec")
        return code


class Finder(MetaPathFinder):
    """Find the library's modules, but for those whose functions stay whole."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how such a module is loaded."""
        if not fullname.startswith(PACKAGE) or fullname.startswith(WHOLE):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(fullname, spec.loader.path)
        return spec


def between() -> None:
    """Let others go first, perhaps, before the next statement."""
    try:
        process = getcurrent()
    except RuntimeError:  # it is being collected
        return
    if isinstance(process, Process) and process.statements:
        process.statements -= 1
        if not process.statements and not process.killed and _get_running_loop() is None:
            process.world.step_between()


def statements_of(process: Process) -> int:
    """Return how many statements a process may run before others do."""
    if getattr(getattr(process.host.whole, "pool", None), "is_green", False):
        return 0
    return process.world.choices.one_of(f"statements of {process.name}", STATEMENTS)


def at_once(look: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of a law look at one moment, whichever part of the library it asks."""

    @wraps(look)
    def looking(*args: Any, **options: Any) -> Any:
        process = getcurrent()
        left, process.statements = getattr(process, "statements", 0), 0
        try:
            return look(*args, **options)
        finally:
            process.statements = left

    return looking


def divide() -> None:
    """Have the library's functions divided, which nothing may have imported yet."""
    known = [name for name in sys.modules if name.startswith(PACKAGE)]
    assert not known, f"expected to divide the library before it is imported, got {known}"
    builtins.__between__ = between  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Finder())
    World.statements_of, World.divided = staticmethod(statements_of), True
    from .kinds import KINDS  # the library is imported here

    for law in {each for kind in KINDS.values() for each in kind.__mro__}:
        for name in set(LOOKS) & set(vars(law)):
            setattr(law, name, at_once(getattr(law, name)))


if __name__ == "__main__":
    divide()
    from .__main__ import main

    raise SystemExit(main())
