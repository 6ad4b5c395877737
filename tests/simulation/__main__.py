"""Run schedules: `python -m tests.simulation --seed 7 --verbose`, or `--runs 20000`.

`--seed 7 --shrink FILE` looks for a shorter schedule that breaks the law too, and writes it; `--replay FILE` tells it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .celery import WORKERS, Simulation, make_app, simulated_clock
from .kinds import KINDS, Laws
from .law import Broken, Law, Unended
from .shrink import Breaking, shrink, size
from .world import Choices, Schedule

#: The exit code where no schedule breaks the law, and one has not come to its end.
UNENDED = 3


def main() -> int:
    """Run one schedule or many; returns 1 if one breaks the law, else `UNENDED` if one has not come to its end."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    parser.add_argument("--stop", action="store_true", help="end at the first that breaks the law")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="write a shorter schedule that breaks the law")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the schedule in a file, and print each step")
    parser.add_argument("--only", choices=KINDS, help="have each seed be a schedule of this kind")
    options = parser.parse_args()
    apps, laws = [make_app() for _ in range(WORKERS + 1)], Laws()
    with simulated_clock():
        if options.replay:
            schedule = Schedule(**json.loads(options.replay.read_text(encoding="utf-8")))
            return _tell(Simulation(Choices(0, schedule), laws.of(0, schedule.kind), apps, print))
        if options.shrink:
            return _shrink(options.seed, laws.of(options.seed, options.only), apps, options.shrink)
        return _run(options, laws, apps)


def _run(options: Any, laws: Laws, apps: list[Any]) -> int:
    began, broken, unended, steps, runs = time.process_time(), 0, 0, 0, 0
    for seed in range(options.seed, options.seed + options.runs):
        law, runs = laws.of(seed, options.only), runs + 1
        simulation = Simulation(Choices(seed), law, apps, print if options.verbose else None)
        try:
            simulation.run()
        except Broken as why:
            broken += 1
            print(f"seed {seed}: {why}")
            if options.stop:
                break
        except Unended as why:
            unended += 1
            print(f"seed {seed} is {why}")
        steps += simulation.world.steps
    rate = runs / (time.process_time() - began)
    print(f"{runs} schedules, {steps} steps, {rate:.0f} a second; {broken} broken; {dict(laws.counts)}")
    return 1 if broken else UNENDED if unended else 0


def _tell(simulation: Simulation) -> int:
    try:
        simulation.run()
    except Broken:
        return 1
    except Unended:
        return UNENDED
    return 0


def _shrink(seed: int, law: Law, apps: list[Any], file: Path) -> int:
    breaking = Breaking(law, apps)
    found = breaking(Choices(seed, record=True))
    if found is None:
        print(f"seed {seed} does not break the law")
        return 0
    shorter = shrink(found, lambda schedule: breaking(Choices(0, schedule, record=True)))
    file.write_text(json.dumps(asdict(shorter), indent=1), encoding="utf-8")
    print(f"{size(found)} choices, and {size(shorter)} do: python -m tests.simulation --replay {file}")
    return _tell(Simulation(Choices(0, shorter), law, apps, print))


if __name__ == "__main__":
    raise SystemExit(main())
