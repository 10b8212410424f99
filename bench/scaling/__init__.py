"""Rules that decide how many groups a pool has, beside each other on the same work. Simulated, never measured."""
