import json
import re

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.protocol import (
    MANAGED_FLAGS,
    RouterConfig,
    WorkerConfig,
    managed_flag,
    managed_flag_pattern,
)

WORKER = WorkerConfig(
    pool="llama",
    namespace="default",
    role="prefill",
    revision="abc",
    engine="vllm",
    model="m",
    model_path="org/m",
    args=("--dtype", "float32"),
)


def test_worker_settings_survive_the_trip() -> None:
    assert WorkerConfig.from_json(WORKER.to_json()) == WORKER


def test_router_settings_survive_the_trip() -> None:
    config = RouterConfig(pool="llama", namespace="default", models=("a", "b"))
    assert RouterConfig.from_json(config.to_json()) == config


def test_equal_settings_give_equal_text() -> None:
    assert WORKER.to_json() == WorkerConfig.from_json(WORKER.to_json()).to_json()


def test_keys_of_a_newer_operator_are_ignored() -> None:
    values = json.loads(WORKER.to_json()) | {"warpDrive": True}
    assert WorkerConfig.from_json(json.dumps(values)) == WORKER


@pytest.mark.parametrize(("text", "problem"), [("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "missing")])
def test_broken_settings_are_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem) as caught:
        WorkerConfig.from_json(text)
    assert "TWINPOOL_WORKER" in caught.value.problem


@pytest.mark.parametrize("flag", MANAGED_FLAGS)
def test_every_managed_flag_is_found_in_each_spelling(flag: str) -> None:
    assert managed_flag(flag) == flag
    assert managed_flag(f"{flag}=1") == flag
    if flag.startswith("--"):
        underscored = "--" + flag[2:].replace("-", "_")
        assert managed_flag(underscored) == flag
        assert managed_flag(f"{flag}.key") == flag


@pytest.mark.parametrize("flag", MANAGED_FLAGS)
def test_the_api_server_refuses_every_managed_flag_in_full_and_nothing_else(flag: str) -> None:
    pattern = managed_flag_pattern()
    for spelled in (flag, f"{flag}=1", f"{flag}.key=1", "--" + flag[2:].replace("-", "_") if flag[1] == "-" else flag):
        assert re.match(pattern, spelled)
    for other in (f"{flag}x", f"x{flag}", flag[:-1] if flag[:-1] not in MANAGED_FLAGS else "-", "-n2x", "--"):
        assert not re.match(pattern, other)
    assert re.match(pattern, "-n2")


@pytest.mark.parametrize("flag", MANAGED_FLAGS)
def test_whatever_begins_a_managed_flag_sets_one(flag: str) -> None:
    for end in range(3 if flag.startswith("--") else 2, len(flag) + 1):
        assert managed_flag(flag[:end]) in MANAGED_FLAGS
        assert managed_flag(f"{flag[:end]}=x") in MANAGED_FLAGS
    assert managed_flag(f"{flag}x") is None or f"{flag}x" in {other[: len(flag) + 1] for other in MANAGED_FLAGS}


@pytest.mark.parametrize(
    "argument", ["--dtype", "--portal", "--model-loader-extra-config", "4", "a --port", "-x", "--no-port", "--", "--=x"]
)
def test_other_arguments_are_the_users_own(argument: str) -> None:
    assert managed_flag(argument) is None
