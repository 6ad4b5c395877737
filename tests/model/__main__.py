"""Look at all states of the protocol: `python -m tests.model`, or with `--large`."""

from __future__ import annotations

import argparse
import resource
from dataclasses import replace

from .breaks import BREAKS, run_without
from .programs import real_code
from .protocol import Configuration
from .search import Found, Search
from .stories import story, written

#: Without time, and with one message that is delivered twice: copies meet each other.
COPIES = {
    "copies": Configuration(
        "AB", faults=1, raises=0, retries=0, ghosts=False, kills=False, lost_replies=False, unmarked=True, ticks=False
    )
}
#: What each run of the tests looks at.
SMALL = {
    "one message": Configuration("A", faults=0),
    "two calls": Configuration("AB", faults=2, checks=True, broker=True, depth=7),
    **COPIES,
}
MIDDLE = {
    "one message, to its end": Configuration("A", faults=1),
    "two calls, to their end": Configuration("AB", faults=0),
}
LARGE = {"three messages": Configuration("AAB", faults=4, checks=True, broker=True, depth=12)}
DATA_LOSS = {"data loss": Configuration("AB", faults=2, data_loss=True, operator=True, states=1_000_000)}
CALLBACKS = {"callbacks": Configuration("AA", faults=2, raises=0, retries=0, callbacks=True, states=1_000_000)}
#: In which of them what is broken is looked for, one after another.
BROKEN = {
    **COPIES,
    "a call that is published twice": Configuration("AA", faults=2, states=60_000),
    "two calls": Configuration("AB", faults=2, checks=True, broker=True, states=250_000),
    "data loss": Configuration("AB", faults=1, retries=0, raises=0, data_loss=True, states=60_000),
    "callbacks": Configuration("A", faults=2, raises=0, retries=0, callbacks=True, states=60_000),
    "crashes": Configuration("AB", faults=3, retries=0, redeliveries=False, lost_replies=False, states=150_000),
}


def look(name: str, configuration: Configuration, *, verbose: bool) -> Found:
    """Search a configuration, and print what was found."""
    with real_code():
        found = Search(configuration, print if verbose else lambda line: None).run()
    extent = "all of them" if found.complete else "not all"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / 1024
    print(
        f"{name}: {found.states} states ({extent}; {found.cores} without what was counted), {found.transitions} "
        f"transitions, {found.depth} events deep, {found.ends} ends, at most {found.most_messages} messages; "
        f"{found.seconds:.0f} s, {memory:.1f} GiB"
    )
    if found.broken:
        print(f"BROKEN: {found.broken}")
        print("\n".join(story(configuration, found.path)))
        print(f"replay({written(configuration, found.path)!r})")
    return found


def main() -> int:
    """Look at some configurations; returns 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--large", action="store_true", help="the large configuration")
    parser.add_argument("--data-loss", action="store_true", help="the store loses the record, an operator releases it")
    parser.add_argument("--callbacks", action="store_true", help="the tasks have callbacks")
    parser.add_argument("--broken", action="store_true", help="what breaks are looked for in")
    parser.add_argument("--middle", action="store_true", help="small configurations, to their ends")
    parser.add_argument("--states", type=int, help="how many states to stop at")
    parser.add_argument("--depth", type=int, help="how many events to stop at")
    parser.add_argument("--without", choices=BREAKS, metavar="BREAK", help="without a line that protects")
    parser.add_argument("--verbose", action="store_true", help="print each depth")
    options = parser.parse_args()
    if options.without:
        return run_without(options.without)
    chosen = [(options.large, LARGE), (options.data_loss, DATA_LOSS), (options.callbacks, CALLBACKS)]
    chosen += [(options.broken, BROKEN), (options.middle, MIDDLE)]
    configurations = next((each for wanted, each in chosen if wanted), SMALL)
    for name, configuration in configurations.items():
        if options.states:
            configuration = replace(configuration, states=options.states)
        if options.depth:
            configuration = replace(configuration, depth=options.depth)
        if look(name, configuration, verbose=options.verbose).broken:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
