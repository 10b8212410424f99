"""The real vLLM under our launcher, beside the same vLLM alone."""
