"""Kubernetes quantities as whole numbers: CPU in thousandths of a core, everything else in its own unit."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}


def amount(resource: str, quantity: object) -> int:
    """Return a quantity of a resource, rounded up as the API server rounds; 0 for what is none."""
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    suffix = text[len(digits) :]
    try:
        value = Fraction(digits) * (_SUFFIXES[suffix] if suffix else 1)
    except (ValueError, KeyError, ZeroDivisionError):
        return 0
    return ceil(value * 1000) if resource == "cpu" else ceil(value)
