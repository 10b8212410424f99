"""Which ratio of prefill to decode groups serves most at equal GPUs: simulated, and small on real engines."""
