"""Errors that carry the whole story to a user: what is wrong, where, and what to do.

Every part raises subclasses of :class:`TwinpoolError` for things a user can act on. A bug raises anything else.
Standard library only: the worker's launcher runs inside images that hold nothing of ours.
"""

from __future__ import annotations


class TwinpoolError(Exception):
    """A problem that the reader can act on.

    Parameters
    ----------
    problem:
        What is wrong and where, in one sentence without a final full stop.
    remedy:
        What to do about it, in the imperative; empty only when nothing can be done.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        """Return one line: the problem, then the remedy after a dash."""
        return f"{self.problem} - {self.remedy}" if self.remedy else self.problem


class InvalidValue(TwinpoolError):
    """A value that the user gave cannot be used; nothing was changed."""
