"""The launcher in one file: it runs with the standard library alone, on the oldest Python that engine images have."""

import ast
import io
import stat
import subprocess
import sys
import zipfile

import pytest

from twinpool.worker import inject
from twinpool.worker.__main__ import main
from twinpool.worker.release import version

OLDEST = (3, 10)


def sources():
    with zipfile.ZipFile(io.BytesIO(inject.build())) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}


def imports(tree):
    """Yield every module imported outside ``if TYPE_CHECKING`` blocks."""
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_it_imports_the_standard_library_and_itself_only():
    carried = sources()
    for name, text in carried.items():
        for module in imports(ast.parse(text, name, feature_version=OLDEST)):
            top = module.partition(".")[0]
            if (name.rpartition("/")[2], top) in (("preflight_rank.py", "torch"), ("hub.py", "huggingface_hub")):
                continue  # in processes that end before the engine starts
            if top != "twinpool":
                assert top in sys.stdlib_module_names, f"{name} imports {module}"
            elif module != "twinpool.worker.engines.simulated.server":
                path = module.replace(".", "/")
                assert {f"{path}.py", f"{path}/__init__.py"} & set(carried) or module == "twinpool.core", module


def test_the_simulated_engine_stays_out():
    assert not [name for name in sources() if "simulated/" in name]


def test_equal_sources_give_equal_bytes():
    assert inject.build() == inject.build()


def test_the_file_runs_alone(tmp_path, capsys):
    assert main(["inject", str(tmp_path)]) == 0
    target = tmp_path / "worker.pyz"
    assert str(target) in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["worker.pyz"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    # -I: no PYTHONPATH, no user packages; -S: no site-packages, so nothing of ours is installed there.
    done = subprocess.run([sys.executable, "-IS", target, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version()
    done = subprocess.run([sys.executable, "-IS", target, "run"], capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr) == (
        1,
        "twinpool-worker: TWINPOOL_WORKER is not set - let the operator set it\n",
    )


def test_a_missing_folder_is_named(tmp_path, capsys):
    assert main(["inject", str(tmp_path / "none")]) == 1
    assert "No such file or directory - mount a writable emptyDir" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inject, "build", fail)
    with pytest.raises(inject.CannotInject, match="No space left on device"):
        inject.inject(tmp_path)
    assert not list(tmp_path.iterdir())


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == version()
