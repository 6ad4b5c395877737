"""Write the canonical form, the key and the fingerprint of every value in key_vectors.txt, in the file's own format.

Run by test_keys.py under several PYTHONHASHSEEDs. A form that changes is a key that a store no longer knows: add lines
to the file, never change one.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, namedtuple  # noqa: F401 - the expressions in the file use these
from datetime import date, datetime, time, timedelta, timezone  # noqa: F401
from decimal import Decimal  # noqa: F401
from pathlib import Path
from uuid import UUID  # noqa: F401

from celery_idempotent.core.keys import canonical, compose, fingerprint
from celery_idempotent.errors import MissingKey

VECTORS = Path(__file__).with_name("key_vectors.txt")


class Colour(str, enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


Point = namedtuple("Point", "x y")


class Money:
    def __json__(self) -> object:
        return ["EUR", 5]


def line(expression: str) -> str:
    value = eval(expression, globals())
    try:
        key = compose("idem", "shop.charge", key=value)
    except MissingKey:
        key = "-"
    return "\t".join([expression, canonical(value), key, fingerprint({"order": value, "amount": 1})])


if __name__ == "__main__":
    for known in VECTORS.read_text(encoding="ascii").splitlines():
        sys.stdout.write(line(known.split("\t")[0]) + "\n")
