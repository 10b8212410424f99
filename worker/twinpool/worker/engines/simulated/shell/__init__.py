"""The I/O of the simulated engine: HTTP, the handoff's side channel, KV events."""
