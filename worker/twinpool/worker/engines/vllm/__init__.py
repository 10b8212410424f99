"""vLLM: an external program that the launcher starts with the right flags and never imports."""
