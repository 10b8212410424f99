"""Every metric of Twinpool, declared once: the parts create their collectors from here, docs and dashboards read it."""
