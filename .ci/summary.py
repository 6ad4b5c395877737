"""Sum the JUnit files of several pytest sessions up, and close as pytest does: one line a session, and one for all."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def tally(path: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        value = {key: float(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped", "time")}
        counts["failed"] += int(value["failures"])
        counts["errors"] += int(value["errors"])
        counts["skipped"] += int(value["skipped"])
        counts["passed"] += int(value["tests"] - value["failures"] - value["errors"] - value["skipped"])
        counts["seconds"] += int(value["time"])
    return counts


def text(counts: Counter[str]) -> str:
    parts = [f"{counts[key]} {key}" for key in ("failed", "passed", "skipped", "errors") if counts[key]]
    return f"{', '.join(parts) or 'no tests ran'} in {counts['seconds']}s"


def main(folder: Path) -> None:
    total: Counter[str] = Counter()
    for path in sorted(folder.glob("*.xml")):
        counts = tally(path)
        total.update(counts)
        print(f"{path.stem}: {text(counts)}")
    print(f" {text(total)} ".center(80, "="))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
