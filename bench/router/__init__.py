"""What the router costs per request and per token, beside vLLM's own router."""
