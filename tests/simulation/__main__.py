"""Run schedules: `python -m tests.simulation --seed 7 --verbose`, or `--runs 20000`."""

from __future__ import annotations

import argparse
import time

from .celery import WORKERS, Simulation, make_app, simulated_clock
from .law import Broken, Law


def main() -> int:
    """Run one schedule or many; returns 1 if one breaks the law."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    parser.add_argument("--stop", action="store_true", help="end at the first that breaks the law")
    options = parser.parse_args()
    apps = [make_app(f"app-{number}") for number in range(WORKERS + 1)]
    began, broken, steps = time.process_time(), 0, 0
    with Law() as law, simulated_clock():
        for seed in range(options.seed, options.seed + options.runs):
            simulation = Simulation(seed, law, apps, print if options.verbose else None)
            try:
                simulation.run()
            except Broken as why:
                broken += 1
                print(f"seed {seed}: {why}")
                if options.stop:
                    break
            steps += simulation.world.steps
    took = time.process_time() - began
    rate = options.runs / took
    print(f"{options.runs} schedules, {steps} steps, {rate:.0f} a second; {broken} broken; {dict(law.counts)}")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
