"""Runs Celery's or RQ's own test suite twice, stock and with everything guarded, and compares test by test.

    python -m tests.suites celery [--broker rabbitmq] [--files test_canvas.py ...] [--jobs 2] [--folder DIRECTORY]
    python -m tests.suites rq

The suite is the one in the source distribution of the installed version, downloaded from PyPI for this run. Each file
runs in a pytest process of its own, on a Redis server of its own. The command fails if a test that passes on stock
Celery or RQ does not pass guarded, unless `expected.py` lists it with a reason; if one that is listed passes; or if
some task or job ran unguarded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from time import monotonic, sleep
from xml.etree import ElementTree

from tests.suites.expected import EXPECTED, KINDS, Expected
from tests.support import processes
from tests.support.rabbitmq import RabbitServer
from tests.support.servers import RedisServer

PLUGINS = Path(__file__).parent / "plugins"
MODES = ("stock", "guarded")
#: Worst outcome first: a test whose subtests end differently has the first of theirs.
OUTCOMES = ("failed", "skipped", "passed")
#: Seconds that pytest may take to exit after its report.
EXIT_SECONDS = 20.0
COLUMNS = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Suite:
    """A suite of another project.

    Arguments:
        package: Name of the project on PyPI, and of its Python package.
        folder: Folder of the source distribution that holds the tests, with all that they import.
        tests: Folder of the test files.
        seconds: Time limit of a file, in seconds.
        least_guarded: Guarded deliveries that a run of all files has at least.
    """

    package: str
    folder: str
    tests: str
    seconds: float
    least_guarded: int


SUITES = {
    "celery": Suite("celery", "t", "t/integration", seconds=1800, least_guarded=1000),
    "rq": Suite("rq", "tests", "tests", seconds=900, least_guarded=200),
}


@dataclass
class FileRun:
    """Outcomes of one test file in one mode."""

    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    names: Counter[tuple[str, str]] = field(default_factory=Counter)
    error: str = ""
    seconds: float = 0.0

    def total(self, outcome: str) -> int:
        """Return how many tests ended so."""
        return sum(each == outcome for each in self.outcomes.values())


def fetch(suite: Suite, folder: Path) -> Path:
    """Download the source distribution of the installed version, and return a folder with its tests alone.

    Raises:
        SystemExit: its package is not the installed one.
    """
    version = metadata.version(suite.package)
    options = ["--quiet", "--no-deps", "--no-binary", suite.package, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{suite.package}=={version}"]
    subprocess.run(command, check=True, timeout=600)
    with tarfile.open(folder / f"{suite.package}-{version}.tar.gz") as archive:
        archive.extractall(folder / "source", filter="data")
    source = folder / "source" / f"{suite.package}-{version}"
    installed = Path(str(import_module(suite.package).__file__)).parent
    shipped = {path.relative_to(source / suite.package): path for path in (source / suite.package).rglob("*.py")}
    other = [str(name) for name, path in shipped.items() if _content(installed / name) != path.read_bytes()]
    if other or not shipped:
        sys.exit(
            f"{source.name} on PyPI is not the installed {suite.package}: {', '.join(other) or 'it has no modules'}"
        )
    # The package itself is left behind: the tests are to import the installed one.
    tree = folder / "tree"
    tree.mkdir()
    (source / suite.folder).rename(tree / suite.folder)
    (source / "pyproject.toml").rename(tree / "pyproject.toml")
    if not list((tree / suite.tests).glob("test_*.py")):
        sys.exit(f"{source.name} has no tests in {suite.tests}")
    print(f"{source.name} from PyPI: its {len(shipped)} modules are those installed here.", flush=True)
    return tree


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def run_file(
    suite: Suite, tree: Path, name: str, mode: str, broker_url: str | None, tests: Sequence[str] = ()
) -> FileRun:
    """Run one test file, or some tests of it, in a process of its own with a Redis server of its own."""
    result, started = FileRun(), monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="suite-", ignore_cleanup_errors=True)))
        server = stack.enter_context(RedisServer())
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("COVERAGE", "PYTEST"))},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(tree)]),
            "SUITE_PATCH": f"suite_{suite.package}",
            "SUITE_GUARDS": str(int(mode == "guarded")),
            "SUITE_COUNTS": str(folder / "counts"),
            "SUITE_REDIS_PORT": str(server.port),
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(server.port),
            "TEST_BROKER": broker_url or server.url(),
            "TEST_BACKEND": server.url(),
            "WORKER_LOGLEVEL": "INFO",  # as the suite's own tox.ini sets it, which the distribution lacks
            "TMPDIR": str(folder),
        }
        log = tree.parent / f"{mode}-{name}{'-again' if tests else ''}.log"
        options = ["-v", "-p", "suite_pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:rerunfailures"]
        options += [f"--junitxml={folder / 'junit.xml'}"]
        options += [f"{suite.tests}/{name}::{test}" for test in tests] or [f"{suite.tests}/{name}"]
        with log.open("wb") as output:
            process = processes.spawn(
                [sys.executable, "-m", "pytest", *options],
                env=environment,
                cwd=tree,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            if not _ends(process, folder / "junit.xml", suite.seconds):
                result.error = f"did not end within {suite.seconds:.0f} s"
            status = processes.end(process)
        read_counts(folder / "counts", result)
        if (folder / "junit.xml").exists():
            read_junit(folder / "junit.xml", Path(name).stem, result)
        elif not result.error:
            result.error = f"pytest ended with status {status} and no report"
        if result.error:
            result.error += f"; see {log}"
    result.seconds = monotonic() - started
    return result


def _ends(process: subprocess.Popen[bytes], report: Path, seconds: float) -> bool:
    """Wait until a run has ended; one that has reported, and waits for a process that a failed test left, has too."""
    deadline = monotonic() + seconds
    while process.poll() is None:
        if report.exists():
            deadline = min(deadline, monotonic() + EXIT_SECONDS)
        if monotonic() >= deadline:
            return report.exists()
        sleep(0.1)
    return True


def read_counts(path: Path, result: FileRun) -> None:
    """Add up what all processes of a run counted."""
    for line in path.read_text().splitlines() if path.exists() else ():
        kind, name = line.split(" ", 1)
        result.counts[kind] += 1
        result.names[kind, name] += 1


def read_junit(path: Path, stem: str, result: FileRun) -> None:
    """Read the outcomes of the tests of the file `stem`; a test with subtests has the worst of theirs."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        inside = case.get("classname", "").partition(f".{stem}")[2].lstrip(".")
        name = "::".join(filter(None, (*inside.split("."), case.get("name"))))
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                result.messages[name] = (child.get("message") or "").strip().partition("\n")[0][:160]
        result.outcomes[name] = min(outcome, result.outcomes.get(name, "passed"), key=OUTCOMES.index)


