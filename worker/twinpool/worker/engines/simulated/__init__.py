"""An engine without a model: vLLM's HTTP interface, handoff, events and metrics, with invented tokens and times.

It exists for scale, failure and demonstration runs on machines without a GPU. Times come from
:mod:`twinpool.core.timing`; nothing it answers and no time it takes is a measurement of a real engine.
"""
