"""The newest vLLM of the package index has every name that Twinpool uses; it is read, not run."""

from __future__ import annotations

import pytest

from twinpool.localcluster.progress import Progress
from twinpool.localengine import contract
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.newest import fetch_newest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_newest_vllm_lacks_no_name_that_twinpool_uses(request: pytest.FixtureRequest) -> None:
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        installed = contract.read(contract.installed_package(ensure_engine(Progress()).venv))
        version, package = fetch_newest(Progress())
        newest = contract.read(package)
        print(f"\nvLLM {version} beside the installed one:", *contract.changes(installed, newest), sep="\n  ")
    assert contract.missing(contract.needed(), newest) == []
