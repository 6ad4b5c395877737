"""Word from a worker's main process to the delivery that it is about to end: why.

A child that is told to end gets the same signal for a revoke, a hard time limit, a lost broker connection and a cold
shutdown, and sees no more than `SystemExit`. The record is to say which it was: an operator's revoke is no crash. So
the main process leaves a word, before it sends the signal, in memory that it shares with its children.

And word back, of a delivery that ends without having run its body: no other sign tells a replay from a run.
"""

from __future__ import annotations

import mmap
from zlib import crc32

from ..records import Reason

__all__ = ["announce", "announced", "answer_unrun", "prepare", "was_unrun"]

#: A word is lost where two deliveries that end at once share a place; that costs one crash count.
PLACES = 1024
SIZE = 32
_REASONS = list(Reason)

_words: mmap.mmap | None = None
_unrun: mmap.mmap | None = None


def prepare() -> None:
    """Make room for words; children that are forked later see them."""
    global _words, _unrun
    _words, _unrun = mmap.mmap(-1, PLACES * SIZE), mmap.mmap(-1, PLACES * SIZE)


def announce(owner: str, reason: Reason) -> None:
    """Leave word that the delivery of this owner is about to be ended."""
    if _words is not None:
        word = bytes([_REASONS.index(reason)]) + owner.encode()
        place = _place(owner)
        _words[place : place + SIZE] = word[:SIZE].ljust(SIZE, b"\0")


def announced(owner: str) -> Reason | None:
    """Return why the delivery of this owner is being ended, or None: nobody said that it would be."""
    if _words is None:
        return None
    place = _place(owner)
    word = _words[place : place + SIZE]
    return _REASONS[word[0]] if word[1:].rstrip(b"\0") == owner.encode() else None


def answer_unrun(owner: str) -> None:
    """Leave word that the delivery of this owner ends without having run its body."""
    if _unrun is not None:
        place = _place(owner)
        _unrun[place : place + SIZE] = owner.encode()[:SIZE].ljust(SIZE, b"\0")


def was_unrun(owner: str) -> bool:
    """Tell whether the delivery of this owner has ended without having run its body, as far as anybody said."""
    place = _place(owner)
    return _unrun is not None and _unrun[place : place + SIZE].rstrip(b"\0") == owner.encode()


def _place(owner: str) -> int:
    return crc32(owner.encode()) % PLACES * SIZE
