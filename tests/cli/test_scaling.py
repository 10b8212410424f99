"""``twinpool explain --scaling``: what the operator decided, in words and for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli.__main__ import main
from twinpool.cli.kubectl import Kubectl
from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

FIGURES = {
    "requestsPerSecond": 8.0, "prefillSeconds": 0.149, "promptTokens": 4000, "outputTokens": 300, "hitRate": 0.25,
    "backlogSeconds": 1.5, "decoding": 70.6, "waiting": 2, "prefillFactor": 1.5, "stepFactor": 0.9, "startSeconds": 90,
    "needPrefill": 3, "needDecode": 2,
}  # fmt: skip
DECISION = {
    "time": "2026-01-01T00:00:00Z", "before": {"prefill": 2, "decode": 2}, "after": {"prefill": 3, "decode": 2},
    "reason": "8 requests/s need more",
}  # fmt: skip
SCALING = {
    "target": {"prefill": 3, "decode": 2}, "reason": "8 requests/s need more", "time": "2026-01-01T00:00:00Z",
    "figures": FIGURES, "decisions": [DECISION],
}  # fmt: skip
CONDITION = {
    "type": "ScalingActive", "status": "True", "reason": "Following", "message": "the numbers follow the arriving work",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def store(status: dict[str, Any], **spec: Any) -> None:
        scaling = {"prefill": {"max": 4}, "decode": {"max": 4}, "gpuBudget": 8}
        body = {
            "apiVersion": protocol.API_VERSION,
            "kind": protocol.KIND,
            "metadata": {"name": "llama", "uid": "u"},
            "spec": {"model": {"name": "m"}, "prefill": {}, "decode": {}, "scaling": scaling, **spec},
            "status": status,
        }
        answers = {f"{protocol.PLURAL}.{protocol.GROUP}": body}
        monkeypatch.setattr(Kubectl, "run", lambda _, *args: json.dumps(answers.get(args[1], {"items": []})))

    return store


def test_what_was_decided_and_why_is_said(stored: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stored({"scaling": SCALING, "conditions": [CONDITION], "prefill": {"routable": 2}})
    assert main(["explain", "llama", "--scaling"]) == 0
    out = capsys.readouterr().out
    assert "prefill: 3 groups wanted, 2 serve (from 1 to 4)" in out
    assert "decode: 2 groups wanted (from 1 to 4)" in out
    assert "now: Following: the numbers follow" in out
    assert "4000 prompt tokens (25% cached)" in out
    assert "needed: 3 prefill and 2 decode groups" in out
    assert "2:2 -> 3:2" in out
    assert main(["explain", "llama", "--scaling", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scaling"]["figures"] == FIGURES
    assert told["condition"]["reason"] == "Following"
    assert told["limits"]["gpuBudget"] == 8


def test_what_is_not_known_is_said_too(stored: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stored({})
    assert main(["explain", "llama", "--scaling"]) == 0
    assert "nothing has been decided yet" in capsys.readouterr().out
    assert main(["explain", "llama", "--scaling", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["scaling"] is None
    short = {key: SCALING[key] for key in ("target", "reason", "time")}
    stored({"scaling": short}, scaling={"prefill": {"max": 4}, "decode": {"max": 4}})
    assert main(["explain", "llama", "--scaling"]) == 0
    assert "no changes yet" in capsys.readouterr().out
    endless = {**FIGURES, "needPrefill": None}
    stored({"scaling": {**short, "figures": endless}})
    assert main(["explain", "llama", "--scaling"]) == 0
    assert "no number of prefill" in capsys.readouterr().out


def test_a_pool_with_fixed_numbers_has_nothing_to_explain(
    stored: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stored({}, scaling=None)
    assert main(["explain", "llama", "--scaling"]) == 1
    assert "has fixed replicas" in capsys.readouterr().err
    assert main(["explain", "llama", "--scaling", "--placement"]) == 1
