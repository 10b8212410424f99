"""What an engine is told about drafts, on which grounds, and what its counters say that it kept."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import drafts
from twinpool.core.errors import InvalidValue
from twinpool.localengine.pod import worker_config
from twinpool.worker.engines.command import Pod
from twinpool.worker.engines.select import engine_command
from twinpool.worker.logic import report
from twinpool.worker.logic.pricing import Surroundings, accelerator
from twinpool.worker.logic.speculation import Choice, choose, read
from twinpool.worker.shell import surroundings
from twinpool.worker.shell.host import check_model_path
from twinpool.worker.shell.surroundings import look

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.core.protocol import WorkerConfig

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
H100 = Surroundings("NVIDIA H100 80GB HBM3", LLAMA_8B, takes_schedule=True)


def config(**changes: Any) -> WorkerConfig:
    own: dict[str, Any] = {"gpus": 1, "speculation": "ngram"}
    return worker_config(**{**own, **changes})


def chosen(found: Surroundings = H100, **changes: Any) -> tuple[dict[str, Any], str]:
    choice = choose(config(**changes), found)
    assert choice is not None
    return (json.loads(choice.argument) if choice.argument else {}), choice.words


def test_a_pool_that_does_not_speculate_gets_no_flag() -> None:
    assert choose(config(speculation=None), H100) is None


def test_a_number_is_passed_on_with_the_draft_model() -> None:
    value, words = chosen(speculation="eagle3", draft_model="org/draft", draft_tokens=3)
    assert value == {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}
    assert words == "eagle3, 3 tokens, as the pool says"


def test_auto_is_a_schedule_where_the_engine_takes_one() -> None:
    value, words = chosen()
    entries = value.pop("num_speculative_tokens_per_batch_size")
    assert value == {"method": "ngram", "num_speculative_tokens": 4}
    assert (entries[0][0], entries[-1][1], entries[0][2]) == (1, drafts.MAX_BATCH, 4)
    assert f"4 for 1 to {entries[0][1]} sequences" in words
    assert "none above" in words
    assert "8.0B weights on 1 x h100; estimated, with 0.5 of the drafted tokens kept" in words


def test_auto_is_one_number_where_it_takes_none() -> None:
    value, words = chosen(Surroundings("NVIDIA H100 80GB HBM3", LLAMA_8B))
    assert value == {"method": "ngram", "num_speculative_tokens": 4}
    assert "this vLLM takes no schedule by batch size" in words


def test_auto_is_one_number_with_data_parallelism() -> None:
    value, words = chosen(data=2)
    assert value == {"method": "ngram", "num_speculative_tokens": 4}
    assert "vLLM takes no schedule by batch size with data parallelism" in words


def test_auto_is_one_number_where_one_fits_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "schedule", lambda *_: ((1, drafts.MAX_BATCH, 4),))
    value, words = chosen()
    assert value == {"method": "ngram", "num_speculative_tokens": 4}
    assert "one number fits every batch" in words


@pytest.mark.parametrize(("method", "value"), [("ngram", {}), ("mtp", {"method": "mtp", "num_speculative_tokens": 1})])
def test_drafts_that_do_not_pay_are_off_unless_prefill_and_decode_must_agree(
    monkeypatch: pytest.MonkeyPatch, method: str, value: dict[str, Any]
) -> None:
    monkeypatch.setattr(drafts, "schedule", lambda *_: ((1, drafts.MAX_BATCH, 0),))
    monkeypatch.setattr(drafts, "best", lambda *_: 0)
    got, words = chosen(speculation=method)
    assert got == value
    assert "auto: 0 tokens" in words


def test_prefill_drafts_only_for_the_kv_that_it_hands_over() -> None:
    assert chosen(role="prefill")[0] == {}
    assert "left to decode" in chosen(role="prefill", draft_tokens=4)[1]
    assert chosen(role="prefill", speculation="mtp")[0] == {"method": "mtp", "num_speculative_tokens": 1}
    assert chosen(role="prefill", speculation="mtp", draft_tokens=2)[0]["num_speculative_tokens"] == 2


@pytest.mark.parametrize(
    ("found", "changes", "words"),
    [
        (Surroundings("NVIDIA X9", LLAMA_8B), {}, "the accelerator is not known"),
        (Surroundings("NVIDIA H100 PCIe"), {}, "the shape of the model is not known"),
        (Surroundings("NVIDIA H100 PCIe", {"num_experts": 8}), {}, "the shape of the model is not known"),
        (Surroundings("", LLAMA_8B), {"gpus": 0}, "8.0B weights on 1 x cpu"),
        (H100, {"tensor": 2, "max_model_len": 128}, "8.0B weights on 2 x h100"),
    ],
)
def test_what_a_choice_rests_on_is_said(found: Surroundings, changes: dict[str, Any], words: str) -> None:
    assert words in chosen(found, **changes)[1]


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_accelerators_are_known_by_their_drivers_names(name: str, sheet: str | None) -> None:
    found = accelerator(name)
    assert (found.name if found else None) == sheet


METRICS = """
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 8.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
"""


def test_acceptance_is_by_position_and_not_conditional() -> None:
    kept = read(METRICS)
    assert kept is not None
    assert (kept.drafts, kept.drafted, kept.accepted) == (16, 60, 14)
    assert kept.acceptance == (0.5, 0.25, 0.125)
    assert kept.tokens_per_step == pytest.approx(1 + sum(kept.acceptance))


def test_an_engine_without_drafts_has_nothing_to_say() -> None:
    assert read("vllm:num_requests_running 0") is None
    kept = read('vllm:spec_decode_num_drafts_total{engine="0"} 0.0')
    assert kept is not None
    assert (kept.acceptance, kept.tokens_per_step) == ((), 1.0)


def test_the_launcher_shows_choice_and_acceptance() -> None:
    life = SimpleNamespace(
        phase="running", ready=True, epoch=1, total_restarts=0, recent_restarts=0, backoff=0.0, reason="", cause=None,
        losses=(), warnings=(), start_seconds=None,
    )  # fmt: skip
    plain = report.Snapshot(life, "vllm", "m", "decode", "1")
    assert "speculation" not in json.loads(report.status(plain))
    assert "speculation" not in report.metrics(plain)
    early = report.Snapshot(life, "vllm", "m", "decode", "1", speculation="ngram, auto")
    assert json.loads(report.status(early))["speculation"] == {"chosen": "ngram, auto"}
    late = report.Snapshot(life, "vllm", "m", "decode", "1", speculation="ngram, auto", kept=read(METRICS))
    found = json.loads(report.status(late))["speculation"]
    assert (found["acceptance"], found["drafts"]) == ([0.5, 0.25, 0.125], 16)
    assert 'twinpool_worker_speculation_acceptance_ratio{position="1"} 0.25' in report.metrics(late)
    assert "twinpool_worker_speculation_tokens_per_step 1.875" in report.metrics(late)


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_both_engines_get_the_same_flag(engine: str) -> None:
    settings = config(engine=engine, draft_tokens=2)
    choice = choose(settings, Surroundings())
    assert isinstance(choice, Choice)
    argv = engine_command(settings, Pod("10.0.0.7"), {}, 1, "python3", None, choice.argument).argv
    assert argv[argv.index("--speculative-config") + 1] == choice.argument
    assert "--speculative-config" not in engine_command(settings, Pod("10.0.0.7"), {}, 1, "python3").argv


def test_the_surroundings_are_read_without_importing_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "config").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    source = tmp_path / "vllm" / "config" / "speculative.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not look(config()).takes_schedule
    source.write_text("num_speculative_tokens_per_batch_size: list | None = None")
    nvidia = tmp_path / "gpus"
    for number, text in enumerate(["IRQ: 1\n", "Model: \t NVIDIA L4\nIRQ: 2\n"]):
        (nvidia / str(number)).mkdir(parents=True)
        (nvidia / str(number) / "information").write_text(text)
    model = tmp_path / "model"
    model.mkdir()
    settings = config(model_path=str(model))
    assert look(settings, nvidia) == Surroundings("NVIDIA L4", None, takes_schedule=True)
    (model / "config.json").write_text("[]")
    assert look(settings, nvidia).model is None
    (model / "config.json").write_text('{"a": 1}')
    assert look(settings, nvidia).model == {"a": 1}
    assert look(config(speculation=None), nvidia) == Surroundings()
    monkeypatch.setattr(surroundings.importlib.util, "find_spec", lambda _: None)
    assert not look(config()).takes_schedule
    assert look(config(engine="simulated")).takes_schedule


def test_a_draft_model_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"draft model's path /nowhere .*check speculation.model"):
        check_model_path(config(draft_model="/nowhere"))
    check_model_path(config(draft_model="org/draft"))


def test_an_adapter_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"adapter's path /nowhere .*check model.adapters"):
        check_model_path(config(adapters=("a=org/a", "b=/nowhere")))
