"""What the operator costs on a large cluster: restart, idle CPU, memory, and its answer to events."""
