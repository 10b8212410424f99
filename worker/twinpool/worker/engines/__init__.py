"""The engines a worker can run."""
