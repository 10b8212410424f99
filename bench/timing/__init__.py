"""Is the simulator right? Times fitted on some runs of the real vLLM, other runs foretold and compared."""
