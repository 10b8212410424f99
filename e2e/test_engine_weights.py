"""The real vLLM with a model of a hub: fetched by the launcher, found by vLLM, also when the hub is down."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from twinpool.localengine.hub import Hub, Repository
from twinpool.localengine.models import TINY
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("down", [False, True])
def test_a_model_is_fetched_once_and_found_by_vllm(engine: Engine, tmp_path: Path, *, down: bool) -> None:
    files = {path.name: path.read_bytes() for path in TINY.folder.iterdir() if path.is_file()}
    hub = Hub({"org/tiny": Repository(files)})
    home = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
    (tmp_path / "zipapp").mkdir()
    zipapp = inject(tmp_path / "zipapp")
    config = tiny_config(model_path="org/tiny", connector=None, role="aggregated")
    ip = f"127.{192 + os.getpid() % 32}.{os.getpid() // 64 % 256}.{1 + down}"
    pod = LauncherPod(engine, zipapp, tmp_path / "first", ip, config, home)
    try:
        pod.wait_ready()
        fetched = {
            name: hub.asked[f"GET /org/tiny/resolve/{hub.repositories['org/tiny'].commit}/{name}"] for name in files
        }
        assert set(fetched.values()) == {1}
        assert pod.status()["weights"]["stage"] == "done"
        first = pod.complete(prompt="one two", max_tokens=4)["choices"][0]["text"]
        if down:
            end(pod.process)
            hub.refuses = 503
            pod = LauncherPod(engine, zipapp, tmp_path / "second", ip, config, home)
            pod.wait_ready()
            assert pod.complete(prompt="one two", max_tokens=4)["choices"][0]["text"] == first
    finally:
        end(pod.process)
        hub.close()
