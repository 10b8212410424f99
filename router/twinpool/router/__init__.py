"""The router: one OpenAI-compatible endpoint in front of a pool's prefill and decode workers.

``logic`` decides (pure functions and plain bookkeeping), ``shell`` talks to sockets, processes and Kubernetes.
"""
