"""Clients that send a request again until it is answered, to servers of WSGI: the middleware for that, or Django's."""

from __future__ import annotations

import gc
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent

from celery_idempotent import current_lease
from celery_idempotent.core import guard
from celery_idempotent.events import CrashLooped, LeaseLost, ReleaseFailed, SettleFailed
from celery_idempotent.http.wsgi import IdempotencyMiddleware
from celery_idempotent.stores import Lease, State

from .celery import LEASE_TTL, MAX_CRASHES, STEADY, Host, HostStore, OfHost, simulated
from .django import Database, Site
from .law import Law
from .world import Process, Step

SERVERS = 2
#: How often a client sends its request, and for how many seconds it waits for the answer.
TRIES, PATIENCE = 40, 12.0
#: How often one sends what kills its servers: others may be told of its crash loops.
TRIES_OF_DEADLY = 60
#: For how many seconds a server's supervisor waits for the end of what it has aborted.
GRACE = 20.0
#: For how long a response that is complete waits until it is recorded.
SETTLE_TIMEOUT = 5.0


@dataclass(eq=False)
class Run:
    """A request that the application carries out."""

    key: str
    held: Any
    process: Any
    number: int
    #: how often the store had failed its server when it began
    failures: int
    server: Any
    ending: str = ""
    excused: bool = False
    #: when it returned, and how often the store had failed then
    returned: tuple[float, int] = (0.0, -1)
    #: whether its server waits for it no longer, and has given its lease back
    cut_off: bool = False


