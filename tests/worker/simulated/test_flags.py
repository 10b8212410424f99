"""The command line: what is accepted, and what is refused by name."""

import json

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated import flags


def parse(*argv):
    return flags.parse(["--model", "m", *argv])


def test_what_the_launcher_gives_is_accepted():
    identity = ("--host", "127.0.0.9", "--port", "8000", "--role", "decode", "--model", "m")
    settings = flags.parse([*identity, "--connector", "nixl", "--side-channel-port", "5600"])
    assert (settings.host, settings.models, settings.connector) == ("127.0.0.9", ("m",), True)
    assert settings.limits.lease_seconds == 30


def test_served_model_name_is_the_same_as_model():
    assert flags.parse(["--served-model-name", "a", "b"]).models == ("a", "b")


def test_the_cache_holds_one_longest_prompt_unless_told_otherwise():
    assert parse("--max-model-len", "131072").limits.kv_blocks == 131072 // 16
    with pytest.raises(InvalidValue, match="hold less than --max-model-len"):
        parse("--kv-blocks", "2")


def test_a_speed_replaces_the_models():
    assert parse("--tokens-per-second", "50").pace.token_seconds == 0.02
    assert parse().pace.token_seconds is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--mode", "x"], "unrecognized arguments"),
        (["--port", "0"], "not a port"),
        (["--port", "x"], "invalid"),
        (["--block-size", "0"], "not at least 1"),
        (["--time-scale", "nan"], "not between"),
        (["--tokens-per-second", "0"], "not above 0"),
        (["--model-shape", "gpt"], "invalid choice"),
        (["--speculative-acceptance", "1.5"], "not between 0 and 1"),
    ],
)
def test_a_wrong_flag_is_refused(argv, says, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_speculation_is_read_as_vllm_reads_it():
    assert parse().drafting is None
    schedule = [[1, 8, 4], [9, 64, 1]]
    config = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": schedule}
    got = parse("--speculative-config", json.dumps(config), "--speculative-acceptance", "0.9").drafting
    assert (got.tokens, got.schedule, got.acceptance, got.share) == (4, ((1, 8, 4), (9, 64, 1)), 0.9, 0.0)
    assert [got.count(batch) for batch in (1, 8, 9, 1000)] == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "keys that are not known"),
        ('{"num_speculative_tokens": 1, "eager": 1}', "keys that are not known"),
        ('{"method": "ngram"}', "needs num_speculative_tokens"),
        ('{"num_speculative_tokens": "x"}', "needs num_speculative_tokens"),
        ('{"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 2]]}', "three numbers"),
        ('{"num_speculative_tokens": 0}', "too small"),
        ('{"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[2, 1, 2]]}', "too small"),
    ],
)
def test_a_wrong_speculation_is_refused(config, says):
    with pytest.raises(InvalidValue, match=says):
        parse("--speculative-config", config)


def events(**config):
    return parse("--kv-events-config", json.dumps(config)).events


def test_kv_events_are_configured_as_for_vllm():
    assert events(enable_kv_cache_events=False) is None
    assert parse().events is None
    found = events(enable_kv_cache_events=True, publisher="zmq", topic="t")
    assert (found.endpoint, found.replay_endpoint, found.topic) == ("tcp://*:5557", None, "t")


@pytest.mark.parametrize("config", ["{", "[]", '{"hwm": 3}', '{"publisher": "kafka"}'])
def test_a_wrong_events_configuration_is_refused(config):
    with pytest.raises(InvalidValue, match="--kv-events-config"):
        parse("--kv-events-config", config)


def test_adapters_have_a_name_and_a_place():
    assert parse().adapters == {}
    assert parse("--enable-lora", "--lora-modules", "a=org/a", "b=/b").adapters == {"a": "org/a", "b": "/b"}
    with pytest.raises(InvalidValue, match="needs --enable-lora"):
        parse("--lora-modules", "a=b")
    for wrong in ("a", "=b", "a="):
        with pytest.raises(InvalidValue, match="takes NAME=PATH"):
            parse("--enable-lora", "--lora-modules", wrong)
