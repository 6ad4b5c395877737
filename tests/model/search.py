"""Breadth-first over all states, and backwards from the ends."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from . import law
from .protocol import Change, Configuration, Core, Protocol, Tally, tasks_in

#: A state is a number: its core's, and its tally's in the lowest bits.
_BITS = 18
_MASK = (1 << _BITS) - 1


@dataclass
class Found:
    """What a search found out.

    Arguments:
        states, cores, transitions, depth: How many there are.
        seconds: How long it took.
        ends: How many states have nothing left to do.
        most_messages: How many messages there were at once, at most.
        complete: Whether every state was looked at.
        broken: What does not hold, or "".
        path: The events that lead there.
    """

    states: int = 0
    cores: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    ends: int = 0
    most_messages: int = 0
    complete: bool = True
    broken: str = ""
    path: list[str] = field(default_factory=list)


class Search:
    """Look at all states of a configuration.

    Arguments:
        configuration: The configuration.
        tell: Gets a line for each depth (default: nobody).
        start: A protocol, and where to start in it (default: where nothing has happened).
    """

    def __init__(
        self,
        configuration: Configuration,
        tell: Callable[[str], object] = lambda line: None,
        *,
        start: tuple[Protocol, Core, Tally] | None = None,
    ) -> None:
        self.configuration, self.tell = configuration, tell
        self.found = Found()
        if start is None:
            protocol = Protocol(configuration)
            start = (protocol, *protocol.start())
        self.protocol, core, tally = start
        self.everyone = frozenset(configuration.messages)
        self._cores: dict[Core, int] = {}
        #: the cores that were found, by number
        self.cores: list[Core] = []
        self._parts: dict[object, object] = {}
        self._tasks: list[frozenset[str]] = []
        self._counts: list[int] = []
        self._tallies: dict[Tally, int] = {}
        self._tally_list: list[Tally] = []
        self._changes: dict[Change, int] = {}
        self._change_list: list[Change] = []
        self._stills: list[bool] = []
        #: by core: what follows, as pairs of a core and a change; a core below 0 is a law that is broken
        self._following: list[tuple[int, ...] | None] = []
        #: by core: the same, by a fault
        self._faulty: list[tuple[int, ...] | None] = []
        self._laws: list[tuple[str, bool]] = []
        #: by tally: what follows from each change
        self._after: list[dict[int, int | str | None]] = []
        self._numbers: dict[int, int] = {}
        self._parents: array[int] = array("I")
        #: by state that was looked at: where its followers begin in the edges
        self._offsets, self._edges = array("Q"), array("I")
        #: by edge: whether no fault happens, no time passes and no body goes on
        self._still = bytearray()
        self._first = self._core(core) << _BITS | self._tally(tally)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _core(self, core: Core) -> int:
        number = self._cores.get(core)
        if number is None:
            share = self._parts.setdefault
            core = Core(
                share(core.row, core.row),
                share(core.workers, tuple(share(worker, worker) for worker in core.workers)),
                share(core.entries, tuple(share(entry, entry) for entry in core.entries)),
                share(core.ghosts, core.ghosts),
            )
            number = self._cores[core] = len(self.cores)
            self.cores.append(core)
            tasks = frozenset(tasks_in(core))
            self._tasks.append(share(tasks, tasks))
            self._counts.append(len(law.messages(core, self.protocol.points)))
            self._following.append(None)
            self._faulty.append(None)
        return number

    def _tally(self, tally: Tally) -> int:
        number = self._tallies.get(tally)
        if number is None:
            number = self._tallies[tally] = len(self._tally_list)
            assert number <= _MASK
            self._tally_list.append(tally)
            self._after.append({})
        return number

    def _change(self, change: Change) -> int:
        number = self._changes.get(change)
        if number is None:
            number = self._changes[change] = len(self._change_list)
            self._change_list.append(change)
            self._stills.append(not change.faults and not change.moves)
        return number

    def _follow(self, core: int, *, faults: bool) -> tuple[int, ...]:
        pairs: dict[tuple[int, int], None] = {}
        for event in self.protocol.events(self.cores[core], faults=faults):
            change = event.change
            if event.broken:
                self._laws.append((event.broken, event.excused))
                pairs[-len(self._laws), self._change(change)] = None
                if not event.excused:
                    continue
                change = change._replace(excused=True)
            assert event.core is not None
            pairs[self._core(event.core), self._change(change)] = None
        found = tuple(number for pair in pairs for number in pair)
        (self._faulty if faults else self._following)[core] = found
        return found

    def _steps(self, core: int, tally: int) -> tuple[int, ...]:
        """Return what follows from a state, as `_following` has it."""
        steps = self._following[core]
        if steps is None:
            steps = self._follow(core, faults=False)
        if self._tally_list[tally].faults:
            faulty = self._faulty[core]
            steps += self._follow(core, faults=True) if faulty is None else faulty
        return steps

    # -- the search ----------------------------------------------------------------------------------------------------

    def run(self) -> Found:
        """Search until something is broken, or every state was seen."""
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # nothing here is a circle, and to look for some takes half of the time
        try:
            self._breadth_first()
        finally:
            if collecting:
                gc.enable()
        self.found.seconds = time.process_time() - began
        self.found.cores = len(self.cores)
        return self.found

    def _breadth_first(self) -> None:  # noqa: C901 - a call for each transition takes as long as all the rest
        found, limit, depth = self.found, self.configuration.states, self.configuration.depth
        numbers, parents, after = self._numbers, self._parents, self._after
        tallies, counts = self._tally_list, self._counts
        numbers[self._first] = 0
        parents.append(0)
        frontier = [self._first]
        offsets, edges, still, stills = self._offsets, self._edges, self._still, self._stills
        while frontier:
            if (depth is not None and found.depth >= depth) or (limit is not None and len(numbers) >= limit):
                found.complete = False
                break
            beyond: list[int] = []
            for state in frontier:
                core, tally = state >> _BITS, state & _MASK
                mine = numbers[state]
                offsets.append(len(edges))
                steps = self._steps(core, tally)
                known = after[tally]
                for at in range(0, len(steps), 2):
                    next_core, change = steps[at], steps[at + 1]
                    next_tally = known[change] if change in known else self._tally_after(tally, change)
                    if next_tally is None:
                        continue
                    if next_tally.__class__ is str:
                        self._break(str(next_tally), state, at)
                        return
                    if next_core < 0:
                        why, excused = self._laws[-next_core - 1]
                        if excused and tallies[next_tally].meddled:
                            continue
                        self._break(why, state, at)
                        return
                    new = next_core << _BITS | next_tally
                    number = numbers.get(new)
                    if number is None:
                        number = numbers[new] = len(parents)
                        parents.append(mine)
                        beyond.append(new)
                        if counts[next_core] > found.most_messages:
                            found.most_messages = counts[next_core]
                        why = self._wrong(next_core, next_tally)
                        if why:
                            self._break(why, state, at)
                            return
                    edges.append(number)
                    still.append(stills[change])
            frontier = beyond
            found.depth += bool(beyond)
            self.tell(f"{found.depth:4} {len(beyond):10} {len(numbers):10} states {len(self.cores):9} cores")
        found.states, found.transitions = len(numbers), len(edges)
        offsets.append(len(edges))
        self._backwards(len(offsets) - 1)

    def _wrong(self, core: int, tally: int) -> str:
        """Return what is wrong in a state, beside what is wrong in its core."""
        now, given, tasks = self._tally_list[tally], self.configuration, self._tasks[core]
        if len(tasks) < len(self.everyone) and tasks | {task for task, _ in now.answers} < self.everyone:
            return "a message is lost"
        # One for each publish, for each retry and for each fault.
        bound = len(given.messages) + (given.retries - now.retries) + (given.faults - now.faults)
        return "messages multiply" if self._counts[core] > bound else ""

    def _tally_after(self, tally: int, change: int) -> int | str | None:
        after = self._tally_list[tally].after(self._change_list[change])
        number = self._tally(after) if isinstance(after, Tally) else after
        self._after[tally][change] = number
        return number

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _backwards(self, expanded: int) -> None:
        """Check what must be reachable from every state.

        An end, where nothing is left to do (and all were answered, or a message would be lost). And while one body
        runs, without its help, a state in which all copies of one message have become one.
        """
        cores = array("I", (state >> _BITS for state in self._numbers))
        ends = [is_end(core) for core in self.cores]
        self.found.ends = sum(ends[core] for core in cores[:expanded])
        stuck = self._cut_off(cores, expanded, ends, bytes([1]) * len(self._edges))
        if stuck is not None:
            self.found.broken, self.found.path = "no end can be reached any more", self._path(stuck)
            return
        converged = [law.converged(core, self.protocol.points) for core in self.cores]
        stuck = self._cut_off(cores, expanded, converged, self._still)
        if stuck is not None:
            self.found.broken, self.found.path = "copies of one message do not become one", self._path(stuck)

    def _cut_off(self, cores: array[int], expanded: int, goals: list[bool], allowed: bytes | bytearray) -> int | None:
        """Return the first state from which no goal can be reached by the edges that are allowed, or None."""
        good = bytearray(number >= expanded or goals[core] for number, core in enumerate(cores))
        offsets, edges = self._offsets, self._edges
        left = array("I", (number for number in range(expanded - 1, -1, -1) if not good[number]))
        while left:
            still_left = array("I")
            for number in left:
                for at in range(offsets[number], offsets[number + 1]):
                    if good[edges[at]] and allowed[at]:
                        good[number] = 1
                        break
                else:
                    still_left.append(number)
            if len(still_left) == len(left):
                return left[-1]
            left = still_left
        return None

    # -- what happened -------------------------------------------------------------------------------------------------

    def _break(self, why: str, state: int, at: int) -> None:
        self.found.broken = why
        self.found.path = self._path(self._numbers[state])
        self.found.states, self.found.transitions = len(self._numbers), len(self._edges)
        steps = self._steps(state >> _BITS, state & _MASK)
        wanted = steps[at], steps[at + 1]
        self.found.path.append(self._label(state >> _BITS, wanted))

    def _label(self, core: int, wanted: tuple[int, int]) -> str:
        found = self.protocol.events
        for event in [*found(self.cores[core], faults=False), *found(self.cores[core], faults=True)]:
            change = event.change._replace(excused=wanted[0] >= 0 and bool(event.broken))
            if self._change(change) != wanted[1]:
                continue
            if wanted[0] < 0 and event.broken == self._laws[-wanted[0] - 1][0]:
                return event.label
            if wanted[0] >= 0 and event.core == self.cores[wanted[0]]:
                return event.label
        raise AssertionError("the event that was found is gone")

    def _path(self, number: int) -> list[str]:
        states = list(self._numbers)
        chain = [number]
        while chain[-1]:
            chain.append(self._parents[chain[-1]])
        chain.reverse()
        labels = []
        for before, after in pairwise(chain):
            core, tally = states[before] >> _BITS, states[before] & _MASK
            steps = self._steps(core, tally)
            for at in range(0, len(steps), 2):
                if (
                    steps[at] == states[after] >> _BITS
                    and self._after[tally].get(steps[at + 1]) == states[after] & _MASK
                ):
                    labels.append(self._label(core, (steps[at], steps[at + 1])))
                    break
        return labels


def is_end(core: Core) -> bool:
    """Return whether nothing is left to do."""
    return not core.workers and not core.entries
