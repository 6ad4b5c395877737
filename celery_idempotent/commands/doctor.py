"""``doctor``: look at the app and its stores, and say what to change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from .exits import Exit, status_of
from .serving import CHECKUP, StoreCommand, from_url

if TYPE_CHECKING:
    from ..doctor import Section
    from ..stores.used import UsedStore

__all__ = ["command"]


@click.command("doctor", cls=StoreCommand)
@click.option("--strict", is_flag=True, help="Exit with 1 also if there are only warnings.")
@click.option("-q", "--quiet", is_flag=True, help="Print warnings and errors alone, and nothing if there are none.")
@click.option("-v", "--verbose", is_flag=True, help="Print also what is well, line by line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all that was checked.")
@click.pass_context
def command(ctx: click.Context, strict: bool, quiet: bool, verbose: bool, as_json: bool) -> None:
    """Check the configuration and the stores, and say what to change.

    Asks servers and changes nothing, but for a throwaway key that is claimed and forgotten.

    Exits with 0 if nothing is in error, with 1 if something is, with 2, 3 or 4 if an option is wrong, a store cannot
    be reached, or refuses us.
    """
    from .diagnosis import Diagnosis

    diagnosis = Diagnosis(colour=not as_json, quiet=quiet, verbose=verbose)
    found: list[Section] = []
    for section in _sections(ctx):
        found.append(section)
        if not as_json:
            diagnosis.show(section)
    status = _status(found, strict=strict)
    if as_json:
        click.echo(json.dumps(_report(found, status)))
    else:
        diagnosis.sum_up(found)
    ctx.exit(status)


def _sections(ctx: click.Context) -> Iterator[Section]:
    """Yield what is found of the app, if there is one, and then of one store after the other."""
    from ..doctor import Patient, sections

    stores: Iterable[UsedStore]
    purged: bool | None = None
    if CHECKUP in ctx.meta:
        checkup = ctx.meta[CHECKUP]()
        stores, purged = checkup.stores, checkup.purged
        yield checkup.section
    else:
        stores = [from_url(ctx)]
    for used in stores:
        ctx.call_on_close(used.store.close)
        yield from sections(Patient(used.store, used.name, used.namespaces[0], purged))


def _status(found: list[Section], *, strict: bool) -> Exit:
    """Return the status of the first error that a store or a declaration raised, or else that of the worst finding."""
    from ..doctor.finding import Severity

    findings = [finding for section in found for finding in section.findings]
    for finding in findings:
        if finding.error is not None:
            return status_of(finding.error)
    limit = Severity.WARNING if strict else Severity.ERROR
    return Exit.NO if any(finding.severity >= limit for finding in findings) else Exit.OK


def _report(found: list[Section], status: Exit) -> dict[str, Any]:
    from ..doctor.finding import Severity

    findings = [finding for section in found for finding in section.findings]
    return {
        "status": int(status),
        "counts": {str(each): sum(finding.severity is each for finding in findings) for each in Severity},
        "sections": [
            {
                "name": section.name,
                "findings": [
                    {
                        "severity": str(finding.severity),
                        "code": finding.code,
                        "found": finding.found,
                        "remedy": finding.remedy,
                    }
                    for finding in section.findings
                ],
            }
            for section in found
        ],
    }
