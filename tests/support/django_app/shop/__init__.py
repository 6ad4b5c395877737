"""A project of Django, as `django-admin startproject` lays it out, with a Celery app."""

from .celery import app as celery_app

__all__ = ["celery_app"]
