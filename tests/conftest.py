"""What holds for all tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: As Debian, Google and the others call it.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# A busy machine stops a test for longer than hypothesis' deadline of 200 ms; time is measured by the benchmarks. The
# same examples every time, so that a red run is a change's fault; TWINPOOL_EXPLORE=1 looks for new ones.
settings.register_profile("twinpool", deadline=None, derandomize="TWINPOOL_EXPLORE" not in os.environ)
settings.load_profile("twinpool")

# Python 3.11 makes an event loop for whoever asks first without having one. pytest-asyncio asks, puts that loop back
# after its first test and never closes it, which the collector then reports as an error in some later test.
asyncio.set_event_loop(None)


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Return what opens a page in a headless browser with more options and returns its output; skips without one."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def _browse(url: str, *options: str, size: str = "1280,800") -> str:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        command += ["--disable-background-networking", "--disable-component-update"]
        command += [f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={size}", "--virtual-time-budget=5000"]
        done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return _browse
