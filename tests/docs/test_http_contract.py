"""What the guide on testing has its readers write for an HTTP application is a test that passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.pages import blocks
from tests.support.servers import free_port


@pytest.mark.nightly
def test_the_application_on_the_page_passes_the_contract(tmp_path: Path) -> None:
    [block] = [each for each in blocks("docs/guides/testing.md") if "HttpContract" in each.text]
    text = block.text.replace("8123", str(free_port()))
    (tmp_path / "test_shop.py").write_text(f"import pytest\n{text}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_shop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout[-5000:]
    counted = re.search(r"(\d+) passed, 2 skipped", done.stdout)  # without other credentials of a caller
    assert counted is not None, done.stdout
    assert int(counted[1]) > 80
