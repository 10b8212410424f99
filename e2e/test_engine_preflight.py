"""The preflight with the engine's own torch, gloo over TCP: a slowed link is named, and so is each way not to meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.localcluster.progress import Progress
from twinpool.localengine.image import serving_environment
from twinpool.localengine.install import ensure_engine
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = pytest.mark.engine

#: Stands for a bad cable: whatever rank 1 and rank 3 send each other takes 50 ms longer.
SLOWED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from twinpool.worker.shell.preflight_rank import Ranks
exchange = Ranks.exchange
def slowed(self, pair, data):
    if pair == (1, 3):
        time.sleep(0.05)
    exchange(self, pair, data)
Ranks.exchange = slowed
from twinpool.worker.__main__ import main
main(sys.argv[2:])
"""
ECHO = ("/bin/echo", "this is the engine")
_addresses = count(1)


class Pod:
    """One pod's preflight; its engine is ``echo``."""

    def __init__(self, engine: Engine, folder: Path, name: str, python: str, **flags: Any) -> None:
        self.result = folder / f"{name}.json"
        words = {"python": python, "pod": name, "local": 1, "port": 29511, "result": self.result, "budget": 20, **flags}
        zipapp = folder / "worker.pyz"
        self.process = subprocess.Popen(
            [engine.python, zipapp, "preflight", *(f"--{key}={value}" for key, value in words.items()), "--", *ECHO],
            env={**serving_environment(engine), "HOME": os.environ.get("HOME", "/")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Return the exit code, the result and everything that was printed."""
        printed = "".join(self.process.communicate(timeout=180))
        return self.process.returncode, json.loads(self.result.read_text()), printed


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    """The installed vLLM, which brings torch."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return ensure_engine(Progress())


@pytest.fixture
def pod(engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Start pods whose rank 0 has an address of its own."""
    inject(tmp_path)
    leader = f"127.{192 + os.getpid() % 32}.{os.getpid() // 32 % 256}.{next(_addresses)}"
    started: list[Pod] = []

    def start(name: str, first: int, world: int, python: str = str(engine.python), meet: float = 90.0) -> Pod:
        started.append(Pod(engine, tmp_path, name, python, first=first, world=world, leader=leader, meet=meet))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_a_slowed_link_is_found_and_named(pod: Callable[..., Pod], engine: Engine, tmp_path: Path) -> None:
    script = tmp_path / "slowed.py"
    script.write_text(SLOWED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{engine.python}" "{script}" "$@"\n')
    python.chmod(0o755)
    pods = [pod(f"pod-{rank}", rank, 4, str(python)) for rank in range(4)]
    ends = [each.end() for each in pods]
    for code, result, printed in ends:
        assert code == 0, printed
        assert "this is the engine" in printed, "the process became the engine"
        assert (result["outcome"], result["backend"], result["world"]) == ("passed", "gloo", 4)
    found = ends[0][1]
    assert found["slowest"] == "pod-1 (rank 1) - pod-3 (rank 3)"
    assert any("the link pod-1 (rank 1) - pod-3 (rank 3) carries" in warning for warning in found["warnings"])
    assert f"twinpool-worker: {found['warnings'][0]}" in ends[0][2]
    assert len(found["links"]) == 6
    assert {each["kind"] for each in found["collectives"]} == {"all-reduce", "all-to-all"}
    assert all(result["seconds"] < 20 for _, result, _ in ends)


def test_a_wrong_world_size_is_named(pod: Callable[..., Pod]) -> None:
    ends = [each.end() for each in (pod("pod-0", 0, 2), pod("pod-1", 1, 3))]
    for code, result, printed in ends:
        assert (code, result["outcome"]) == (1, "failed")
        assert result["problem"].startswith("wrong world size: "), printed
        assert f"PreflightError: {result['problem']}" in printed
        assert "this is the engine" not in printed
    assert "pod pod-1, expects 3 ranks and others expect 2" in ends[0][1]["problem"]


def test_a_missing_peer_and_a_blocked_port_are_told_apart(pod: Callable[..., Pod]) -> None:
    _, alone, _ = pod("pod-0", 0, 2, meet=3.0).end()
    assert alone["problem"].startswith("missing peer: rank 1 did not come within 3 s (came: pod-0)")
    _, cut_off, _ = pod("pod-1", 1, 2, meet=3.0).end()
    assert cut_off["problem"].startswith("blocked port: rank 1 cannot reach port 29511 of rank 0 at 127.")


def test_the_ranks_of_one_pod_meet_without_others(pod: Callable[..., Pod], engine: Engine, tmp_path: Path) -> None:
    one = Pod(engine, tmp_path, "p", str(engine.python), first=0, world=2, leader="127.0.0.1", local=2, port=29512)
    code, result, printed = one.end()
    assert (code, result["outcome"]) == (0, "passed"), printed
    assert result["slowest"] == "p (rank 0) - p (rank 1)"


def test_an_image_without_torch_starts_its_engine(pod: Callable[..., Pod]) -> None:
    code, result, printed = pod("pod-0", 0, 2, python=sys.executable).end()
    assert (code, result["outcome"]) == (0, "skipped")
    assert "this is the engine" in printed
