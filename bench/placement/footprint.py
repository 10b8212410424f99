"""Prints the peak resident memory, in MiB, of a process that makes one full plan."""

from __future__ import annotations

import resource
from random import Random

from bench.placement.cases import large
from twinpool.operator.logic.placement.place import place

if __name__ == "__main__":
    case = large(Random(1))
    place(case.groups, case.nodes, {}, case.topology, case.constraints)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
