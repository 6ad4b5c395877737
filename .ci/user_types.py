"""Check `tests/typing` as users' type checkers see it: mypy and pyright with celery-types, and pyright without.

``mypy --strict``, by pyproject.toml, is mypy without.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

PYRIGHT = [sys.executable, "-m", "pyright"]
WITH = [
    [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "tests/typing/mypy.ini",
        "--cache-dir",
        ".mypy_cache/with_celery_types",
    ],
    [*PYRIGHT, "--pythonpath", sys.executable],
]


def without_stubs(folder: Path) -> Path:
    """Make an environment like this one, less what is there for type checkers alone; return its Python."""
    venv.create(folder, symlinks=True)
    names = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv" if "venv" in sysconfig.get_scheme_names() else None, names))
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for each in Path(path).iterdir():
            if not each.name.endswith("-stubs") and not (own / each.name).exists():
                (own / each.name).symlink_to(each)
    return folder / "bin" / "python"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        python = without_stubs(Path(folder))
        without = [*PYRIGHT, "--project", "tests/typing/without_celery_types.json", "--pythonpath", str(python)]
        running = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in [*WITH, without]]
        for process in running:
            print(*process.args, process.communicate()[0], sep=" ", end="")
    return int(any(process.returncode for process in running))


if __name__ == "__main__":
    sys.exit(main())
