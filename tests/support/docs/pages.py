"""The pages that people read, and the blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "docs/**/*.md")
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)

#: Run by the tests, and the rest: shown only.
PYTHON, SESSION = "python", "pycon"
SHOWN = {"console", "text", "ini", "yaml"}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


def pages() -> list[str]:
    """Return the pages, as paths below the root."""
    found = {path for pattern in PAGES for path in ROOT.glob(pattern) if "_build" not in path.parts}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, without those that are directives of Sphinx."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language = match["language"].strip()
        if not language.startswith("{"):
            yield Block(page, text.count("\n", 0, match.start()) + 2, language, match["text"])
