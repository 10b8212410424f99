"""Strict parsing of the two units a pool's manifest knows: durations and byte quantities.

Strict means that ``800``, ``25GB`` and ``"25Gi "`` are refused: a guessed unit is a wrong size ten times out of
eleven. The CRD refuses the same strings with the same patterns, so a manifest that ``kubectl apply`` accepts parses.
"""

from __future__ import annotations

import re

from twinpool.core.errors import InvalidValue

#: ``800ms``, ``5s``, ``20m``, ``1h``: one positive whole number and one unit.
DURATION_PATTERN = r"^[1-9][0-9]{0,8}(ms|s|m|h)$"

#: ``16``, ``500Mi``, ``25Gi``: bytes with the binary or decimal suffixes of Kubernetes.
BYTES_PATTERN = r"^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)?$"

#: ``4``, ``0.5``, ``500m``: CPU cores as Kubernetes writes them.
CPU_PATTERN = r"^([1-9][0-9]{0,5}m|[0-9]{1,4}\.[0-9]{1,3}|[1-9][0-9]{0,3})$"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


def parse_duration(text: str) -> float:
    """Return the seconds that ``text`` (such as ``800ms``) stands for.

    Raises
    ------
    InvalidValue
        When the text is not one positive whole number followed by ``ms``, ``s``, ``m`` or ``h``.
    """
    match = re.match(DURATION_PATTERN, text)
    if match is None:
        raise InvalidValue(f"{text!r} is not a duration", "write a whole number and a unit: 800ms, 5s, 20m or 1h")
    unit = match.group(1)
    return int(text[: -len(unit)]) * _SECONDS[unit]


def parse_cpu(text: str) -> float:
    """Return the CPU cores that ``text`` (such as ``500m``) stands for.

    Raises
    ------
    InvalidValue
        When the text is not a number of cores as Kubernetes writes it.
    """
    if re.match(CPU_PATTERN, text) is None:
        raise InvalidValue(f"{text!r} is not a number of CPU cores", "write 4, 0.5 or 500m")
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` (such as ``25Gi``) stands for.

    Raises
    ------
    InvalidValue
        When the text is not a positive whole number with one of Kubernetes' suffixes.
    """
    match = re.match(BYTES_PATTERN, text)
    if match is None:
        raise InvalidValue(f"{text!r} is not a size in bytes", "write a whole number and a suffix: 500Mi, 25Gi or 1Ti")
    suffix = match.group(1) or ""
    return int(text[: len(text) - len(suffix)]) * _BYTES[suffix]
