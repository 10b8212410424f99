"""Data processes share one listener, and the kernel gives connections to whoever is there first: some get hotter.

Connections stay where they are, so a process that works more than its siblings asks some of its clients to come again:
after their answer it closes their connection, and the next one may land elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Below this share of a core nobody is hot.
BUSY: Final = 0.5
#: How many times the mean of its siblings a hot process works.
HOTTER: Final = 1.3
#: Share of its connections that it gives up in a second.
SHARE: Final = 0.05


def to_shed(cpu: Sequence[float], clients: Sequence[int]) -> list[int]:
    """Return how many connections each process should give up now.

    ``cpu`` is the share of a core that each has used, ``clients`` how many connections each has.
    """
    result = []
    for own, count in zip(cpu, clients, strict=True):
        others = (sum(cpu) - own) / (len(cpu) - 1) if len(cpu) > 1 else own
        hot = own > BUSY and own > HOTTER * others and count > 1
        result.append(max(1, int(count * SHARE)) if hot else 0)
    return result
