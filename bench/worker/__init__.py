"""How much CPU the simulated engine costs, so that it can stand for an engine without being the bottleneck itself."""
