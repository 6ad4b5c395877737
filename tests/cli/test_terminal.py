"""The terminal in which commands are tested gives back all that was drawn in it, whatever parts it came in."""

from __future__ import annotations

from tests.support.cli.terminal import Terminal

#: Writes an ellipsis, of three bytes, in two parts.
IN_PARTS = """
import os, tty
tty.setcbreak(0)  # without an echo
letter = "\N{HORIZONTAL ELLIPSIS}".encode()
os.write(1, b"before" + letter[:1])
os.read(0, 1)
os.write(1, letter[1:] + b"after")
"""


def test_a_letter_that_comes_in_parts_is_one_letter() -> None:
    with Terminal("-c", IN_PARTS) as terminal:
        terminal.until("before")
        terminal.press(b"x")
        assert terminal.status() == 0
        assert "before\N{HORIZONTAL ELLIPSIS}after" in terminal.drawn
        assert "\N{REPLACEMENT CHARACTER}" not in terminal.drawn
