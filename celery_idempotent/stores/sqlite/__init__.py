"""A store in SQLite."""

from .store import SqliteStore

__all__ = ["SqliteStore"]
