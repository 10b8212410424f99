"""Sockets, processes, clocks and the Kubernetes API: everything that :mod:`twinpool.router.logic` may not touch."""
