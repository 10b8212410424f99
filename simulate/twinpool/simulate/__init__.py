"""Pools in virtual time: the very functions that decide in production, on request traces. Never a measurement."""
