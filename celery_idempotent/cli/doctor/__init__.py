"""``doctor``: what to change in the app and its stores, the worst first."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ...errors import ConfigurationError
from ...units import clean
from ..common import CHECKUP, URL, Exit, StoreCommand, from_url, import_from_here, status_of
from .findings import Finding, Section, Severity, Target


def _queues_url(ctx: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Return the URL; raise if the next option was taken for it."""
    if given is not None and given.startswith("-"):
        raise click.BadParameter(f"expected the URL of RQ's Redis, as redis://localhost/0, got {given!r}.")
    return given


@click.command("doctor", cls=StoreCommand)
@click.option(
    "--rq",
    metavar="URL",
    callback=_queues_url,
    help="Check also RQ's queues in this Redis, and their jobs.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 also if there are only warnings.")
@click.option("-q", "--quiet", is_flag=True, help="Print warnings and errors alone, and nothing if there are none.")
@click.option("-v", "--verbose", is_flag=True, help="Print also what is well, line by line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all that was checked.")
@click.pass_context
def command(ctx: click.Context, rq: str | None, strict: bool, quiet: bool, verbose: bool, as_json: bool) -> None:
    """Check the configuration and the stores, and print what to change.

    Reads from servers and changes nothing, but for a throwaway key that is claimed and forgotten.

    Exits with 0 if nothing is in error, with 1 if something is, with 2, 3 or 4 if an option is wrong, a store cannot
    be reached, or refuses the user.
    """
    report = DoctorReport(colour=not as_json, quiet=quiet, verbose=verbose)
    found: list[Section] = []
    for section in _sections(ctx, rq):
        found.append(section)
        if not as_json:
            report.show(section)
    status = _status(found, strict=strict)
    if as_json:
        click.echo(json.dumps(_facts(found, status)))
    else:
        report.sum_up(found)
    ctx.exit(status)


def _sections(ctx: click.Context, rq: str | None) -> Iterator[Section]:
    """Yield what is found of RQ and of the app, where there are such, and then of one store after the other."""
    from .stores import sections

    if rq is not None:
        yield _queues(ctx, rq)
    if CHECKUP in ctx.meta:
        section, targets = ctx.meta[CHECKUP]()
        yield section
    else:
        used = from_url(ctx)
        targets = [Target(used.store, used.name, used.namespaces[0])]
    for target in targets:
        ctx.call_on_close(target.store.close)
        yield from sections(target)


def _queues(ctx: click.Context, url: str) -> Section:
    """Return what is found of RQ's queues, whose jobs name functions of the current directory, as for RQ's worker."""
    from ...stores import hide_password, open_store

    if importlib.util.find_spec("rq") is None:
        raise ConfigurationError("Expected RQ to be installed, and it is not: pip install 'celery-idempotent[rq]'")
    store = open_store(url)
    ctx.call_on_close(store.close)
    if not hasattr(store, "_client"):
        raise ConfigurationError(f"Expected the URL of RQ's Redis, as redis://localhost/0, got {hide_password(url)!r}.")
    import_from_here()
    ctx.meta[URL] = ctx.meta.get(URL) or url  # the store of guarded jobs, unless they name another
    from . import rq

    return rq.section(store, hide_password(url))


def _status(found: list[Section], *, strict: bool) -> Exit:
    """Return the status of the first error that a store or a declaration raised, or else that of the worst finding."""
    findings = [finding for section in found for finding in section.findings]
    for finding in findings:
        if finding.error is not None:
            return status_of(finding.error)
    limit = Severity.WARNING if strict else Severity.ERROR
    return Exit.NO if any(finding.severity >= limit for finding in findings) else Exit.OK


def _facts(found: list[Section], status: Exit) -> dict[str, Any]:
    severities = [finding.severity for section in found for finding in section.findings]
    sections = [
        {
            "name": section.name,
            "findings": [
                {"severity": str(each.severity), "code": each.code, "found": each.found, "remedy": each.remedy}
                for each in section.findings
            ],
        }
        for section in found
    ]
    counts = {str(severity): severities.count(severity) for severity in Severity}
    return {"status": int(status), "counts": counts, "sections": sections}


_COLOURS = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}
_NOTES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
#: The least and the most columns of a page, however wide the terminal is, and the columns before a text.
NARROWEST, WIDEST, INDENT = 40, 100, 9


class DoctorReport:
    """Print sections as they come.

    Arguments:
        colour: Whether words may be coloured, where the output is a terminal and NO_COLOR is not set.
        quiet: Leave out what is no warning and no error.
        verbose: Print what is well line by line.
    """

    def __init__(self, *, colour: bool = True, quiet: bool = False, verbose: bool = False) -> None:
        self._colour = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._least = Severity.WARNING if quiet else Severity.OK if verbose else Severity.INFO
        self._quiet, self._verbose = quiet, verbose
        self._width = min(max(shutil.get_terminal_size((80, 24)).columns, NARROWEST), WIDEST)

    def show(self, section: Section) -> None:
        """Print one section, or nothing if quiet leaves out all of it."""
        ranked = sorted(section.findings, key=lambda finding: -finding.severity)
        lines = [line for each in ranked if each.severity >= self._least for line in self._lines(each)]
        well = sum(each.severity is Severity.OK for each in section.findings)
        if well and not self._quiet and not self._verbose:
            lines.append(f"{self._word(Severity.OK)}{well} check{'' if well == 1 else 's'}")
        if lines:
            click.echo("\n".join([click.style(section.name, bold=True) if self._colour else section.name, *lines, ""]))

    def sum_up(self, sections: Sequence[Section]) -> None:
        """Print the number of findings of each kind, and the errors by name, which may have scrolled away."""
        findings = [finding for section in sections for finding in section.findings]
        found = [finding.severity for finding in findings]
        counts = [(found.count(severity), word) for severity, word in _NOTES.items()]
        words = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count]
        errors = dict.fromkeys(finding.code for finding in findings if finding.severity is Severity.ERROR)
        if errors:
            words[0] += f" ({', '.join(errors)})"
        summary = (
            f"{', '.join(words) or 'Nothing to change'}; {found.count(Severity.OK)} of {len(found)} checks are well."
        )
        if not self._quiet or any(severity >= self._least for severity in found):
            click.echo("\n".join(textwrap.wrap(summary, self._width, break_on_hyphens=False)))

    def _lines(self, finding: Finding) -> Iterator[str]:
        word = self._word(finding.severity)
        if finding.severity is Severity.OK:
            yield from self._wrapped(finding.found, word)
            return
        yield f"{word}{finding.code}"
        yield from self._wrapped(finding.found, " " * INDENT)
        if finding.remedy:
            yield from self._wrapped(finding.remedy, f"{' ' * (INDENT - 3)}-> ")

    def _wrapped(self, text: str, first: str) -> Iterator[str]:
        text = clean(text.replace("\n", " "))
        lines = textwrap.wrap(text, self._width - INDENT, break_long_words=False, break_on_hyphens=False)
        yield f"{first}{lines[0]}"
        for line in lines[1:]:
            yield f"{' ' * INDENT}{line}"

    def _word(self, severity: Severity) -> str:
        word = f"{severity!s:<{INDENT}}"
        return click.style(word, fg=_COLOURS[severity], bold=severity >= Severity.WARNING) if self._colour else word
