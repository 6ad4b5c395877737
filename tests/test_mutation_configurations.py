"""Each configuration of mutation testing names tests: a command that finds none would count every mutant as killed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURATIONS = sorted((ROOT / ".ci" / "mutation").glob("*.toml"))
LINE = re.compile(r'^test-command = "(.*)"$', re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_the_command_of_a_configuration_finds_tests(path: Path) -> None:
    [line] = LINE.findall(path.read_text(encoding="utf-8"))
    command = [sys.executable if word == "python" else word for word in shlex.split(line.replace('\\"', '"'))]
    done = subprocess.run([*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_configurations() -> None:
    assert [path.stem for path in CONFIGURATIONS] == ["core", "redis", "rules"]
