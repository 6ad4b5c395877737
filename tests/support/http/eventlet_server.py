"""The application of the tests on Flask, on eventlet's own server, for gunicorn has none of eventlet's any more."""

from __future__ import annotations

import eventlet

eventlet.monkey_patch()

import sys  # noqa: E402

from eventlet import wsgi  # noqa: E402

from tests.support.http.wsgi_app import app  # noqa: E402

wsgi.server(eventlet.listen(("127.0.0.1", int(sys.argv[2]))), app, log_output=False)
