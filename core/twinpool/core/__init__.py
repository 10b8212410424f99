"""What a pool is and how long things take: API types, names, units. No I/O, and nothing of the other parts."""
