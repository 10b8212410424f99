"""The decisions of the simulated engine. Pure: time, ids and requests come in as arguments, events go out."""
