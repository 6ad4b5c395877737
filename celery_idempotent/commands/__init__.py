"""The commands of both command lines, one module each: ``celery -A proj idempotency`` and ``celery-idempotent``.

A module is imported when its command is asked for, and not before: who asks for one waits for no other, and a command
line that is only looked at loads no driver.
"""
