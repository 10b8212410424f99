"""Weights come from the hub once for all pods of a node, are checked, and how far they are is told."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.localengine.hub import LARGE, Hub, Repository
from twinpool.localengine.pod import worker_config
from twinpool.worker.logic import weights
from twinpool.worker.logic.weights import Progress, WeightFile
from twinpool.worker.shell import hub as shell
from twinpool.worker.shell.contents import Teller, WeightsError
from twinpool.worker.shell.weights import check_folder, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANDOM = random.Random(3)
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": RANDOM.randbytes(LARGE + 7),
    "model-00001-of-00002.safetensors": RANDOM.randbytes(300_000),
    "model-00002-of-00002.safetensors": RANDOM.randbytes(200_000),
    "pytorch_model.bin": RANDOM.randbytes(5000),
    "original/consolidated.safetensors": RANDOM.randbytes(5000),
    "picture.png": RANDOM.randbytes(5000),
}
WANTED = sorted(list(FILES)[:4])
TOTAL = sum(len(FILES[name]) for name in WANTED)
FIRST = "model-00001-of-00002.safetensors"
#: The hub's client writes 10 MiB at a time.
AT_LEAST = 10 * 2**20


def names(*files: str) -> list[str]:
    return [file.name for file in weights.choose(WeightFile(name, 1) for name in files)]


def test_one_kind_of_weights_is_fetched_and_what_stands_beside_it() -> None:
    assert names(*FILES) == WANTED
    assert names("a.bin", "b.pt", "x.py", "sub/y.json", "a.gguf") == ["a.bin", "sub/y.json", "x.py"]
    assert names("model.safetensors", "consolidated.safetensors", "params.json") == [
        "consolidated.safetensors",
        "params.json",
    ]
    assert names("b.pt") == ["b.pt"]
    assert names("README.md") == []


def test_a_file_is_called_by_its_content() -> None:
    assert WeightFile("a", 1, sha256="s", blob="b").content == "s"
    assert WeightFile("a", 1, blob="b").content == "b"


def test_names_with_wildcards_match_themselves_alone() -> None:
    assert weights.exact(["a[1]*.json", "b"]) == ["a[[]1][*].json", "b"]


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, [("org/m", None)]),
        ({"model_revision": "v1"}, {"HF_HUB_OFFLINE": "0"}, [("org/m", "v1")]),
        ({"draft_model": "org/d"}, {}, [("org/m", None), ("org/d", None)]),
        ({"model_path": "/models/m", "draft_model": "org/d"}, {}, [("org/d", None)]),
        ({"model_path": "/models/m"}, {}, []),
        ({"model_path": "/models/m", "adapters": ("a=org/a", "b=/models/b")}, {}, [("org/a", None)]),
        ({"engine": "simulated"}, {}, []),
        ({"args": ("--load-format=tensorizer",)}, {}, []),
        ({}, {"HF_HUB_OFFLINE": "1"}, []),
        ({}, {"VLLM_USE_MODELSCOPE": "True"}, []),
    ],
)
def test_what_is_fetched(settings: dict[str, Any], environment: dict[str, str], expected: list[Any]) -> None:
    config = worker_config(**settings)
    assert list(weights.repositories(config, environment)) == expected
    assert weights.wanted(config, environment) == bool(expected)


def test_a_checksum_is_wanted_wherever_the_model_is() -> None:
    assert weights.wanted(worker_config(model_path="/m", model_checksum="sha256:0"), {})
    assert not weights.wanted(worker_config(model_path="/m", model_checksum="sha256:0", engine="simulated"), {})


def test_progress_is_told_in_words_and_read_back() -> None:
    half = Progress("downloading", 12_300_000_000, 141_000_000_000, "abc")
    assert str(half) == "weights are downloaded: 12.3 of 141.0 GB (8 %)"
    assert str(Progress("waiting")) == "weights: another pod of the node fetches them"
    assert Progress.from_json(half.to_json()) == half
    for text in ("", "[]", "{}", half.to_json().replace("downloading", "dancing")):
        assert Progress.from_json(text) is None


def test_a_list_of_checksums_is_read_strictly() -> None:
    digest = "0" * 64
    assert weights.listed(f"{digest}  ./a\n{digest} *b/c\n", "S") == {"a": digest, "b/c": digest}
    for text in ("", "nothing", f"{digest}  /etc/passwd", f"{digest}  a/../../b", f"{digest[1:]}  a"):
        with pytest.raises(InvalidValue, match="S"):
            weights.listed(text, "S")


def test_files_that_no_list_names_are_told() -> None:
    there = ["a.safetensors", "evil.py", "sub/b.json", "README.md", "SHA256SUMS"]
    assert weights.strangers(there, {"a.safetensors": ""}) == ["evil.py", "sub/b.json"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub({"org/m": Repository(dict(FILES))})
    yield served
    served.close()


class Pod:
    """The process that fetches, as the launcher of a pod starts it; pods of one node share ``cache``."""

    def __init__(self, hub: Hub, cache: Path, number: int = 0, **settings: Any) -> None:
        self.file = cache.parent / f"weights-{number}.json"
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TWINPOOL_WORKER": worker_config(**settings).to_json(),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twinpool.worker", "weights", str(self.file)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def progress(self) -> Progress:
        found = Progress.from_json(self.file.read_bytes())
        assert found is not None
        return found

    def reaches(self, stage: str, least: int = 0) -> Progress:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.file.exists() and (now := self.progress()).stage == stage and now.done >= least:
                return now
            time.sleep(0.02)
        pytest.fail(f"never {stage} with {least} bytes")


@pytest.fixture
def slow(hub: Hub) -> Hub:
    """A hub that stops half way through a file so long that the client has written some of it."""
    hub.repositories["org/m"].files[FIRST] = RANDOM.randbytes(2 * AT_LEAST + 4_000_000)
    hub.flows.clear()
    return hub


def fetched(cache: Path) -> Path:
    (commit,) = (cache / "hub/models--org--m/snapshots").iterdir()
    return commit


def downloads(hub: Hub, name: str) -> int:
    return sum(count for what, count in hub.asked.items() if what.startswith("GET ") and what.endswith(f"/{name}"))


def test_a_model_is_fetched_and_checked(hub: Hub, tmp_path: Path) -> None:
    pod = Pod(hub, tmp_path / "cache")
    assert pod.end() == (0, "")
    assert pod.progress() == Progress("done", TOTAL, TOTAL, hub.repositories["org/m"].commit)
    folder = fetched(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)


def test_progress_counts_what_is_on_its_way(slow: Hub, tmp_path: Path) -> None:
    pod = Pod(slow, tmp_path / "cache")
    seen = pod.reaches("downloading", AT_LEAST)
    assert seen.done < seen.total == sum(len(slow.repositories["org/m"].files[name]) for name in WANTED)
    slow.flows.set()
    assert pod.end() == (0, "")


def test_pods_of_a_node_fetch_a_model_once(slow: Hub, tmp_path: Path) -> None:
    first = Pod(slow, tmp_path / "cache", 1)
    first.reaches("downloading")
    second = Pod(slow, tmp_path / "cache", 2)
    second.reaches("waiting", AT_LEAST)  # what the other one fetches is its progress too
    slow.flows.set()
    assert (first.end(), second.end()) == ((0, ""), (0, ""))
    assert [downloads(slow, name) for name in WANTED] == [1] * len(WANTED)


def test_a_download_goes_on_after_a_restart_with_the_files_that_are_whole(slow: Hub, tmp_path: Path) -> None:
    slow.stops = {FIRST}
    pod = Pod(slow, tmp_path / "cache")
    small = sum(len(FILES[name]) for name in WANTED if name != FIRST)
    pod.reaches("downloading", AT_LEAST + small)
    pod.process.kill()
    pod.end()
    leftover = next((tmp_path / "cache/hub/models--org--m/blobs").glob("*.incomplete"))
    os.utime(leftover, (1, 1))
    slow.flows.set()
    for _ in range(2):
        assert Pod(slow, tmp_path / "cache").end() == (0, "")
        assert not leftover.exists()
        assert [downloads(slow, name) for name in WANTED] == [2 if name == FIRST else 1 for name in WANTED]


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    hub.breaks[FIRST] = 1
    code, said = Pod(hub, tmp_path / "cache").end()
    assert code == 0, said
    assert (fetched(tmp_path / "cache") / FIRST).read_bytes() == FILES[FIRST]


def test_a_file_that_arrives_damaged_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.spoils[FIRST] = 1
    code, said = Pod(hub, tmp_path / "cache").end()
    assert code == 0, said
    assert f"{FIRST} is not what the hub says" in said
    assert (fetched(tmp_path / "cache") / FIRST).read_bytes() == FILES[FIRST]


@pytest.mark.parametrize("name", [FIRST, "config.json"])
def test_a_file_that_stays_damaged_is_named(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.spoils[name] = 9
    code, said = Pod(hub, tmp_path / "cache").end()
    assert code == 1
    assert f"WeightsError: org/m at main: {name} has another checksum than the hub says, twice" in said


def test_a_hub_that_is_down_is_not_needed_for_what_is_there(hub: Hub, tmp_path: Path) -> None:
    assert Pod(hub, tmp_path / "cache").end()[0] == 0
    hub.refuses = 503
    pod = Pod(hub, tmp_path / "cache")
    code, said = pod.end()
    assert code == 0, said
    assert "the hub does not answer for org/m at main" in said
    assert pod.progress().offline
    (fetched(tmp_path / "cache") / FIRST).unlink()
    code, said = Pod(hub, tmp_path / "cache").end()
    assert code == 1
    assert "WeightsError: org/m at main is not to be had from the hub" in said


@pytest.mark.parametrize("repository", ["org/other", "org/m"])
def test_what_the_hub_refuses_is_told(hub: Hub, tmp_path: Path, repository: str) -> None:
    hub.refuses = 401 if repository == "org/m" else None
    code, said = Pod(hub, tmp_path / "cache", model_path=repository).end()
    assert code == 1
    assert f"WeightsError: {repository} at main is not to be had from the hub" in said
    assert "model.secretRef" in said


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/hub").write_text("a file")
    code, said = Pod(hub, tmp_path / "cache").end()
    assert code == 1
    assert f"cannot be fetched into {tmp_path}/cache/hub/models--org--m" in said


def test_an_image_without_the_hubs_client_leaves_it_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run(worker_config(), {}, tmp_path / "weights.json") == 0
    assert "org/m is not fetched before the engine starts: its image has no huggingface_hub" in capfd.readouterr().err


def test_a_damaged_record_is_as_none(tmp_path: Path) -> None:
    file = tmp_path / shell.RECORD
    for text in ("", "[]", '{"commits": {"a": 1}, "checked": []}'):
        file.write_text(text)
        assert shell._Record.read(file).commits == {}


class Folder:
    """A model on a volume with its list of checksums."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in WANTED:
            (path / name).write_bytes(FILES[name])
        lines = [f"{hashlib.sha256(FILES[name]).hexdigest()}  ./{name}" for name in WANTED]
        (path / "SHA256SUMS").write_text("\n".join(lines) + "\n")
        self.checksum = f"sha256:{hashlib.sha256((path / 'SHA256SUMS').read_bytes()).hexdigest()}"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "model").mkdir()
    return Folder(tmp_path / "model")


