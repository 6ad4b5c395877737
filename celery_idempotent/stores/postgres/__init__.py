"""A store in PostgreSQL."""

from .store import PostgresStore

__all__ = ["PostgresStore"]
