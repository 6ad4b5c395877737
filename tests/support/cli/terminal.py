"""A real terminal of 80 columns: a command runs in it, keys are pressed, and what it drew is read."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

import click

from celery_idempotent.cli.tables import cells

COLUMNS, LINES = 80, 24
#: Bytes that are read at a time: few, so that a test which looks at half a screen fails on a quiet machine, too.
PIECE = 100
#: Makes the terminal that of the process, so that Ctrl-C reaches it, and becomes the command.
BECOME = """
import fcntl, os, signal, sys, termios
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background has it ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
#: What would tell the command of another terminal.
FOREIGN = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"}

CTRL_C = b"\x03"
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
#: After which a line begins: its end, the corner of the screen, the other screen, the terminal's echo of Ctrl-C.
BREAK = r"[\r\n]|\x1b\[H|\x1b\[\?1049l|\^C"
#: Written into the terminal once its process has ended.
END = "\x1b]0;the end\x07"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """Runs a command of Python's in a terminal of its own; a context that ends it."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        self.process = subprocess.Popen(
            [sys.executable, "-c", BECOME, sys.executable, *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **env},
        )
        self.drawn = ""
        # A read may end in the middle of a letter.
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
        os.close(self._ours)
        os.close(self._theirs)

    def __str__(self) -> str:
        lines = [line.rstrip() for line in click.unstyle(self.drawn).splitlines()]
        return "\n".join([line for line in lines if line][-40:])

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def read(self, seconds: float) -> bool:
        """Take in what is drawn within so many seconds, and tell whether anything was."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            self.drawn += self._decode(os.read(self._ours, PIECE))
        return bool(ready)

    def until(self, text: str | re.Pattern[str], timeout: float = 30.0) -> str:
        """Read until a text is drawn after what was waited for before, and return all that was drawn so far."""
        pattern = re.compile(re.escape(text)) if isinstance(text, str) else text
        deadline, start = time.monotonic() + timeout, len(self.drawn)
        while not pattern.search(click.unstyle(self.drawn[start:])):
            assert time.monotonic() < deadline, f"{text!r} was not drawn: {self}"
            self.read(0.1)
        return self.drawn

    def status(self, timeout: float = 30.0) -> int:
        """Read to the end, and return the exit status."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self}"
            self.read(0.1)
        # What the process wrote may still be on its way, and comes before what is written after its end.
        os.write(self._theirs, END.encode())
        while END not in self.drawn:
            assert time.monotonic() < deadline, f"the end of what it drew does not come: {self}"
            self.read(0.1)
        self.drawn = self.drawn.replace(END, "")
        return int(self.process.returncode)

    @property
    def sane(self) -> bool:
        """Whether the terminal is as it was: settings, screen and cursor."""
        settings = termios.tcgetattr(self._theirs) == self._before
        back = self.drawn.count(ALTERNATE) == self.drawn.count(BACK)
        return settings and back and self.drawn.rfind(SHOWN) >= self.drawn.rfind(HIDDEN)

    @property
    def widest(self) -> int:
        """How many columns the widest line took."""
        return max(cells(click.unstyle(line)) for line in re.split(BREAK, self.drawn))
