"""``make demo ENGINE=simulated`` without a terminal: an answer, the proof, exit code 0, and no process left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.localcluster.paths import state_dir
from twinpool.localcluster.waiting import wait_until

pytestmark = pytest.mark.cluster
NAME = "demo-test"


def left_over() -> list[str]:
    """Return the command lines of the processes that belong to the demo's cluster."""
    marks = (f"{state_dir(NAME)}/".encode(), f"--name={NAME}".encode())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if any(mark in text for mark in marks):
            found.append(text[:200].decode(errors="replace"))
    return found


def test_the_demo_ends_with_an_answer_and_leaves_nothing(binaries: object) -> None:
    command = [sys.executable, "-m", "twinpool.demo", "up", "--engine", "simulated", "--name", NAME]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "prompt tokens that came by KV transfer" in done.stdout
    assert "s  in all" in done.stdout
    assert left_over() == []


def test_a_killed_demo_leaves_nothing(binaries: object) -> None:
    command = [sys.executable, "-m", "twinpool.demo", "up", "--engine", "simulated", "--name", NAME]
    demo = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert demo.stdout
    for line in demo.stdout:
        if "from manifest to ready" in line:
            break
    assert left_over()
    demo.kill()
    demo.wait()
    demo.stdout.close()
    wait_until(lambda: left_over() == [], 20, "no process is left")
