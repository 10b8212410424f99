"""Helm on the chart: built on first use, which shows its progress."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinpool.localcluster.helm import ensure_helm
from twinpool.localcluster.progress import Progress

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "twinpool"


@dataclass(frozen=True)
class Helm:
    """Helm with files of its own, on no cluster."""

    program: Path
    home: Path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run helm and return what it said."""
        homes = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        environment = {**os.environ, **homes, "KUBECONFIG": "/dev/null"}
        done = subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, check=False, timeout=120, env=environment
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def render(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects of the chart for a release ``twinpool`` in ``twinpool-system``."""
        place = ("--namespace=twinpool-system", "--kube-version=1.36.0")
        text = self.run("template", "twinpool", str(CHART), *place, *arguments).stdout
        return [body for body in yaml.safe_load_all(text) if body]


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The helm that the pinned module makes."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return Helm(ensure_helm(Progress()), tmp_path_factory.mktemp("helm"))
