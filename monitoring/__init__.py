"""Dashboards and alerts as data, and what is generated from it. Nothing that ships imports this."""