class Server(Host):
    """A server of several threads."""

    def __init__(self, name: str, law: Requests) -> None:
        super().__init__(name)
        self.law = law
        self.threads: list[Any] = []
        #: runs whose leases are looked at once it has nothing left to do
        self.unchecked: list[Run] = []
        #: whether its process ends at its next step
        self.ends = False
        #: a thread in which its process is being ended
        self.aborted: Any = None

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        self.threads = [thread for thread in self.threads if not thread.dead]
        if self.threads:
            yield from (("killed", 0.3), ("child stopped", 0.4), ("cut off from the store", 0.2), ("slow store", 0.2))
            yield from self.endings()

    def endings(self) -> Iterator[tuple[str, float]]:
        """Return how it may be ended that is not killed: if it has one thread, by what its signal raises there."""
        if len(self.threads) == 1 and self.aborted is None:
            yield ("aborted", 0.2)

    def suffer(self, kind: str) -> None:
        """End: a signal raises SystemExit in what the process does."""
        self.aborted = self.threads[0]
        for run in self.law.runs:
            if self.waits_no_longer_for(run):
                self.law.cut_off(run.process)
        aborted, world = self.aborted, self.law.world

        def kill() -> None:
            world.sleep(GRACE)
            self.ends = self.ends or self.aborted is aborted

        world.start(self.law.supervisor, f"{self.name} supervisor", kill)
        self.law.world.interrupt(self.aborted, SystemExit(1))

    def waits_no_longer_for(self, run: Run) -> bool:
        """Return whether it ends, and a view goes on in another thread, for a while."""
        site = self.law.site
        return self.aborted is run.process and site is not None and bool(site.is_async)

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing for anybody."""
        return all(thread.dead for thread in self.threads) and not self.works

    @property
    def works(self) -> bool:
        """Whether one of its threads does what goes on after a request."""
        return any(each.host is self and each.works for each in self.law.world.processes)

    def kill(self, _: float) -> None:
        world = self.law.world
        world.tell(f"{self.name}: killed")
        for process in [process for process in world.processes if process.host is self]:
            self.law.killed(process)
            world.kill(process)
        self.threads, self.stopped_until, self.aborted, self.unchecked = [], 0.0, None, []
        self.new_process()


class Requests(Law):
    """One effect and one answer for each key, however often a request is sent."""

    kind = "http"
    store = Database
    #: How many deaths in a row are too many.
    most_deaths = MAX_CRASHES
    #: How often a client gives up before its time.
    impatience = 0.0

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        self.collect_as_ever()
        choices = self.choices
        self.servers = [self.server(f"server-{number}") for number in range(1, SERVERS + 1)]
        self.fails = choices.one_of("fails", [0, 0, 0.3])
        self.long = choices.one_of("takes", [[0], [0, 0, 1, 9]])
        self.deadly = choices.one_of("deadly", [""] * 7 + ["KEY-1"])
        self.runs: list[Run] = []
        self.settled: dict[str, bytes] = {}
        self.answers: dict[str, set[tuple[str, bytes]]] = defaultdict(set)
        self.deaths: Counter[str] = Counter()
        #: by key: those in a row, none of which ended in order or was alive for long
        self.in_a_row: Counter[str] = Counter()
        options = {"store": HostStore(simulation), "lease_ttl": LEASE_TTL, "max_crashes": MAX_CRASHES}
        self.site: Any = None
        self.supervisor = Host("supervisor")
        self.path = "/charges"
        self.serving = self.made(options)
        self.unanswered = 0
        #: by key: how often it was found to kill its servers
        self.loops: Counter[str] = Counter()
        #: by key: how often one of them lived to release its lease, from which on deaths are counted anew
        self.counted_anew: Counter[str] = Counter()
        self.clients(("KEY-1", "KEY-2")[: choices.one_of("keys", [1, 1, 2])])

    def clients(self, keys: Sequence[str]) -> None:
        """Have clients send requests with these keys."""
        for key in keys:
            for number in range(self.choices.one_of(f"clients of {key}", [1, 2, 2])):
                self.unanswered += 1
                client = Host(f"client-{number} of {key}")
                self.world.start(client, client.name, lambda key=key: self.request(key))

    def server(self, name: str) -> Any:
        """Return a server."""
        return Server(name, self)

    def made(self, options: dict[str, Any]) -> Any:
        """Return what serves requests, with these options."""
        if self.choices.one_of("framework", ["", "Django"]) == "Django":
            return self.django(options, asynchronous=False)
        middleware = IdempotencyMiddleware(self.application, scope=None, **options)
        self.install(middleware.binding)
        return middleware

    def django(self, options: dict[str, Any], *, asynchronous: bool) -> Any:
        """Return the handler of a site of Django's."""
        self.path = Site(self, options, asynchronous=asynchronous).path
        return self.site.handler

    @staticmethod
    def collect_as_ever() -> None:
        """Have Python's collector come when it likes, and not as a seed has it."""
        gc.unfreeze()
        gc.enable()

    def install(self, binding: Any) -> None:
        """Have a binding use the store, as each process does."""
        store = HostStore(self.simulation)
        binding.__dict__["_guard"] = guard.Guard(
            store, binding.policy, binding._codec(), OfHost("heartbeat"), OfHost("breaker")
        )

    def hosts(self) -> list[Any]:
        return self.servers

    # -- a client ------------------------------------------------------------------------------------------------------

    def request(self, key: str) -> None:
        """Send a request until it is answered for good."""
        world, choices = self.world, self.choices
        for _ in range(tries := TRIES_OF_DEADLY if key == self.deadly else TRIES):
            server = choices.one_of("which server", self.servers)
            answers: list[tuple[str, bytes]] = []
            exchange = self.send(server, key, answers)
            end = world.now + PATIENCE
            while not answers and not exchange.dead and world.now < end:
                world.sleep(1.0)
                # Rather while a reply of the store is on its way, which is then for nobody, or a part of a response.
                moment = server.replies or getattr(exchange, "body", b"")
                if choices.chance("a client is impatient", self.impatience * (5 if moment else 1)):
                    break
            if not answers:
                self.go(exchange)
            status = answers[0][0] if answers else "no answer"
            world.tell(f"{getcurrent().name}: {status} {answers[0][1][:60] if answers else ''}")
            self.counts[status] += 1
            if status.startswith("201"):
                self.answers[key].add(answers[0])
                if self.site is not None:
                    self.site.check_answer(key, answers[0][1])
                break
            if status.startswith("409") and b"not-kept" in answers[0][1] and self.site is not None and self.site.stream:
                self.check_recorded(key)
                break
            if status.startswith("500") and b"crash" in answers[0][1].lower():
                if self.deaths[key] < MAX_CRASHES:
                    self.fail(f"{key} is a crash loop after {self.deaths[key]} deaths")
                break
            world.sleep(choices.one_of("before it tries again", [0.5, 2.0, 5.0]))
        else:
            self.fail(f"{getcurrent().name} was not answered in {tries} tries")
        self.unanswered -= 1

    def send(self, server: Any, key: str, answers: list[tuple[str, bytes]]) -> Any:
        """Send a request to a server; return what is dead once it is not carried out any more."""
        name = f"{server.name} {getcurrent().name}"
        thread = self.world.start(server, name, lambda: self.answer_request(key, answers))
        server.threads.append(thread)
        return thread

    def answer_request(self, key: str, answers: list[tuple[str, bytes]]) -> None:
        """Answer a request in a thread of a server."""
        with suppress(SystemExit):  # its server ends
            answers.append(self.serve(key))

    def go(self, exchange: Any) -> None:
        """A client waits for its answer no longer."""

    def serve(self, key: str) -> tuple[str, bytes]:
        """Have the middleware answer a request, and return status and body."""
        started: list[str] = []
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": self.path,
            "CONTENT_LENGTH": "0",
            "HTTP_IDEMPOTENCY_KEY": key,
            "wsgi.input": io.BytesIO(),
        }
        try:
            returned = self.serving(environ, lambda status, headers, exc_info=None: started.append(status))
            body = self.sent(returned)
        except ValueError as error:
            return "500 Internal Server Error", str(error).encode()
        if body is None:
            return "no answer", b""
        runs = [run for run in self.runs if run.process is getcurrent()]
        passed = bool(runs) and getattr(returned, "streaming", False)  # sent, whoever has the lease at its end
        if not (passed and runs[-1].excused):
            self.check_sent(key, runs[-1] if runs else None, started[-1], body)
        self.world.step()  # the answer is on its way
        return started[-1], body

    def sent(self, returned: Any) -> bytes | None:
        """Send a response as its server does; return its body, None where its client has gone before its end."""
        body: list[bytes] = []
        try:
            for part in returned:
                body.append(part)
                if getattr(returned, "streaming", False):
                    self.world.step()
                    if self.choices.chance("a client leaves", self.site.leaves):
                        self.world.tell("the client has gone")
                        return None
            return b"".join(body)
        finally:
            close: Callable[[], None] = getattr(returned, "close", lambda: None)
            close()

    def check_sent(self, key: str, run: Run | None, status: str, body: bytes) -> None:
        """Check what leaves a server: the response of a run that was carried out for it, or what is known of one."""
        if run is not None:
            since, failures = run.returned
            if getcurrent().host.failures != failures or self.world.now - since >= SETTLE_TIMEOUT:
                return  # it could not be recorded
            if self.site is not None:
                self.site.check_refusal(run, body)
        if status.startswith("201"):
            self.check_recorded(key)

    def returned(self, run: Run) -> None:
        """A body returns."""
        run.ending, run.returned = "returned", (self.world.now, getcurrent().host.failures)

    def check_recorded(self, key: str) -> None:
        """Check that a response is not sent that could be recorded, and is not."""
        if not any(name.endswith(key) for name in self.settled):
            self.fail(f"{key} is answered before its response is recorded")

    # -- the application -----------------------------------------------------------------------------------------------

    def begin(self, key: str) -> Run:
        """A body begins."""
        held, process = current_lease(), getcurrent()
        host = process.host
        asking = self.working_for(process if process.works_for is None else process.works_for)  # false if it is dead
        run = Run(key, held, asking, len(self.runs) + 1, host.failures, host)
        # A view may begin in another thread, before which its process may have been stopped.
        if held.key in self.settled and (self.site is None or self.trusted(run)):
            self.fail(f"run {run.number} of {key} begins, which was settled")
        if self.in_a_row[key] >= self.most_deaths and self.trusted(run):
            self.fail(f"{key} has killed its server {self.in_a_row[key]} times in a row, and is run again")
        self.runs.append(run)
        if isinstance(host, Server):
            host.unchecked.append(run)
            if host.waits_no_longer_for(run):  # whose lease may be given back already
                run.excused = run.cut_off = True
        self.counts["runs"] += 1
        return run

    def charge(self, run: Run) -> None:
        """A body charges a customer."""
        if any(self.overlaps(run, other) for other in self.runs):
            self.fail(f"two runs of {run.key} at once, and both rely on their leases")
        if run.key == self.deadly:
            getcurrent().host.doomed = True

    def application(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Charge a customer."""
        world, choices, key = self.world, self.choices, environ["HTTP_IDEMPOTENCY_KEY"]
        run = self.begin(key)
        try:
            world.sleep(choices.one_of(f"{key}: before", self.long), f"run {run.number} of {key} begins")
            self.charge(run)
            world.sleep(choices.one_of(f"{key}: after", self.long), f"run {run.number} has charged {key}")
            if choices.chance(f"{key}: fails", self.fails):
                run.ending = "failed"
                if choices.chance(f"{key}: raises", 0.5):
                    raise ValueError("no")
                start_response("503 Service Unavailable", [])
                return [b"later"]
        except BaseException:
            run.ending = "failed"
            raise
        self.returned(run)
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [f"receipt {run.number}".encode()]

    def cut_off(self, process: Any) -> None:
        """A server stops to wait for what a process does, or for what is done for it."""
        for run in self.runs:
            if run.process is process and run.held.open:
                run.excused = run.cut_off = True

    def overlaps(self, run: Run, other: Run) -> bool:
        both = other is not run and other.key == run.key and not other.ending
        return both and self.trusted(run) and self.trusted(other)

    def trusted(self, run: Run) -> bool:
        if run.cut_off:
            return False
        return bool(run.held.fence) and not run.held.lost and self.world.now < run.held.deadline

    # -- what happens --------------------------------------------------------------------------------------------------

    def killed(self, process: Process) -> None:
        super().killed(process)
        for run in self.runs:
            if run.process in (process, process.works_for):
                run.ending, run.excused = run.ending or "killed", True

    def emitted(self, event: Any) -> None:
        if isinstance(event, CrashLooped):
            self.loops[event.key.rpartition(":")[2]] += 1
        if isinstance(event, (LeaseLost, SettleFailed, ReleaseFailed)):
            for run in self.runs:
                run.excused = run.excused or (run.held.key == event.key and run.held.fence == event.fence)

    def watch(self, verb: str, args: Any, host: Any, call: Callable[[], Any]) -> Any:
        answer = call()
        self.count(verb, args, answer)
        if verb == "settle" and self.site is not None:
            for run in self.runs:
                if run.held.key == args[0].key and run.held.fence == args[0].fence:
                    self.site.check_settle(run)
        for key in {run.held.key for run in self.runs}:
            record = self.simulation.store.get(key)
            settled = record is not None and record.state is State.COMPLETED
            if settled and self.settled.setdefault(key, record.payload) != record.payload:
                self.fail(f"{verb} changed the response of {key}")
        return answer

    def count(self, verb: str, args: Any, answer: Any) -> None:
        """Count the holders that died."""
        if verb == "acquire" and isinstance(answer, Lease) and answer.taken_over:
            self.deaths[name_of(args[0])] += 1
            self.in_a_row[name_of(args[0])] += 1
        elif verb == "release" and answer:
            self.counted_anew[name_of(args[0])] += self.in_a_row[name_of(args[0])] > 0
            self.in_a_row[name_of(args[0])] = 0
        elif verb == "renew":
            for lease in args[0]:
                if self.world.now - simulated(lease.fence) > STEADY:
                    self.in_a_row[name_of(lease)] = 0

    def check(self) -> None:
        super().check()
        dropped = self.site is not None and self.site.collects_at <= self.world.now  # a response, yet to be collected
        for server in self.servers:
            if (server.unchecked or server.heartbeat.holdings()) and server.is_idle and not dropped:
                self.check_leases(server)
            if server.doomed or server.ends or (server.aborted is not None and server.is_idle):
                server.doomed = server.ends = False
                server.kill(0.0)
        if self.site is not None:
            self.site.check()

    def check_leases(self, server: Any) -> None:
        """Check that a server that does nothing for anybody keeps no lease."""
        if server.heartbeat.holdings():
            self.fail(f"{server.name} keeps a lease for nobody")
        runs, server.unchecked = server.unchecked, []
        for run in runs:
            record = self.simulation.store.get(run.held.key)
            held = record is not None and record.state is State.IN_PROGRESS and record.fence == run.held.fence
            if held and not run.excused and server.failures == run.failures:
                self.fail(f"run {run.number} of {run.key} has ended, and keeps its lease")

    def steps(self) -> list[Step]:
        if self.site is None or self.site.collects_at > self.world.now:
            return []
        return [("the collector comes", 5.0, self.site.collect, None)]

    def next_step(self) -> float:
        return super().next_step() if self.site is None else float(self.site.collects_at)

    def fail(self, why: str) -> None:
        self.collect_as_ever()
        super().fail(why)

    def ended(self) -> None:
        self.collect_as_ever()
        super().ended()
        if self.unanswered:
            self.fail(f"{self.unanswered} clients were never answered")
        for key in ("KEY-1", "KEY-2"):
            runs = [run for run in self.runs if run.key == key]
            done = [run.number for run in runs if run.ending in ("returned", "left") and not run.excused]
            if len(done) > 1:
                self.fail(f"runs {done} of {key} were carried out, and none was cut off")
            if self.deaths[key] > self.most_deaths * (self.loops[key] + self.counted_anew[key] + 1):
                self.fail(f"{key} has killed its server {self.deaths[key]} times")
            unsettled = [run for run in runs if run.excused]
            if len(self.answers[key]) > 1 and not unsettled:
                self.fail(f"clients of {key} got {self.answers[key]}")


def name_of(asked: Any) -> str:
    """Return the client's key, of a claim or a lease."""
    return str(asked.key.rpartition(":")[2])
