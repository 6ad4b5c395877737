"""Results that lesser libraries replay as None."""

from __future__ import annotations

from typing import Any

VALUES: dict[str, Any] = {
    "none": None,
    "zero": 0,
    "false": False,
    "empty text": "",
    "empty list": [],
    "empty dict": {},
    "nested": {"a": [1, 2.5, None, True, {"b": "c"}]},
}
