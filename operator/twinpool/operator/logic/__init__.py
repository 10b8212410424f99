"""What should be: pure functions from what was observed to actions and a status. No I/O, no clock, no randomness."""
