"""Conditions and updates of one item, spelled as DynamoDB's expressions.

Half of our words are reserved ones there, and a task id may hold anything, so that every name and every value stands
behind a placeholder.
"""

from __future__ import annotations

from typing import Any

from ..records import new_owner
from .dynamodb_items import Item, text

__all__ = ["Condition", "Update"]


class Condition:
    """What must hold of an item for a write to be done; each call adds a term, and all must hold."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: dict[str, Item] = {}
        self._terms: list[str] = []
        self._alternative = ""

    def path(self, *words: str) -> str:
        """Return the placeholder of an attribute, or of one inside a map."""
        return ".".join(self._names.setdefault(word, f"#{len(self._names)}") for word in words)

    def value(self, value: Item) -> str:
        """Return the placeholder of a value."""
        name = f":{len(self._values)}"
        self._values[name] = value
        return name

    def given(self, value: Item, *words: str, relation: str = "=") -> None:
        """Require that an attribute has this value, or another relation to it."""
        self._terms.append(f"{self.path(*words)} {relation} {self.value(value)}")

    def absent(self, *words: str) -> None:
        """Require that an attribute is not there; of the key, that the item is not."""
        self._terms.append(f"attribute_not_exists({self.path(*words)})")

    def room(self, most: int, *words: str) -> None:
        """Require that a list has fewer elements than so many, or is not there."""
        path = self.path(*words)
        size = self.value({"N": str(most)})
        self._terms.append(f"(attribute_not_exists({path}) OR size({path}) < {size})")

    def lacks(self, value: Item, *words: str) -> None:
        """Require that a list or a set does not have this element."""
        self._terms.append(f"NOT contains({self.path(*words)}, {self.value(value)})")

    def or_gone(self) -> None:
        """Let the write be done also where there is no item."""
        self._alternative = f"attribute_not_exists({self.path('key')}) OR "

    def request(self) -> dict[str, Any]:
        """Return this as part of a request."""
        said: dict[str, Any] = {
            "ConditionExpression": f"{self._alternative}({' AND '.join(self._terms)})",
            "ExpressionAttributeNames": {placeholder: word for word, placeholder in self._names.items()},
        }
        return {**said, "ExpressionAttributeValues": self._values} if self._values else said


class Update(Condition):
    """What is changed of an item, and under which condition; its version always is."""

    def __init__(self) -> None:
        super().__init__()
        self._clauses: dict[str, list[str]] = {"SET": [], "REMOVE": []}
        self.version = new_owner()
        self.set(text(self.version), "version")

    @property
    def empty(self) -> bool:
        """Whether nothing but the version would change."""
        return sum(map(len, self._clauses.values())) == 1

    def set(self, value: Item, *words: str) -> None:
        """Give an attribute this value."""
        self._clauses["SET"].append(f"{self.path(*words)} = {self.value(value)}")

    def remove(self, *words: str) -> None:
        """Remove an attribute."""
        self._clauses["REMOVE"].append(self.path(*words))

    def append(self, value: Item, *words: str) -> None:
        """Add to the end of a list, which need not be there."""
        path, none, one = self.path(*words), self.value({"L": []}), self.value({"L": [value]})
        self._clauses["SET"].append(f"{path} = list_append(if_not_exists({path}, {none}), {one})")

    def request(self) -> dict[str, Any]:
        """Return this as part of a request."""
        said = " ".join(f"{verb} {', '.join(parts)}" for verb, parts in self._clauses.items() if parts)
        return {"UpdateExpression": said, **super().request()}
