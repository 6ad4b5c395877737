"""What doctor found, as a page for people: the worst first, what to do under it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import click

from ..doctor import Section
from ..doctor.finding import Finding, Severity

__all__ = ["Diagnosis"]

_COLOURS = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}
_NOTES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
#: Columns that a page takes at most, however wide the terminal is, and those before a text.
WIDEST, INDENT = 100, 9


class Diagnosis:
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
        self._width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)

    def show(self, section: Section) -> None:
        """Print one section; nothing of it where quiet has nothing to say."""
        ranked = sorted(section.findings, key=lambda finding: -finding.severity)
        lines = [line for each in ranked if each.severity >= self._least for line in self._lines(each)]
        well = sum(each.severity is Severity.OK for each in section.findings)
        if well and not self._quiet and not self._verbose:
            lines.append(f"{self._word(Severity.OK)}{well} check{'' if well == 1 else 's'}")
        if lines:
            click.echo("\n".join([click.style(section.name, bold=True) if self._colour else section.name, *lines, ""]))

    def sum_up(self, sections: Sequence[Section]) -> None:
        """Print how many there are of each kind, and once more which are errors: they may have scrolled away."""
        findings = [finding for section in sections for finding in section.findings]
        found = [finding.severity for finding in findings]
        counts = [(found.count(severity), word) for severity, word in _NOTES.items()]
        said = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count]
        errors = dict.fromkeys(finding.code for finding in findings if finding.severity is Severity.ERROR)
        if errors:
            said[0] += f" ({', '.join(errors)})"
        summary = (
            f"{', '.join(said) or 'Nothing to change'}; {found.count(Severity.OK)} of {len(found)} checks are well."
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
        lines = textwrap.wrap(text, self._width - INDENT, break_long_words=False, break_on_hyphens=False)
        yield f"{first}{lines[0]}"
        for line in lines[1:]:
            yield f"{' ' * INDENT}{line}"

    def _word(self, severity: Severity) -> str:
        word = f"{severity!s:<{INDENT}}"
        return click.style(word, fg=_COLOURS[severity], bold=severity >= Severity.WARNING) if self._colour else word
