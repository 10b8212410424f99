"""Each image installs one extra and carries only that extra's dependencies: every module of the part must import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Runs inside the clean environment: imports every module below twinpool.<part> and twinpool.core.
IMPORT_ALL = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
part, skipped = sys.argv[1], set(sys.argv[2:])
package = importlib.import_module(f"twinpool.{part}")
names = [module.name for module in pkgutil.walk_packages(package.__path__, f"twinpool.{part}.")]
for name in names:
    if not any(name.startswith(prefix) for prefix in skipped):
        importlib.import_module(name)
print(len(names))
"""

# twinpool.core needs pydantic for the API types only; router and worker must not.
CORE_WITHOUT_PYDANTIC = "import twinpool.core.protocol, twinpool.core.errors, twinpool.core.units"


def _uv() -> str:
    cache = Path(
        os.environ.get("TWINPOOL_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinpool"
    )
    uv = cache / "boot" / "bin" / "uv"
    found = str(uv) if uv.exists() else shutil.which("uv")
    assert found, "uv is missing: run the tests through make, which installs it"
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([_uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("part", ["operator", "router", "worker", "cli"])
def test_a_part_runs_with_its_own_extra_alone(part: str, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    uv = _uv()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python)]
    subprocess.run([*install, "-r", str(ROOT / "requirements" / f"{part}.txt"), str(wheel)], check=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for code, arguments in ((CORE_WITHOUT_PYDANTIC, []), (IMPORT_ALL, [part])):
        done = subprocess.run(
            [str(python), "-c", code, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    script = tmp_path / "venv" / "bin" / ("twinpool" if part == "cli" else f"twinpool-{part}")
    helped = subprocess.run([str(script), "--help"], capture_output=True, text=True, env=environment, check=False)
    assert helped.returncode == 0, helped.stderr
