"""Decisions of the router: no sockets, no clocks, no randomness of their own."""