def confirm(name: str, runs: tuple[FileRun, FileRun], expected: dict[str, Expected], run: RunTests) -> list[str]:
    """Repeat, alone, the tests that pass on stock only though nobody expects that; note those that differ only once.

    These suites wait for seconds of the clock, and a loaded machine lets such a test fail in either mode. A difference
    that is ours is there both times.
    """
    stock, guarded = runs
    if guarded.error:
        return []
    differing = [
        test
        for test, outcome in stock.outcomes.items()
        if outcome == "passed" != guarded.outcomes.get(test, "missing") and f"{name}::{test}" not in expected
    ]
    if not differing:
        return []
    again = run(name, "stock", differing), run(name, "guarded", differing)
    notes = []
    for test in differing:
        outcomes = [each.outcomes.get(test, "missing") for each in again]
        if outcomes[1] == "passed" or outcomes[0] == outcomes[1]:
            notes.append(
                f"{name}::{test}: {guarded.outcomes.get(test, 'missing')} guarded, and not when it was repeated"
            )
            stock.outcomes[test], guarded.outcomes[test] = outcomes
            stock.messages.setdefault(test, again[0].messages.get(test, ""))
    return notes


RunTests = Callable[[str, str, Sequence[str]], FileRun]


@dataclass
class Comparison:
    """The differences between the two modes, and what is wrong with them."""

    suite: Suite
    expected: dict[str, Expected]
    whole: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, stock: FileRun, guarded: FileRun) -> None:
        """Compare the two runs of a file."""
        for mode, run in zip(MODES, (stock, guarded), strict=True):
            if run.error:
                self.problems.append(f"{name}, {mode}: {run.error}")
            self.totals.update({f"{mode} {outcome}": run.total(outcome) for outcome in OUTCOMES})
            self.totals.update({f"{mode} {kind}": number for kind, number in run.counts.items()})
        for (kind, task), number in sorted(guarded.names.items()):
            if kind == "unguarded":
                self.problems.append(f"{name}: {task} is declared so that nothing guards it")
            if kind == "ran" and (missed := number - guarded.names["guarded", task]) > 0:
                self.problems.append(f"{name}: {task} was about to run {number} times, {missed} of them unguarded")
        if not (stock.outcomes and guarded.outcomes):
            return  # there is no report, which is a problem already
        for test in sorted(stock.outcomes.keys() | guarded.outcomes.keys()):
            self._compare(f"{name}::{test}", test, stock, guarded)

    def _compare(self, full: str, test: str, stock: FileRun, guarded: FileRun) -> None:
        before, after = stock.outcomes.get(test, "missing"), guarded.outcomes.get(test, "missing")
        if before == "failed":
            self.notes.append(
                f"{full}: fails on stock {self.suite.package} here, {after} guarded: {stock.messages[test]}"
            )
        listed = self.expected.get(full)
        if before == after or after == "passed":
            if listed and before == after == "passed":
                self.problems.append(f"{full}: expected to differ ({listed.kind}), and passes; take it off the list")
            return
        self.differing.setdefault(listed.kind if listed else "UNEXPECTED", []).append(full)
        if not listed:
            self.problems.append(f"{full}: {before} on stock, {after} guarded: {guarded.messages.get(test, '')}")

    def finish(self, files: list[str]) -> None:
        """Check what only the sum of all files shows."""
        guarded = self.totals["guarded guarded"]
        least = self.suite.least_guarded if self.whole else min(1, self.totals["stock ran"])
        if guarded < least:
            self.problems.append(f"{guarded} deliveries were guarded, and at least {least} were expected")
        seen = {full for names in self.differing.values() for full in names}
        for full in self.expected.keys() - seen:
            if full.partition("::")[0] in files and not any(full in each for each in self.problems):
                self.problems.append(f"{full}: expected to differ, and was not among the tests that passed on stock")


