"""``twinpool bench``: load on an endpoint, and what came of it."""
