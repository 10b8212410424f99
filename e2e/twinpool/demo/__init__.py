"""The demonstration behind ``make demo``: from nothing to an answer, on one machine, with proof of the handoff."""
