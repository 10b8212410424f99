"""The launcher's I/O: processes, HTTP, signals and files. It decides nothing."""
