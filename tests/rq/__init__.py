"""Jobs of RQ, on real workers."""
