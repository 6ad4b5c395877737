"""A store in DynamoDB."""

from .store import DynamoDBStore

__all__ = ["DynamoDBStore"]
