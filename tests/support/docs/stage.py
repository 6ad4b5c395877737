"""What the code in the pages finds around it: a bank, a mailer, an image library; nothing of ours."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Effects:
    """Stands for the world outside: whatever is called on it is written down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def effect(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, args, kwargs))
            return f"{name} {len(self.calls)}"

        return effect


def stage() -> ModuleType:
    """Return the module that a page's code is in, with the names that its first block may use."""
    module = ModuleType("shop")
    for name in ("gateway", "mailer", "images", "database"):
        setattr(module, name, Effects())
    return module
