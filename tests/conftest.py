"""What holds for all tests."""

import asyncio

# Python 3.11 makes an event loop for whoever asks first without having one. pytest-asyncio asks, puts that loop back
# after its first test and never closes it, which the collector then reports as an error in some later test.
asyncio.set_event_loop(None)
