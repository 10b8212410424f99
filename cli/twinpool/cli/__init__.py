"""The command line: what users and people who build Twinpool type."""
