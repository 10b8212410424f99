"""Placement: how fast, how good beside an exact solver, and how good beside what others do."""
