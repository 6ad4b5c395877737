"""What an error of boto3 means: a service that cannot serve, or one that will not serve us."""

from __future__ import annotations

from botocore.exceptions import (
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)

from ..errors import StoreError, StoreRefused, StoreUnreachable

__all__ = ["code", "interruption", "translated"]

#: Said of the request's signature; the texts of some repeat it, with the key's id and a session's token.
_SIGNATURE = {
    "ExpiredTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_RIGHTS = {"AccessDenied", "AccessDeniedException", "NotAuthorized", "OptInRequired", "SubscriptionRequiredException"}
_NO_IDENTITY = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError)

#: Who raises what a request may fail with and botocore has no error for.
_TRANSPORT = {"builtins", "http", "socket", "ssl", "urllib3"}


def interruption(error: Exception) -> Exception | None:
    """Return what a signal's handler raised in the middle of a request, as that of the soft time limit does, or None.

    botocore makes an error of its own of whatever is raised there, and to wait for a store that is not down would be to
    lose the time limit.

    Arguments:
        error: What boto3 raised.
    """
    raised = error.kwargs.get("error") if isinstance(error, HTTPClientError) else None
    if not isinstance(raised, Exception) or type(raised).__module__.partition(".")[0] in _TRANSPORT:
        return None
    return raised


def translated(error: Exception, place: object) -> StoreError:
    """Return the store's error that an error of boto3 means.

    Arguments:
        error: What boto3 raised.
        place: What to call the table; no password in it.
    """
    if isinstance(error, ClientError):
        said = error.response.get("Error", {})
        return _said(str(said.get("Code", "")), str(said.get("Message", "")), place)
    name = type(error).__name__
    if isinstance(error, NoRegionError):
        return StoreRefused(
            f"Expected a region for the idempotency store {place}, found none: write ?region=... or set AWS_REGION."
        )
    if isinstance(error, _NO_IDENTITY):
        return StoreRefused(
            f"Expected credentials for the idempotency store {place}, and boto3 found none that it can use ({name}). "
            "Give the worker a role, or a profile, or the keys in its environment."
        )
    return StoreUnreachable(
        f"The idempotency store {place} cannot serve ({name}: {error}). Is the endpoint right, and within reach?"
    )


def _said(code: str, message: str, place: object) -> StoreError:
    if code in _SIGNATURE:
        return StoreRefused(
            f"The idempotency store {place} refused us ({code}). "
            "Check the credentials, the region, and this machine's clock: AWS takes no request that is minutes off."
        )
    if code in _RIGHTS:
        return StoreRefused(
            f"The idempotency store {place} refused us ({code}: {message}). "
            "Give the role GetItem, PutItem, UpdateItem and DeleteItem on the table."
        )
    if code == "ResourceNotFoundException":
        return StoreRefused(
            f"Expected the table of the idempotency store {place}, and it is not there (or in another region). "
            "Create it with: celery-idempotent --store URL schema --apply"
        )
    if code == "ValidationException":
        return StoreRefused(
            f"The idempotency store {place} refused a request ({message}). Is it a table of ours, "
            "with the one key attribute 'key', a string?"
        )
    return StoreUnreachable(f"The idempotency store {place} cannot serve ({code}: {message}).")


def code(error: StoreError) -> str:
    """Return the service's own word for an error that it answered, or "" if it did not answer."""
    cause = error.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, ClientError) else ""
