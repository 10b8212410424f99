"""A tree of processes ends with its holder: each test runs a holder of its own, as it adopts orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from twinpool.localcluster.processes import MARKER, end_marked, marked
from twinpool.localcluster.waiting import WaitTimeout, wait_until

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import pathlib, sys, time
from twinpool.localcluster.processes import ProcessTree
folder = pathlib.Path(sys.argv[1])
tree = ProcessTree(folder, str(folder))
env = {"PATH": "/usr/bin:/bin"}
"""


def hold(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER + script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_children_die_with_a_killed_holder(tmp_path: Path) -> None:
    script = 'tree.spawn("a", ["sleep", "1000"], env, folder); print("up", flush=True); time.sleep(1000)'
    with hold(tmp_path, script) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "up\n"
        assert len(marked(str(tmp_path))) == 1
        holder.kill()
    wait_until(lambda: not marked(str(tmp_path)), 5, "the child is gone")


def test_ends_are_told_once_with_their_codes_and_logs_are_kept(tmp_path: Path) -> None:
    script = """
tree.spawn("a", ["sh", "-c", "echo said; exit 3"], env, folder)
tree.spawn("b", ["sleep", "1000"], env, folder)
seen = {}
while not seen: seen = tree.reap()
assert seen == {"a": 3}, seen
assert tree.pid("a") is None
tree.kill("b"); tree.kill("b")
assert tree.pid("b") is None and tree.reap() == {}
print(tree.log("a").read_text().strip())
"""
    with hold(tmp_path, script) as holder:
        out, err = holder.communicate(timeout=30)
    assert (out, err) == ("said\n", "")


def test_kill_all_ends_adopted_orphans_too(tmp_path: Path) -> None:
    script = """
tree.spawn("a", ["sh", "-c", "sleep 1000 & sleep 1000 & echo $! > up; wait"], env, folder)
while not (folder / "up").exists(): time.sleep(0.01)
tree.kill_all()
print("gone", flush=True)
"""
    with hold(tmp_path, script) as holder:
        out, err = holder.communicate(timeout=30)
    assert (out, err) == ("gone\n", "")
    assert marked(str(tmp_path)) == []


def test_what_an_earlier_cluster_left_is_ended(tmp_path: Path) -> None:
    env = {**os.environ, MARKER: str(tmp_path)}
    with subprocess.Popen(["sleep", "1000"], env=env) as left:
        wait_until(lambda: marked(str(tmp_path)), 5, "the process carries its mark")
        reaper = subprocess.Popen([sys.executable, "-c", "pass"])
        reaper.wait()
        # A zombie has no environment: it is gone as soon as it is dead.
        end_marked(str(tmp_path))
        assert left.wait(timeout=5) == -signal.SIGKILL
    end_marked(str(tmp_path))


def test_wait_until_tells_what_it_saw_last() -> None:
    assert wait_until(lambda: 7, 1, "seven") == 7
    with pytest.raises(WaitTimeout, match=r"food: not after 0 s; last seen: \[\]"):
        wait_until(list, 0, "food")
    with pytest.raises(WaitTimeout, match="ZeroDivisionError"):
        wait_until(lambda: 1 // 0, 0.02, "infinity", interval=0.01)
