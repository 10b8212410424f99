"""The launcher with the real vLLM and a tiny model: its flags, a stream that survives SIGTERM, a handoff, a failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.localengine import contract
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY
from twinpool.localengine.pod import LauncherPod, tiny_config
from twinpool.worker.engines.command import Place, Pod
from twinpool.worker.engines.vllm.flags import vllm_command
from twinpool.worker.inject import inject
from twinpool.worker.logic import load
from twinpool.worker.logic.pricing import Surroundings
from twinpool.worker.logic.speculation import choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = pytest.mark.engine

NOTHING_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inject(tmp_path_factory.mktemp("twinpool"))


@pytest.fixture(scope="module")
def start(
    engine: Engine, zipapp: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[contextlib.AbstractContextManager]:
    """Start launchers, each on its own address; whatever is left at the end is killed."""
    started: list[LauncherPod] = []
    folder = tmp_path_factory.mktemp("launchers")

    def _start(**changes: object) -> LauncherPod:
        number = len(started) + 1
        ip = f"127.{128 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{number}"
        started.append(LauncherPod(engine, zipapp, folder / str(number), ip, tiny_config(**changes)))
        return started[-1]

    yield _start
    for each in started:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(timeout=60)
            each.process.kill()
            each.process.wait()


def read_by_vllm(engine: Engine, script: str, lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return what the engine's Python writes of ``lines``, one JSON object each."""
    done = subprocess.run(
        [engine.python, "-c", script],
        input="\n".join(lines),
        env={**serving_environment(engine), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    args = parser.parse_args(json.loads(line))
    validate_parsed_serve_args(args)
    print(json.dumps({"model": args.model_tag, "host": args.host, "port": args.port, "tp": args.tensor_parallel_size,
        "names": args.served_model_name, "shutdown": args.shutdown_timeout, "dtype": args.dtype,
        "length": args.max_model_len, "revision": args.revision, "eager": args.enforce_eager,
        "nodes": [args.nnodes, args.node_rank, args.master_addr, args.master_port, args.headless,
        args.pipeline_parallel_size],
        "copies": [args.data_parallel_size, args.data_parallel_size_local, args.data_parallel_start_rank,
        args.data_parallel_address, args.data_parallel_rpc_port, args.headless, args.enable_expert_parallel],
        "adapters": [args.enable_lora, args.max_loras, [[one.name, one.path] for one in args.lora_modules or ()]],
        "experts": [args.enable_eplb, args.eplb_config.num_redundant_experts, args.eplb_config.step_interval,
        args.eplb_config.window_size, args.eplb_config.log_balancedness, args.eplb_config.log_balancedness_interval],
        "drafts": args.speculative_config, "lookup": args.speculative_config and build_dynamic_sd_schedule_lookup(
        args.speculative_config["num_speculative_tokens_per_batch_size"], 256, 4),
        "kv": args.kv_transfer_config and [args.kv_transfer_config.kv_connector, args.kv_transfer_config.kv_role,
        args.kv_transfer_config.kv_buffer_device, args.kv_transfer_config.kv_connector_extra_config]}))
"""


def test_every_name_that_twinpool_uses_is_in_the_installed_vllm(engine: Engine) -> None:
    """Flags, metrics, fields of requests and of configurations; an upgrade that renames one fails here, by name."""
    assert contract.missing(contract.needed(), contract.read(contract.installed_package(engine.venv))) == []


def test_vllm_understands_every_set_of_flags(engine: Engine) -> None:
    settings = [
        (tiny_config(role=role, gpus=gpus, tensor=max(gpus, 1), model_revision=revision, connector=connector), gpus)
        for role, connector in (("prefill", "nixl"), ("decode", "nixl"), ("aggregated", None))
        for gpus, revision in ((0, None), (2, "abc"))
    ]
    wide = tiny_config(role="decode", gpus=1, tensor=1, pipeline=2, nodes=2, connector="nixl")
    copies = tiny_config(role="decode", gpus=2, data=4, expert=True, nodes=2, connector="nixl")
    places = [Place(rank, "10.0.0.7") for rank in (0, 1)]
    lines = [json.dumps(vllm_command(one, Pod("10.0.0.7"), {}, gpus, Place()).argv[4:]) for one, gpus in settings]
    lines += [json.dumps(vllm_command(wide, Pod("10.0.0.7"), {}, 1, place).argv[4:]) for place in places]
    lines += [json.dumps(vllm_command(copies, Pod("10.0.0.7"), {}, 2, place).argv[4:]) for place in places]
    moving = {"expert_balancing": True, "redundant_experts": 8}
    balanced = tiny_config(role="decode", gpus=2, data=4, expert=True, nodes=2, connector="nixl", **moving)
    lines.append(json.dumps(vllm_command(balanced, Pod("10.0.0.7"), {}, 2, places[0]).argv[4:]))
    adapted = tiny_config(role="decode", gpus=2, adapters=("sql=org/sql", "legal=/models/legal"))
    lines.append(json.dumps(vllm_command(adapted, Pod("10.0.0.7"), {}, 2, Place()).argv[4:]))
    drafting = tiny_config(role="decode", gpus=1, speculation="ngram")
    choice = choose(drafting, Surroundings(takes_schedule=True))
    lines.append(json.dumps(vllm_command(drafting, Pod("10.0.0.7"), {}, 1, Place(), choice.argument).argv[4:]))
    parsed = read_by_vllm(engine, PARSE, lines)
    assert len(parsed) == len(settings) + 2 * len(places) + 3
    drafts, loading, moved = parsed.pop(), parsed.pop(), parsed.pop()
    assert loading["adapters"] == [True, 2, [["sql", "org/sql"], ["legal", "/models/legal"]]]
    assert moved["experts"] == [True, 8, 3000, 1000, True, 100]
    second, first = parsed.pop()["copies"], parsed.pop()["copies"]
    assert first == [4, 2, None, "10.0.0.7", 29521, False, True]
    assert second == [4, 2, 2, "10.0.0.7", 29521, True, True]
    assert drafts["drafts"]["method"] == "ngram"
    assert drafts["lookup"][1] == 4
    assert drafts["lookup"][1:] == sorted(drafts["lookup"][1:], reverse=True)
    assert all(got["drafts"] is None for got in parsed)
    assert [got["nodes"] for got in parsed[len(settings) :]] == [
        [2, 0, "10.0.0.7", 29501, False, 2],
        [2, 1, "10.0.0.7", 29501, True, 2],
    ]
    for (one, gpus), got in zip(settings, parsed[: len(settings)], strict=True):
        assert got["model"] == str(TINY.folder)
        assert (got["host"], got["port"], got["names"]) == ("10.0.0.7", 8000, ["tiny"])
        assert (got["tp"], got["length"], got["revision"]) == (max(gpus, 1), 2048, one.model_revision)
        assert (got["dtype"], got["eager"]) == (("auto", False) if gpus else ("float32", True))
        assert got["shutdown"] == 5
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        if one.role in roles:
            assert got["kv"][:2] == ["NixlConnector", roles[one.role]]
            assert got["kv"][3] == {"kv_lease_duration": 30}
            assert gpus or got["kv"][2] == "cpu"
        else:
            assert got["kv"] is None


TIERS = """
import inspect, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    whole = parser.parse_args(json.loads(line)).kv_transfer_config
    inner = whole.kv_connector_extra_config.get("connectors")
    # As MultiConnector makes them, of which the CPU can make none.
    each = [KVTransferConfig(**one, engine_id=whole.engine_id) for one in inner] if inner else [whole]
    classes = [KVConnectorFactory.get_connector_class(one).__name__ for one in each]
    extra = each[-1].kv_connector_extra_config
    spec = OffloadingSpecFactory.get_spec_cls(extra)
    places = []
    for tier in extra.get("secondary_tiers", []):
        made = SecondaryTierFactory.get_tier_class(tier)
        given = {key: value for key, value in tier.items() if key != "type"}
        inspect.signature(made).bind(offloading_spec=0, primary_kv_view=0, tier_type="fs", **given)
        places.append([made.__name__, tier["root_dir"]])
    print(json.dumps({"classes": classes, "whole": [whole.kv_connector, whole.kv_role, whole.kv_load_failure_policy],
        "spec": spec.__name__, "bytes": extra["cpu_bytes_to_use"], "places": places,
        "hybrid": inner is None or MultiConnector.all_children_support_hma(whole),
        "metrics": sorted(spec.build_metric_definitions(extra))}))
"""


def test_vllm_understands_the_tiers(engine: Engine) -> None:
    """Its own factories make of the settings what is meant; none of it runs without a GPU."""
    both = tiny_config(role="prefill", gpus=2, connector="nixl", host_kv_bytes=2**30, disk_kv_bytes=2**40)
    alone = tiny_config(role="aggregated", gpus=2, connector=None, host_kv_bytes=2**30)
    lines = [json.dumps(vllm_command(one, Pod("10.0.0.7"), {}, 2, Place()).argv[4:]) for one in (both, alone)]
    behind, host = read_by_vllm(engine, TIERS, lines)
    assert behind["classes"] == ["NixlPullConnector", "OffloadingConnector"]
    assert behind["whole"] == ["MultiConnector", "kv_producer", "recompute"]
    assert behind["hybrid"], "else prefill and decode would disagree on their KV's layout"
    assert (behind["spec"], host["spec"]) == ("TieringOffloadingSpec", "CPUOffloadingSpec")
    assert behind["places"] == [["FileSystemTierManager", protocol.KV_DISK_DIRECTORY]]
    assert host["classes"] == ["OffloadingConnector"]
    assert host["bytes"] == behind["bytes"] == 2**30
    assert "vllm:kv_offload_tiering_read_time" in behind["metrics"]


PUBLISHERS = """
import json, sys
from vllm.distributed.kv_events import ZmqEventPublisher
kept = []
for line in sys.stdin:
    config = json.loads(line)
    kept.append(ZmqEventPublisher(0, config["endpoint"], config["replay_endpoint"]))
    sockets = (kept[-1]._pub, kept[-1]._replay)
    print(json.dumps({"bound": [socket.last_endpoint.decode() for socket in sockets]}))
for each in kept:
    each.shutdown()
"""


def test_engines_of_one_machine_publish_their_events_beside_each_other(engine: Engine) -> None:
    """Pods of the local cluster share a network and have addresses of their own."""
    hosts = [f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{number}" for number in (21, 22)]
    commands = [vllm_command(tiny_config(kv_events=True), Pod(host), {}, 0, Place()).argv for host in hosts]
    lines = [argv[argv.index("--kv-events-config") + 1] for argv in commands]
    found = [each["bound"] for each in read_by_vllm(engine, PUBLISHERS, lines)]
    ports = (protocol.KV_EVENTS_PORT, protocol.KV_REPLAY_PORT)
    assert found == [[f"tcp://{host}:{port}" for port in ports] for host in hosts]


STORES = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.mooncake_store import MooncakeStoreConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    argv, files = json.loads(line)
    args = parser.parse_args(argv)
    whole = args.kv_transfer_config
    inner = whole.kv_connector_extra_config["connectors"]
    each = [KVTransferConfig(**one, engine_id=whole.engine_id) for one in inner]
    read = [vars(MooncakeStoreConfig.from_file(path)) for path in files]
    print(json.dumps({"classes": [KVConnectorFactory.get_connector_class(one).__name__ for one in each],
        "hybrid": MultiConnector.all_children_support_hma(whole), "off": args.disable_hybrid_kv_cache_manager,
        "read": read}))
"""


def test_vllm_understands_the_stores(engine: Engine, tmp_path: Path) -> None:
    """Its registry has the connectors and its reader takes the file; neither store has run."""
    settings = [
        {"kv_store": "mooncake", "kv_store_address": "master:50051"},
        {"kv_store": "lmcache", "kv_store_address": "lm://store:65432", "plain_kv": True},
    ]
    lines = []
    for each in settings:
        config = tiny_config(role="prefill", gpus=2, tensor=2, connector="nixl", kv_store_bytes=2**30, **each)
        command = vllm_command(config, Pod("10.0.0.7"), {}, 2, Place())
        for text in command.files.values():
            (tmp_path / "mooncake.json").write_text(text)
        lines.append(json.dumps([command.argv[4:], [str(tmp_path / "mooncake.json") for _ in command.files]]))
    mooncake, lmcache = read_by_vllm(engine, STORES, lines)
    assert mooncake["classes"] == ["NixlPullConnector", "MooncakeStoreConnector"]
    assert mooncake["hybrid"]
    assert not mooncake["off"]
    (read,) = mooncake["read"]
    assert (read["master_server_address"], read["metadata_server"]) == ("master:50051", "P2PHANDSHAKE")
    assert (read["mode"], read["global_segment_size"], read["protocol"]) == ("embedded", 2**29, "rdma")
    assert lmcache["classes"] == ["NixlPullConnector", "LMCacheConnectorV1"]
    assert (lmcache["hybrid"], lmcache["off"]) == (False, True), "else prefill and decode would disagree"


def test_handoff_and_drain(start) -> None:
    prefill, decode = start(role="prefill"), start(role="decode")
    for each in (prefill, decode):
        each.wait_ready()
    (rank,) = load.work(decode.metrics())
    assert (rank.engine, len(rank.marks)) == ("0", len(load.MARKS)), (
        "the real engine prints all that progress is read from"
    )
    prompt = " ".join(f"word{i} alpha beta" for i in range(60))
    before = decode.prompt_tokens_by_source()
    ask = {"do_remote_decode": True, "do_remote_prefill": False, **NOTHING_REMOTE}
    first = prefill.complete(prompt=prompt, max_tokens=1, kv_transfer_params=ask)
    handed = decode.complete(prompt=prompt, max_tokens=12, kv_transfer_params=first["kv_transfer_params"])
    alone = prefill.complete(prompt=prompt, max_tokens=12)
    assert handed["choices"][0]["text"] == alone["choices"][0]["text"]
    after = decode.prompt_tokens_by_source()
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == handed["usage"]["prompt_tokens"]
    assert after["local_compute"] == before["local_compute"], "equal text alone proves nothing"

    body = {"model": "tiny", "prompt": "hello", "max_tokens": 600, "min_tokens": 600, "stream": True}
    with decode.open("/v1/completions", body) as stream:
        seen = [stream.readline() for _ in range(3)]
        decode.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while decode.readyz()[0] != 503:
            assert time.monotonic() < deadline, "unready soon after SIGTERM"
        assert json.loads(decode.readyz()[1])["phase"] == "draining"
        seen += stream.readlines()
    chunks = [line for line in seen if line.startswith(b"data: ")]
    assert chunks[-1] == b"data: [DONE]\n"
    assert json.loads(chunks[-2][6:])["choices"][0]["finish_reason"] == "length", "the stream ended by itself"
    assert decode.process.wait(timeout=60) == 0
    assert not decode.termination.exists()


def test_an_engine_that_cannot_load_says_why(start, tmp_path: Path) -> None:
    one = start(model_path=str(tmp_path))
    assert one.process.wait(timeout=120) == 1
    message = one.termination.read_text()
    assert str(tmp_path) in message.splitlines()[0]
    assert "check model.source" in message.splitlines()[0]
    assert "last lines of the engine" in message
    assert len(message.encode()) <= 4096


def test_the_launcher_never_imports_torch(engine: Engine, zipapp: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import twinpool.worker.shell.launcher\n"
        "print('torch' in sys.modules, twinpool.worker.shell.launcher.__file__.startswith(sys.argv[1]))"
    )
    done = subprocess.run([engine.python, "-I", "-c", code, zipapp], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False True"
