"""Celery's and RQ's own test suites, with every task and every job guarded; see CONTRIBUTING.md."""
