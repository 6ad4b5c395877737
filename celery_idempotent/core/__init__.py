"""The algorithm: it knows no framework and no server."""
