"""HTTP requests that take effect once: middlewares for the Idempotency-Key header.

`IdempotencyMiddleware` is that for ASGI; those for WSGI and Django are in `celery_idempotent.http.wsgi` and
`celery_idempotent.http.django`.
"""

from __future__ import annotations

from .asgi import IdempotencyMiddleware, accepted
from .inside import Answered, abegin, begin
from .options import INSIDE, UNGUARDED, HttpOptions, Options
from .response import Response

__all__ = [
    "INSIDE",
    "UNGUARDED",
    "Answered",
    "HttpOptions",
    "IdempotencyMiddleware",
    "Options",
    "Response",
    "abegin",
    "accepted",
    "begin",
]
