"""Print the mutants that survived, and how many of which kind there were: `survivors.py SESSION.sqlite`."""

from __future__ import annotations

import sys
from collections import Counter

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome


def main(session: str) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    with use_db(session, WorkDB.Mode.open) as db:
        for item, result in db.completed_work_items:
            [mutation] = item.mutations
            counts[mutation.module_path.name, str(result.test_outcome)] += 1
            if result.test_outcome == TestOutcome.SURVIVED:
                print(mutation.module_path, mutation.start_pos, mutation.operator_name, mutation.occurrence)
                print(result.diff)
    for (module, outcome), count in sorted(counts.items()):
        print(f"{module}: {outcome} {count}")


main(sys.argv[1])
