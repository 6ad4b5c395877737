"""Check the installed wheel, and lay the tests beside it, away from the source tree.

python .ci/package.py SOURCE_TREE EMPTY_DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path


def main(root: Path, here: Path) -> None:
    import celery_idempotent

    installed = Path(celery_idempotent.__file__).parent
    assert not installed.is_relative_to(root / "celery_idempotent"), f"{installed} is the source tree, not the wheel"
    assert "site-packages" in installed.parts, f"{installed} is not where pip installs"

    source = root / "celery_idempotent"
    kinds = {".py", ".lua", ".sql", ".typed", ".html", ".css", ".svg"}
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.suffix in kinds}
    missing = sorted(str(path) for path in wanted if not (installed / path).is_file())
    assert not missing, f"the wheel lacks {missing}"
    assert (installed / "py.typed").is_file(), "the wheel lacks py.typed"

    entry_points = distribution("celery-idempotent").entry_points
    for entry_point in entry_points:
        entry_point.load()
    assert "celery-idempotent" in entry_points.names, f"the wheel has no command: {entry_points}"

    for name in ("tests", "pyproject.toml"):
        target = here / name
        if target.is_dir():
            shutil.rmtree(target)
        if (root / name).is_dir():
            shutil.copytree(root / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, target)
    print(f"wheel: {len(wanted)} files, {len(entry_points)} entry point(s), in {installed}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
