"""Prometheus's own checker of rules."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.servers import ServerMissing

__all__ = ["check_rules", "promtool", "verify_rules"]


def promtool() -> str:
    """Return the path of promtool.

    Raises:
        ServerMissing: it is not installed.
    """
    found = shutil.which("promtool")
    if found is None:
        raise ServerMissing("There is no promtool. Install it: apt install prometheus, or from https://prometheus.io.")
    return found


def check_rules(path: Path) -> None:
    """Assert that a file of rules is what Prometheus would load."""
    _run("check", "rules", str(path))


def verify_rules(rules: Path, directory: Path, *tests: dict[str, Any]) -> None:
    """Assert what alerts do, as promtool's unit tests say it."""
    path = directory / "tests.yml"  # JSON is YAML
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": list(tests)}))
    _run("test", "rules", str(path))


def _run(*arguments: str) -> None:
    run = subprocess.run([promtool(), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
