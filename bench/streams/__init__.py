"""What the router adds to a request in time, and how it bears many streams and many endpoints."""
