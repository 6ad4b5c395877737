"""Stores in Redis and Valkey: one server, a cluster, or behind sentinels."""

from .cluster import ClusterStore
from .sentinel import SentinelStore
from .store import RedisStore

__all__ = ["ClusterStore", "RedisStore", "SentinelStore"]
