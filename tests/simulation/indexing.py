"""A task that is not published while a message waits: it indexes documents, which change before each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from greenlet import getcurrent

from celery_idempotent.errors import AlreadyPublished
from celery_idempotent.stores import Lease

from .celery import EPOCH, WHILE, Host
from .law import Law
from .world import Process, Step

DOCUMENTS = ("DOC-1", "DOC-2")
PUBLISHERS = 2
#: Of calls, in seconds: how long none comes after the last, how long the first waits at most, how often one runs.
DEBOUNCE, MAX_WAIT, PERIOD = 4, 5, 6
#: What calls may say.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"key": "document"},
    {"key": "document", "until": "done"},
    {"key": "document", "on_duplicate": "raise"},
    {"key": "document", "on_duplicate": "replace"},
    {"key": "document", "debounce": DEBOUNCE, "max_wait": MAX_WAIT},
    {"key": "document", "throttle": PERIOD},
)


@dataclass(eq=False)
class Call:
    """A call that a publisher makes, after it has changed the document."""

    document: str
    version: int
    options: dict[str, Any]
    countdown: float = 0.0
    #: when it was made and when it had returned
    made: float = 0.0
    returned: float = 0.0
    #: how many bodies of the document had begun, and ended, when it was made
    begun: int = 0
    ended: int = 0
    #: when it was made and when it returned, counted over all calls
    since: int = 0
    until: int = 0
    #: published, skipped; refused, where its publisher knows
    outcome: str = ""
    #: the message that it published
    task_id: str = ""


class Publisher(Host):
    """A process that makes calls, one after another."""

    def __init__(self, name: str, law: Indexing) -> None:
        super().__init__(name)
        self.law = law
        self.process: Any = None

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        if self.process is not None and not self.process.dead:
            yield from (("killed", 0.3), ("child stopped", 0.4), ("cut off from the store", 0.2), ("slow store", 0.2))

    def kill(self, _: float) -> None:
        world = self.law.world
        world.tell(f"{self.name}: killed")
        for process in [process for process in world.processes if process.host is self]:
            world.kill(process)
        self.process, self.stopped_until = None, 0.0
        self.new_process()


class Indexing(Law):
    """A call is only skipped if a message that has yet to do its work exists."""

    kind = "unique"
    pools = ("prefork", "prefork", "threads", "greenlets")

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        choices = self.choices
        self.publishers = [Publisher(f"publisher-{number}", self) for number in range(1, PUBLISHERS + 1)]
        #: whether nothing happens, and all calls are alike, so that none is to be published beside another
        plain = choices.one_of("plain", [False, False, False, True])
        if plain:
            simulation.calm_down()
        self.options = options = choices.one_of("options", OPTIONS[:3] if plain else OPTIONS)
        self.raises, self.retries = choices.one_of("raises", [0, 0, 0.2]), choices.one_of("retries", [0, 0, 0.3])
        self.long = choices.one_of("takes", [[0], [0, 0, 1, 9], [0, 0, 1, 9]])
        #: whether the task calls itself, so many times
        self.again = choices.one_of("calls itself", [0, 0, 0, 2])
        documents = DOCUMENTS[: choices.one_of("documents", [1, 1, 2])]
        self.calls = [
            Call(choices.one_of("document", documents), 0, options, choices.one_of("countdown", [0.0, 0.0, 0.0, 5.0]))
            for _ in range(choices.one_of("calls", [2, 3, 4, 6]))
        ]
        if plain:
            self.raises = self.retries = self.again = 0
        if "debounce" in options or plain:
            for call in self.calls:
                call.countdown = 0.0
        self.made: list[Call] = []
        self.moments = 0
        #: by message: when it is due
        self.due: dict[str, float] = {}
        #: by process: the message whose body it runs
        self.bodies: dict[Any, str] = {}
        #: messages in whose deliveries a time limit rang
        self.cut_off: set[str] = set()
        self.versions: Counter[str] = Counter()
        #: by document: the versions with which bodies began and ended, in order
        self.begun: dict[str, list[int]] = {document: [] for document in DOCUMENTS}
        self.done: dict[str, list[int]] = {document: [] for document in DOCUMENTS}

    def hosts(self) -> list[Any]:
        return self.publishers

    def published(self, message: Any, process: Any) -> None:
        headers = message["headers"]
        if process.host in self.publishers:  # which has yet to confirm it
            self.simulation.ripen(process.host, "child stopped", factor=WHILE)
        if headers["retries"] or headers["idempotency"].get("copy"):
            return
        eta = datetime.fromisoformat(headers["eta"]) if headers.get("eta") else EPOCH
        self.due[headers["id"]] = (eta - EPOCH).total_seconds()

    def told(self, verb: str, args: Any, answer: Any, host: Any) -> None:
        if verb != "acquire" or not isinstance(answer, Lease):
            return
        if host in self.publishers:
            self.simulation.ripen(host, "killed", factor=WHILE)  # which has yet to publish
        else:
            self.simulation.ripen(host, "cut off from the store", factor=WHILE)  # which has yet to give its slot back

    def steps(self) -> list[Step]:
        if not self.calls:
            return []
        free = [each for each in self.publishers if each.process is None or each.process.dead]
        return [(f"{each.name} makes a call", 2.0, self._start, each) for each in free]

    def _start(self, publisher: Publisher) -> None:
        call = self.calls.pop(0)
        publisher.process = self.world.start(publisher, publisher.name, lambda: self.make(call))

    def make(self, call: Call) -> None:
        """Change a document, and call the task."""
        self.world.sleep(self.choices.one_of("before a call", [0.0, 0.0, 3.0, 20.0, 90.0]))
        self.versions[call.document] += 1
        call.version = self.versions[call.document]
        call.begun, call.ended = len(self.begun[call.document]), len(self.done[call.document])
        self.made.append(call)
        self.moments += 1
        call.since, call.made = self.moments, self.world.now
        self.counts["calls"] += 1
        options = {"countdown": call.countdown} if call.countdown else {}
        name = f"call of version {call.version} of {call.document}"
        self.world.tell(name)
        before = self.simulation.broker.published_by(getcurrent())
        confirmed = self.is_plain and not any(each.confirmations._owners for each in self.publishers)
        app = getattr(getcurrent().host, "app", self.simulation.producer)
        due = self.world.now + call.countdown
        try:
            found = app.tasks["index"].apply_async((call.document, call.version), unique=call.options, **options).id
        except AlreadyPublished as error:
            found, call.outcome = error.task_id, "skipped"
        except OSError:
            found, call.outcome = "", "refused"
        else:
            sent = self.simulation.broker.published_by(getcurrent()) > before
            call.outcome, call.task_id = ("published", found) if sent else ("skipped", "")
        call.returned = self.world.now
        if call.task_id and self.simulation.untroubled and not self.simulation.lossy:
            self.check_due(call)
        if call.outcome == "skipped":
            self.check_skipped(call, found, due)
        elif confirmed:
            self.check_published(call)
        self.moments += 1
        call.until = self.moments
        self.counts[call.outcome] += 1
        self.world.tell(f"{name}: {call.outcome}")

    def check_skipped(self, call: Call, task_id: str, due: float) -> None:
        """Check that the message for which a call was skipped is at least as good."""
        if task_id not in self.due:
            self.fail(f"version {call.version} of {call.document} was skipped for a message that nobody has published")
        if "throttle" not in call.options and self.due[task_id] > due + 0.1:
            self.fail(f"version {call.version} of {call.document} was skipped for a message that is due later")
        if self.bodies.get(getcurrent()) == task_id:
            self.fail(f"version {call.version} of {call.document} was skipped for the message whose body calls")

    def check_due(self, call: Call) -> None:
        """Check when a message is due that gathers calls, beside earlier ones to which nothing has happened either."""
        took, due = call.returned - call.made + 0.1, self.due_of(call)
        for other in self.made:
            if not (other.task_id and other.document == call.document and 0 < other.until < call.since):
                continue
            waits = other.begun == len(self.begun[call.document]) and call.returned < other.made + MAX_WAIT
            # An earlier call has it due sooner; it has waited for as long as it may, and runs beside the next.
            waits = waits and not self.due_of(other) <= min(call.returned, other.made + DEBOUNCE - 0.1)
            if waits and "debounce" in call.options and due > other.returned + MAX_WAIT + took:
                self.fail(f"version {call.version} of {call.document} has one wait for more than {MAX_WAIT} s")
            # One with a time of its own runs then, and begins a period for those that are called after that.
            gathered = "throttle" in call.options and not any(
                each.countdown and each.outcome != "skipped" for each in self.made if each.document == call.document
            )
            if gathered and due < self.due_of(other) + PERIOD - took:
                self.fail(f"version {call.version} of {call.document} is due within {PERIOD} s of another")

    def due_of(self, call: Call) -> float:
        """Return when the message of a call is due."""
        return max(self.due[call.task_id], call.made)

    def check_published(self, call: Call) -> None:
        """Check that a call was not published beside a message that would do, and that its publisher has confirmed."""
        running = [request for worker in self.simulation.workers for request in worker.requests]
        begun = {*self.bodies.values(), *(request.id for request in running)}
        for other in self.made:
            waits = other.task_id and other.task_id not in begun and other.until and other.until < call.since
            if waits and other.document == call.document and self.is_plain:
                self.fail(
                    f"version {call.version} of {call.document} was published beside {other.task_id}, which waits"
                )

    def body(self, task: Any, document: str, version: int) -> None:
        """The task: it reads the document as soon as it begins."""
        world, choices = self.world, self.choices
        self.begun[document].append(version)
        self.bodies[getcurrent()] = task.request.id
        self.counts["runs"] += 1
        world.sleep(choices.one_of(f"index {document}", self.long), f"{document} is indexed for version {version}")
        if choices.chance(f"{document}: raises", self.raises):
            raise ValueError("no")
        if task.request.retries < 3 and choices.chance(f"{document}: retries", self.retries):
            raise task.retry(countdown=choices.one_of(f"{document}: retries after", [0, 2, 8]))
        if self.again:
            self.again -= 1
            self.make(Call(document, 0, self.options))
        world.sleep(choices.one_of(f"index {document} too", self.long), f"{document} was indexed")

    def interrupted(self, process: Process) -> None:
        super().interrupted(process)
        self.cut_off.add(process.host.request.id)

    def killed(self, process: Process) -> None:
        super().killed(process)
        request, worker = process.host.request, process.host
        if worker.limiting and request.task.acks_on_timeout:  # it has failed, as all see who have its result
            document, version = request._args
            self.begun[document].append(version)
            self.done[document].append(version)

    def finished(self, request: Any, worker: Any) -> None:
        super().finished(request, worker)
        document, version = request._args
        if request.id in self.cut_off:  # it has failed, perhaps before its body began, as all see who have its result
            self.begun[document].append(version)
        if request.id in self.cut_off or request.id in self.bodies.values():
            self.done[document].append(version)

    def check(self) -> None:
        super().check()
        broker = self.simulation.broker
        if len(broker.queue) + len(broker.unacked) > 2 and self.is_plain:
            workers = self.simulation.workers
            answered = sum(len(worker.requests) + len(worker.hub) for worker in workers)  # or about to be
            there = len(broker.queue) + len(broker.unacked) - answered
            if there > 2 * len({call.document for call in self.made}):
                self.fail(f"{there} messages wait, and nothing has happened to any")

    @property
    def is_plain(self) -> bool:
        """Whether nothing has happened to any process or message, and all calls are alike."""
        simulation = self.simulation
        alike = not self.raises and not self.retries and not self.again
        undisturbed = simulation.untroubled and not simulation.lossy
        return (
            self.options in OPTIONS[:3]
            and alike
            and undisturbed
            and not any(call.countdown for call in self.made + self.calls)
        )

    def ended(self) -> None:
        super().ended()
        for call in self.made:
            if call.outcome not in ("published", "skipped"):
                continue
            after = self.begun[call.document][call.begun :]
            if call.options.get("until") == "done":
                after = after + self.done[call.document][call.ended :]
            if not after:
                self.fail(f"version {call.version} of {call.document} was {call.outcome}, and no body began after it")
            newest = "debounce" in call.options or call.options.get("on_duplicate") == "replace"
            older = {
                other.version
                for other in self.made
                if other.document == call.document and other.until and other.until < call.since
            }
            if newest and older.issuperset(after):
                self.fail(f"version {call.version} of {call.document} was {call.outcome}, and only older ones ran")
