"""What is wrong with a machine or a model's files is named before the start, and stops it only where it must."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.localengine.pod import worker_config
from twinpool.worker.logic import machine
from twinpool.worker.logic.machine import (
    FIELDS,
    LEAST_SHM,
    Finding,
    Gpu,
    Machine,
    clock_finding,
    findings,
    version_finding,
)
from twinpool.worker.shell import machine as shell
from twinpool.worker.shell.host import Host
from twinpool.worker.shell.machine import look

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.core.protocol import WorkerConfig

WELL = Gpu("0", "NVIDIA H100 80GB HBM3", "580.65.06", 0, remap_failed=False, slowed=())


def changed(**changes: Any) -> Gpu:
    return replace(WELL, **changes)


def config(**changes: Any) -> WorkerConfig:
    return worker_config(**changes)


def test_what_nvidia_smi_prints_is_read() -> None:
    text = (
        "0, NVIDIA H100 80GB HBM3, 580.65.06, 0, No, Not Active, Not Active\n"
        "1, NVIDIA A100-SXM4-80GB, 550.54.15, 7, Yes, Active, Active\n"
        "2, NVIDIA L4, 550.54.15, [N/A], [N/A], [N/A], Not Active\n"
        "Failed to initialize something\n"
    )
    well, ill, unknown = machine.gpus(text)
    assert well == WELL
    assert (ill.uncorrected, ill.remap_failed, ill.slowed) == (7, True, ("heat", "a power brake"))
    assert (unknown.uncorrected, unknown.remap_failed, unknown.slowed) == (0, False, ())


@pytest.mark.parametrize(
    ("source", "cuda"),
    [("cuda: Optional[str] = '13.0'\nhip = None", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda = None", ""), ("", "")],
)
def test_the_cuda_of_torch_is_read_from_its_source(source: str, cuda: str) -> None:
    assert machine.cuda_of(source) == cuda


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ('{"weight_map": {"a": "2.bin", "b": "1.bin", "c": "1.bin"}}', ("1.bin", "2.bin")),
        ("{", ()),
        ("[]", ()),
        ("{}", ()),
        ('{"weight_map": []}', ()),
    ],
)
def test_an_index_lists_each_file_once(text: str, files: tuple[str, ...]) -> None:
    assert machine.shards(text) == files


def found(seen: Machine, wanted: int = 1, ranks: int = 1) -> list[tuple[str, bool]]:
    return [(each.name, each.fatal) for each in findings(seen, wanted, ranks)]


@pytest.mark.parametrize(
    ("seen", "names"),
    [
        (Machine(gpus=(WELL,), cuda="13.0"), []),
        (Machine(gpus=(), cuda="13.0"), [("GpuCount", True)]),
        (Machine(gpus=(WELL, WELL)), [("GpuCount", False)]),
        (Machine(silent="nothing within 10 s"), [("GpuUnknown", False)]),
        (Machine(), []),
        (Machine(gpus=(changed(uncorrected=3),)), [("GpuMemoryErrors", False)]),
        (Machine(gpus=(changed(uncorrected=3, remap_failed=True),)), [("GpuMemoryDamaged", False)]),
        (Machine(gpus=(changed(slowed=("heat",)),)), [("GpuThrottled", False)]),
        (Machine(gpus=(changed(driver="535.104"),), cuda="13.0"), [("DriverTooOld", False)]),
        (Machine(gpus=(changed(driver="535.104"),), cuda="12.8"), []),
        (Machine(gpus=(changed(driver="535.104"),), cuda="99.1"), []),
        (Machine(gpus=(changed(driver="[N/A]"),), cuda="13.0"), []),
        (Machine(missing=("a", "b"), model_path="/m"), [("ModelIncomplete", True)]),
    ],
)
def test_each_fault_has_its_name(seen: Machine, names: list[tuple[str, bool]]) -> None:
    assert found(seen) == names


def test_a_pod_without_gpus_is_not_asked_about_them() -> None:
    assert found(Machine(gpus=(), silent="x"), wanted=0) == []


@pytest.mark.parametrize(
    ("size", "ranks", "names"),
    [(64 << 20, 2, ["SharedMemorySmall"]), (LEAST_SHM, 2, []), (64 << 20, 1, []), (None, 2, [])],
)
def test_shared_memory_matters_where_ranks_talk_over_it(size: int | None, ranks: int, names: list[str]) -> None:
    assert [name for name, _ in found(Machine(shm=size), 0, ranks)] == names


def test_findings_say_what_where_and_what_to_do() -> None:
    missing = tuple(f"{number}.bin" for number in range(5))
    (one,) = findings(Machine(missing=missing, model_path="/models/m"), 0, 1)
    assert str(one) == (
        "ModelIncomplete: /models/m lacks what its index lists: 0.bin, 1.bin, 2.bin and 2 more - "
        "copy the model again, in full; a git clone without git-lfs leaves pointers in place of files"
    )
    (few,) = findings(Machine(missing=missing[:1], model_path="/models/m"), 0, 1)
    assert "lists: 0.bin - " in str(few)
    (old,) = findings(Machine(gpus=(changed(driver="535.104"),), cuda="13.0"), 1, 1)
    assert "driver 535.104 is older than 580, from which on CUDA 13.0 of the image runs" in old.text


@pytest.mark.parametrize(
    ("date", "now", "behind"),
    [
        ("Mon, 30 Nov 2026 12:00:00 GMT", 1796040000.0, 0.0),
        ("Mon, 30 Nov 2026 12:00:00 GMT", 1796040030.5, 30.5),
        (None, 0.0, None),
        ("soon", 0.0, None),
    ],
)
def test_clocks_are_compared_by_the_date_of_an_answer(date: str | None, now: float, behind: float | None) -> None:
    assert machine.skew(date, now) == behind


def test_only_clocks_that_are_far_apart_are_a_finding() -> None:
    assert clock_finding(None, "10.0.0.1") is None
    assert clock_finding(1.5, "10.0.0.1") is None
    ahead, behind = clock_finding(60.0, "10.0.0.1"), clock_finding(-60.0, "10.0.0.1")
    assert ahead is not None
    assert behind is not None
    assert "clock is 60 s ahead of that of the leader's node at 10.0.0.1" in ahead.text
    assert "60 s behind" in behind.text


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_the_gpus_are_asked_for_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "0, NVIDIA H100 80GB HBM3, 580.65.06, 0, No, Not Active, Not Active"
    fake_smi(tmp_path, f'echo "$1" > {tmp_path}/asked; echo "{line}"', monkeypatch)
    seen = look(config(gpus=1))
    assert seen.gpus == (WELL,)
    assert (tmp_path / "asked").read_text().strip() == f"--query-gpu={','.join(FIELDS)}"
    assert look(config(gpus=0)).gpus is None
    fake_smi(tmp_path, "echo 'Unable to determine the device handle'; exit 9", monkeypatch)
    assert look(config(gpus=1)).silent == "Unable to determine the device handle"
    monkeypatch.setattr(shell, "ASK_TIMEOUT", 0.05)
    fake_smi(tmp_path, "exec sleep 30", monkeypatch)
    assert look(config(gpus=1)).silent == "nothing within 0.05 s"
    (tmp_path / "nvidia-smi").write_text("\x7fELF")
    assert look(config(gpus=1)).silent == "Exec format error"
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look(config(gpus=1)) == Machine(shm=look(config()).shm, cuda=look(config(gpus=1)).cuda, model_path="org/m")


def test_the_models_files_are_compared_with_its_index(tmp_path: Path) -> None:
    settings = config(model_path=str(tmp_path))
    assert look(settings).missing == ()
    names = ("whole", "empty", "pointer", "absent")
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "whole").write_bytes(b"x" * 100)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert look(settings).missing == ("absent", "empty", "pointer")
    assert look(config(model_path=str(tmp_path), args=("--load-format=dummy",))).missing == ()
    assert look(config(model_path=str(tmp_path), engine="simulated")) == Machine()
    assert look(config(model_path="org/m")).missing == ()
    with pytest.raises(InvalidValue, match=r"ModelIncomplete: .*absent, empty, pointer"):
        Host._checked(settings)


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert (look(config(), tmp_path).shm or 0) > 0
    assert look(config(), tmp_path / "none").shm is None


def test_what_stops_nothing_is_logged_and_returned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shell, "look", lambda _: Machine(shm=64 << 20))
    (small,) = Host._checked(config(tensor=2))
    assert isinstance(small, Finding)
    assert "WARNING: SharedMemorySmall: shared memory (/dev/shm) has 64 MiB for 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "operator", "told"), [("1.1", "1.2", True), ("1.1", "1.1", False), ("1.1", "", False)])
def test_an_operator_of_another_version_is_named(own: str, operator: str, told: bool) -> None:
    found = version_finding(own, operator)
    assert (found is not None) is told
    if found is not None:
        assert str(found).startswith(
            "VersionSkew: the launcher is of version 1.1, the operator that made this pod of 1.2"
        )
        assert not found.fatal
    assert version_finding("unknown", "1.2") is None
