"""Routing rules beside each other on request traces, in virtual time."""
