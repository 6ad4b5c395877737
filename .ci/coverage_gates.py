"""Fail where a module is covered less than promised: all branches of the core, 95 % of everything else.

python .ci/coverage_gates.py [--core] coverage.json

With --core, the rest is not looked at.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path, PurePath

CORE = {f"core/{name}.py" for name in ("guard", "heartbeat", "keys", "policy", "results")}
CORE |= {"stores/base.py"}
REST_PERCENT = 95.0
# What can be covered only with a server that `.ci/run` says is there.
NEEDS = {"celery/message.py": "rabbitmq"}


def shortfalls(report: dict, core_alone: bool) -> list[str]:
    found, seen = [], set()
    for name, data in sorted(report["files"].items()):
        parts = PurePath(name).parts
        module = PurePath(*parts[parts.index("celery_idempotent") + 1 :]).as_posix()
        seen.add(module)
        if core_alone and module not in CORE:
            continue
        if NEEDS.get(module, "") not in ("", *os.environ.get("CI_PROMISES", "").split()):
            continue
        percent = data["summary"]["percent_covered"]
        wanted = 100.0 if module in CORE else REST_PERCENT
        if percent < wanted:
            lines = ", ".join(map(str, data["missing_lines"])) or "none"
            branches = ", ".join(f"{start}->{end}" for start, end in data.get("missing_branches", [])) or "none"
            found.append(f"{module}: {percent:.1f} %, wanted {wanted:g} %; lines {lines}; branches {branches}")
    return [*found, *(f"{module}: not measured" for module in sorted(CORE - seen))]


def main(*options: str, path: str) -> int:
    found = shortfalls(json.loads(Path(path).read_text()), "--core" in options)
    for line in found:
        print(f"coverage gate: {line}")
    print("coverage gates: " + (f"{len(found)} modules below" if found else "all modules reach them"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:-1], path=sys.argv[-1]))
