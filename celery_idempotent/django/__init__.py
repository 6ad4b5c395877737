"""A Django app, for ``INSTALLED_APPS``: migrations of the store's tables, system checks, and records in the admin."""
