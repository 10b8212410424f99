"""The operator's I/O: watches, the work queue, writes to the API server, the Lease, and the health endpoint."""
