"""What holds for all tests."""

import asyncio
import os

from hypothesis import settings

# A busy machine stops a test for longer than hypothesis' deadline of 200 ms; time is measured by the benchmarks. The
# same examples every time, so that a red run is a change's fault; TWINPOOL_EXPLORE=1 looks for new ones.
settings.register_profile("twinpool", deadline=None, derandomize="TWINPOOL_EXPLORE" not in os.environ)
settings.load_profile("twinpool")

# Python 3.11 makes an event loop for whoever asks first without having one. pytest-asyncio asks, puts that loop back
# after its first test and never closes it, which the collector then reports as an error in some later test.
asyncio.set_event_loop(None)
