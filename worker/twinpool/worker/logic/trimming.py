"""Which files of a KV tier give way when it has grown beyond its size. Pure.

vLLM 0.32 writes each block of a disk tier to a file of its own and never removes one; a file that is gone when it
should be read counts as a miss, and the block is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Share of its size that a tier is brought down to, so that not every look removes something.
AFTER = 0.9


@dataclass(frozen=True, slots=True)
class KvFile:
    """One block: its path, its size in bytes, and when it was written, in seconds."""

    path: str
    size: int
    written: float


def surplus(files: Iterable[KvFile], bound: int) -> tuple[KvFile, ...]:
    """Return the files to remove from a tier of ``bound`` bytes: none while it fits, else the oldest.

    By age, not by use: vLLM reads past the page cache and file systems do not keep the time of each read.
    """
    found = sorted(files, key=lambda file: (file.written, file.path))
    left = sum(file.size for file in found)
    if left <= bound:
        return ()
    gone = []
    for file in found:
        if left <= AFTER * bound:
            break
        gone.append(file)
        left -= file.size
    return tuple(gone)
