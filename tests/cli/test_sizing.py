"""``twinpool plan --model-config``: does the model fit, and which split serves most."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.core import protocol

#: Of Llama 3 70B, as published.
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    spec: dict[str, Any] = {
        "model": {"name": "llama"},
        "prefill": {"parallelism": {"tensor": 8}},
        "decode": {"parallelism": {"tensor": 2}},
        "objectives": {"ttft": "3s", "itl": "60ms"},
        "placement": {},
    }
    pool = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": "llama"}, "spec": spec}
    status = {
        "allocatable": {"nvidia.com/gpu": "8", "pods": "9"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    nodes = [{"kind": "Node", "metadata": {"name": f"n{n}"}, "status": status} for n in range(2)]
    for name, document in (("pool", pool), ("nodes", {"items": nodes}), ("config", CONFIG)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["plan", "-f", f"{tmp_path}/pool.yaml", "--nodes", f"{tmp_path}/nodes.yaml"]


def test_a_role_that_does_not_fit_fails_and_the_best_splits_are_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model-config", f"{tmp_path}/config.json"]) == 1
    out = capsys.readouterr().out
    assert "nothing measured" in out
    assert "80 layers of 8192, 64 heads, 8 for KV; 70.6 B weights of 16 bits; 327680 bytes of KV for a token" in out
    assert "decode tensor 2 x pipeline 1: weights 70.6 + KV" in out
    assert "GB are missing" in out
    assert re.search(r"take tensor \d x pipeline \d, since even one request has no room", out)
    assert "prefill tensor 8 x pipeline 1: weights 17.6" in out
    assert out.count("best of those that fit:") == 2
    assert "prefill replicas" not in out, "a role that serves nothing has no ratio"
    assert main([*arguments, "--model-config", f"{tmp_path}/config.json", "--gpu", "h200", "--tokens", "2048"]) == 0
    assert "for prompts of 1792 and answers of 256 tokens each decode replica needs" in capsys.readouterr().out
    assert main([*arguments, "--model-config", f"{tmp_path}/config.json", "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["sizing"]
    assert told["roles"]["decode"]["fits"] is False
    assert told["prefill_per_decode"] is None
    assert told["model"]["kv_bytes_per_token"] == 327_680
    rates = [item["prefill"] for item in told["roles"]["prefill"]["best"]]
    assert rates == sorted(rates, reverse=True)


def test_a_mixture_is_advised_with_data_and_expert_parallelism_too(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(__file__).parent.parent / "core" / "configs" / "deepseek-v3.json"
    asked = [*arguments, "--model-config", str(config), "--gpu", "h200", "--redundant-experts", "32"]
    assert main(asked) == 1, "decode asks for two GPUs"
    out = capsys.readouterr().out
    assert "671.0 B weights of 8 bits, 37.6 B for a token (8 of 256 experts in 58 layers)" in out
    assert out.count("with data or expert parallelism:") == 2
    assert "with expert parallelism: " in out
    assert "the latent KV is kept on each of 8 GPUs" in out
    assert main([*asked, "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["sizing"]
    assert all(item["split"]["expert"] for item in told["roles"]["decode"]["beyond"])
    assert any(item["memory"]["redundant"] > 0 for item in told["roles"]["prefill"]["beyond"])


def test_what_is_legal_but_poor_is_said(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {**CONFIG, "num_key_value_heads": 4}
    (tmp_path / "few.json").write_text(json.dumps(few))
    asked = [*arguments, "--model-config", f"{tmp_path}/few.json", "--concurrency", "100000"]
    assert main(asked) == 1
    out = capsys.readouterr().out
    assert "4 KV heads on 8 GPUs" in out
    assert "none; take a larger GPU, or fewer requests at once" in out
    assert "take a larger GPU, or at most " in out


def test_what_an_engine_refuses_fails(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {**CONFIG, "num_attention_heads": 60, "num_key_value_heads": 60}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    assert main([*arguments, "--model-config", f"{tmp_path}/odd.json", "--gpu", "b200"]) == 1
    assert "the engine refuses it: 60 attention heads cannot be shared by 8 GPUs" in capsys.readouterr().out


def test_a_pool_of_one_role_has_no_ratio(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = yaml.safe_load((tmp_path / "pool.yaml").read_text())
    del pool["spec"]["prefill"]
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    asked = [*arguments, "--model-config", f"{tmp_path}/config.json", "--gpu", "h200"]
    assert main([*asked, "--tokens", "2048"]) == 0
    assert "prefill replicas" not in capsys.readouterr().out


def test_a_layout_is_told_in_seconds(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "in seconds: give --model-config" in capsys.readouterr().out
    asked = [*arguments, "--model-config", f"{tmp_path}/config.json", "--gpu", "h200", "--tokens", "2048"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    (prefill,) = [line for line in lines if "tensor ranks of 1 prefill group over host" in line]
    assert "us for each prompt token" in prefill
    (decode,) = [line for line in lines if "tensor ranks of 1 decode group over host" in line]
    assert "us for each written token" in decode
    assert any("handoff: 100% of the KV over cluster" in line or "of the KV over host" in line for line in lines)
    assert any("spread: one rack takes at most 100% of the decode groups" in line for line in lines)
    assert main([*asked, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["seconds"]
    assert {item["rule"] for item in told["rules"]} == {"tensor"}
    assert told["handoff"] == pytest.approx(told["handoffs"][0]["seconds"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model-config", "{}/none.json"], "give the model's config.json"),
        (["--model-config", "{}/config.json", "--tokens", "256"], "an answer of 256 tokens leaves no prompt"),
        (["--model-config", "{}/config.json", "--gpu", "b9"], "use a100, h100, h200, b200"),
    ],
)
def test_what_cannot_be_used_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert main([*arguments, *(text.format(tmp_path) for text in more)]) == 1
    assert words in capsys.readouterr().err