@pytest.fixture
def teller(tmp_path: Path) -> Iterator[Teller]:
    made = Teller(tmp_path / "weights.json")
    yield made
    made.close()


def test_a_model_on_a_volume_is_checked(hub: Hub, folder: Folder, tmp_path: Path) -> None:
    pod = Pod(hub, tmp_path / "cache", model_path=str(folder.path), model_checksum=folder.checksum)
    assert pod.end() == (0, "")
    assert pod.progress() == Progress("done", TOTAL, TOTAL)
    assert not hub.asked


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / FIRST).write_bytes(b"x"), f"has other content than listed in {FIRST}"),
        (lambda path: (path / FIRST).unlink(), f"lacks {FIRST}"),
        (lambda path: (path / "evil.py").write_text("import os"), "has, unlisted, evil.py"),
        (lambda path: (path / "SHA256SUMS").unlink(), "model.checksum needs"),
        (lambda path: (path / "SHA256SUMS").write_text("x"), "SHA256SUMS has the checksum sha256:"),
    ],
)
def test_a_model_on_a_volume_that_was_changed_is_refused(
    folder: Folder, teller: Teller, change: Any, words: str
) -> None:
    change(folder.path)
    with pytest.raises(WeightsError, match=words):
        check_folder(folder.path, folder.checksum, teller)
