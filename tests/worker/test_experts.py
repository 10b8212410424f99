"""What a launcher says of experts: from the engine's log, with what chance makes of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from twinpool.localengine.pod import worker_config
from twinpool.worker.logic import experts, report
from twinpool.worker.logic.pricing import Surroundings
from twinpool.worker.logic.supervisor import State
from twinpool.worker.shell.process import MARKED_LINES, Tail

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig

LINE = (
    "INFO 12-01 10:00:00 [eplb_state.py:633] EPLB step: {n} for model org/m: avg_tokens=4096.00, "
    "max_tokens=9216, balancedness=0.4444, steps until the next rearrangement: 2900"
)


def config(**changes: Any) -> WorkerConfig:
    own: dict[str, Any] = {"data": 8, "expert": True, "expert_balancing": True}
    return worker_config(**{**own, **changes})


def test_the_log_becomes_status_and_metrics() -> None:
    balance = experts.read(config(), [LINE.format(n=n) for n in range(4)], layers=4)
    assert balance is not None
    assert (balance.ratio, balance.significant, balance.steps) == (2.25, True, 4)
    seen = report.Snapshot(State(), "vllm", "m", "decode", "1", experts=balance)
    told = json.loads(report.status(seen))["experts"]
    assert told == {"ratio": 2.25, "noise": balance.noise, "significant": True, "steps": 4}
    page = report.metrics(seen)
    assert "twinpool_worker_expert_load_ratio 2.25" in page
    assert "twinpool_worker_expert_load_significant 1" in page
    assert experts.read(config(), ["nothing of the kind"], layers=4) is None


def test_layers_come_from_the_model_and_are_many_where_it_is_unknown() -> None:
    shape = {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 1000,
    }
    assert experts.expert_layers(Surroundings(model=shape)) == 8
    for unknown in (None, {}, {key: value for key, value in shape.items() if "expert" not in key}):
        assert experts.expert_layers(Surroundings(model=unknown)) == 64


def test_what_the_engine_tells_of_experts_is_not_pushed_out_by_other_lines() -> None:
    tail = Tail()
    for number in range(100):
        tail.feed(f"{LINE.format(n=number)}\n".encode() + b"POST /v1/completions\n" * 50)
    assert len(tail.marked()) == MARKED_LINES
    assert "EPLB step: 99 " in tail.marked()[-1]
