"""What the launcher decides, as pure functions: no I/O, no clock, no threads."""
