"""What holds for all tests."""

import asyncio

from hypothesis import settings

# A busy machine stops a test for longer than hypothesis' deadline of 200 ms; time is measured by the benchmarks.
settings.register_profile("twinpool", deadline=None)
settings.load_profile("twinpool")

# Python 3.11 makes an event loop for whoever asks first without having one. pytest-asyncio asks, puts that loop back
# after its first test and never closes it, which the collector then reports as an error in some later test.
asyncio.set_event_loop(None)
