"""The shop on Django, of which each application has its own settings."""

from __future__ import annotations

from typing import Any

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application

from benchmarks.http_apps.shop import order

__all__ = ["application", "serve"]


def serve(request: Any) -> Any:
    """Take an order."""
    from django.http import HttpResponse, JsonResponse

    status, content = order(request.GET.dict(), request.path)
    if "html" in request.GET:
        return HttpResponse(f"<p>{content['run']}</p>", status=status)
    return JsonResponse(content, status=status)


def application(urls: str, **given: Any) -> Any:
    """Return the application for WSGI, with these settings."""
    settings.configure(
        ALLOWED_HOSTS=["*"], ROOT_URLCONF=urls, SECRET_KEY="of a benchmark", LOGGING_CONFIG=None, **given
    )
    django.setup()
    return get_wsgi_application()