def print_tables(results: dict[str, tuple[FileRun, FileRun]], comparison: Comparison) -> None:
    """Print a line for each file, the differences by kind, what fails on stock, and the verdict."""
    package, width = comparison.suite.package, max(map(len, results))
    print(f"\n{'':{width}}  {'stock ' + package:^23}  {'guarded':^23}")
    print(f"{'file':{width}}{'   passed  failed skipped' * 2}  ran/guarded   seconds")
    for name, (stock, guarded) in results.items():
        cells = "".join(_cells([run.total(outcome) for outcome in COLUMNS]) for run in (stock, guarded))
        guards = f"{guarded.counts['ran']}/{guarded.counts['guarded']}"
        print(f"{name:{width}}{cells}  {guards:>11}  {stock.seconds:.0f}/{guarded.seconds:.0f}")
    total = comparison.totals
    cells = "".join(_cells([total[f"{mode} {outcome}"] for outcome in COLUMNS]) for mode in MODES)
    guards = f"{total['guarded ran']}/{total['guarded guarded']}"
    print(f"{'all':{width}}{cells}  {guards:>11}\n")
    for note in comparison.notes:
        print(f"NOTE {note}")
    for kind, names in comparison.differing.items():
        print(f"\n{len(names)} tests differ: {KINDS.get(kind, kind)}")
        print("\n".join(f"    {name}" for name in names))
    print()
    for problem in comparison.problems:
        print(f"PROBLEM {problem}")
    if not comparison.problems:
        print("No difference but those expected.")


def _cells(numbers: list[int]) -> str:
    return " " + "".join(f"{number:8}" for number in numbers)


def main() -> int:
    """Run a suite as the command line asks, and return the status to exit with."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis", help="of Celery's suite")
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="test files, by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the source distribution and the logs go")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{suite.package}-suite-", dir=options.folder))
    tree = fetch(suite, folder)
    every = sorted(path.name for path in (tree / suite.tests).glob("test_*.py"))
    files = sorted(options.files) or every
    if unknown := set(files) - set(every):
        parser.error(f"the suite has no {', '.join(sorted(unknown))}, it has {', '.join(every)}")
    with ExitStack() as stack:
        broker = stack.enter_context(RabbitServer()) if options.broker == "rabbitmq" else None

        work = [(name, mode) for name in files for mode in MODES]
        brokers = {each: broker.vhost().url if broker else None for each in work}

        def run(name: str, mode: str, tests: Sequence[str] = ()) -> FileRun:
            # What a first run left in its queues must not meet a second one.
            url = broker.vhost().url if broker and tests else brokers[name, mode]
            done = run_file(suite, tree, name, mode, url, tests)
            print(f"{name}, {mode}: {done.error or f'done in {done.seconds:.0f} s'}", flush=True)
            return done

        with ThreadPoolExecutor(options.jobs) as pool:
            runs = dict(zip(work, pool.map(lambda each: run(*each), work), strict=True))
        results = {name: (runs[name, "stock"], runs[name, "guarded"]) for name in files}
        expected = {name: each for name, each in EXPECTED[suite.package].items() if options.broker in each.brokers}
        notes = [note for name, both in results.items() for note in confirm(name, both, expected, run)]
    comparison = Comparison(suite, expected, whole=not options.files, notes=notes)
    for name, (stock, guarded) in results.items():
        comparison.add(name, stock, guarded)
    comparison.finish(files)
    print_tables(results, comparison)
    return 1 if comparison.problems else 0


if __name__ == "__main__":
    sys.exit(main())
