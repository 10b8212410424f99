"""``twinpool live``: a pool at work, on a page of this machine's browser."""
