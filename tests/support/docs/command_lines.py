"""The command lines that people read: in the pages, in docstrings, in help texts and in error messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.docs.pages import FENCE, ROOT, pages

#: How a command begins that is written within a sentence.
BEGINS = r"(?:(?:[A-Z_]+=\S+ )*(?:{}))".format(
    "|".join(
        (
            r"(?:[\w./]*/)?celery -A",
            r"(?:[\w./]*/)?celery-idempotent(?= )",
            r"rq worker",
            r"(?:[\w./]*/)?python3? -[mc]",
            r"(?:[\w./]*/)?pip install(?= )",
            r"(?:apt|brew) install",
            r"redis-cli(?= -)",
            r"redis-server -",
            r"CONFIG SET",
            r"pytest -",
            r"tox -e(?= )",
            r"kill -9 (?:\d|[A-Z])",
            r"pkill -",
            r"pgrep -",
            r"cosmic-ray",
            r"sphinx-build -",
            r"aws (?:s3|dynamodb)",
        )
    )
)
CODE = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
#: A command in a message ends with its line, or where the sentence goes on.
IN_A_SENTENCE = re.compile(rf"(?<![\w/.-]){BEGINS}(?:'[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\]|[^\n`,;()'\"])*")
BEGINNING = re.compile(BEGINS)
#: Between string literals that Python joins.
BETWEEN_LITERALS = re.compile(r"""["']\s+[A-Za-z]{0,2}["']""")
COMMENT = re.compile(r"\s+#\s.*$")
EXECUTED = re.compile(r"^ExecStart=(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class CommandLine:
    """One command line, as it is printed.

    Arguments:
        text: What is to be typed.
        where: The file and the line.
        exported: What lines before it put into the environment.
    """

    text: str
    where: str = field(compare=False)
    exported: tuple[str, ...] = ()


@cache
def command_lines() -> list[CommandLine]:
    """Return every command line once, with the first place that prints it."""
    found: dict[CommandLine, None] = {}
    for page in pages():
        found |= dict.fromkeys(_of_page(page))
    for folder in ("celery_idempotent", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= dict.fromkeys(_of_module(path))
    return list(found)


def _of_page(page: str) -> Iterator[CommandLine]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        number = text.count("\n", 0, match.start()) + 2
        language = match["language"].strip()
        if language == "console":
            yield from _typed(match["text"], f"{page}:{number}")
        elif language == "ini":
            yield from (CommandLine(line, f"{page}:{number}") for line in EXECUTED.findall(match["text"]))
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in CODE.finditer(prose):
        if re.match(BEGINS, match[2]):
            yield CommandLine(" ".join(match[2].split()), f"{page}:{prose.count(chr(10), 0, match.start()) + 1}")


def _typed(block: str, where: str) -> Iterator[CommandLine]:
    """Yield what a block has typed: the lines behind a prompt, or all of them where there is no prompt."""
    lines = block.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    exported: tuple[str, ...] = ()
    for line in lines:
        text = COMMENT.sub("", line).strip()
        if text.startswith("export "):
            exported += (text.removeprefix("export "),)
        elif text:
            yield CommandLine(text, where, exported)


def _of_module(path: Path) -> Iterator[CommandLine]:
    where, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    if not BEGINNING.search(BETWEEN_LITERALS.sub("", source)):  # to parse all modules would take seconds
        return
    nodes = list(ast.walk(ast.parse(source)))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node in parts:
            continue
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and (text := _text(node)):
            inline = [match[2] for match in CODE.finditer(text)]
            rest = CODE.sub("", text)
            found = [code for code in inline if re.match(BEGINS, code)]
            found += [match[0] for match in IN_A_SENTENCE.finditer(rest)]
            for command in found:
                yield CommandLine(_trimmed(command), f"{where}:{node.lineno}")


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a string as people see it, with what is filled in between braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in node.values
        if isinstance(part, (ast.Constant, ast.FormattedValue))
    )


def _trimmed(command: str) -> str:
    """Return a command without what follows it: two blanks and a remark, the rest of its sentence."""
    command = re.split(r"  |\. |: | and |\.$|:$", COMMENT.sub("", command.strip()))[0]
    return " ".join(command.split()).rstrip(".")
