"""What the simulator and the planner take of the processor, and how that grows."""
