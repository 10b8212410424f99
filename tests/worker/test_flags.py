"""Commands of the engines: derived flags by role, CPU defaults, and refused arguments."""

import json

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.managed import refuse_managed
from twinpool.core.protocol import MANAGED_FLAGS, WorkerConfig
from twinpool.localengine.pod import worker_config
from twinpool.worker.engines.command import Place, Pod, behind_preflight, redacted, wants_preflight
from twinpool.worker.engines.render import render_command
from twinpool.worker.engines.select import engine_command

POD = Pod("10.0.0.7", "p-0", "uid", "default")


def config(**changes):
    base = {
        "pool": "p",
        "namespace": "default",
        "role": "decode",
        "revision": "r",
        "engine": "vllm",
        "model": "org/model",
        "model_path": "/models/m",
        "python": "/opt/venv/bin/python",
    }
    return WorkerConfig(**{**base, **changes})


def command(environment=None, gpus=1, **changes):
    return engine_command(config(gpus=gpus, **changes), POD, environment or {}, gpus, "/usr/bin/python3")


def value_of(argv, flag):
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_on_gpus_only_what_others_depend_on_is_set():
    got = command(
        gpus=2,
        role="prefill",
        tensor=2,
        connector="nixl",
        args=("--seed", "0"),
        model_revision="abc",
        max_model_len=4096,
    )
    argv = got.argv
    assert argv[:5] == ("/opt/venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m")
    assert value_of(argv, "--served-model-name") == "org/model"
    assert value_of(argv, "--host") == "10.0.0.7"
    assert value_of(argv, "--port") == "8000"
    assert value_of(argv, "--tensor-parallel-size") == "2"
    assert value_of(argv, "--revision") == "abc"
    assert value_of(argv, "--max-model-len") == "4096"
    assert json.loads(value_of(argv, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
    }
    assert argv[-2:] == ("--seed", "0")
    assert "--dtype" not in argv
    assert "--enforce-eager" not in argv
    assert not got.on_cpu
    assert "VLLM_CPU_OMP_THREADS_BIND" not in got.environment


@pytest.mark.parametrize(("gpus", "visible"), [(0, 0), (1, 0), (0, 8)])
def test_without_gpus_the_cpu_is_used(gpus, visible):
    got = engine_command(config(gpus=gpus, connector="nixl"), POD, {}, visible, "python3")
    kv = json.loads(value_of(got.argv, "--kv-transfer-config"))
    assert (kv["kv_role"], kv["kv_buffer_device"]) == ("kv_consumer", "cpu")
    assert value_of(got.argv, "--dtype") == "float32"
    assert "--enforce-eager" in got.argv
    assert got.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert got.on_cpu


@pytest.mark.parametrize(
    ("args", "absent"),
    [
        (("--dtype=bfloat16",), "float32"),
        (("--dtype", "bfloat16"), "float32"),
        (("-O3",), "--enforce-eager"),
        (("-cc.mode=3",), "--enforce-eager"),
        (("--no_enforce_eager",), "--enforce-eager"),
        (("--compilation-config.mode", "3"), "--enforce-eager"),
    ],
)
def test_user_arguments_beat_cpu_defaults(args, absent):
    assert absent not in command(gpus=0, args=args).argv


def test_an_aggregated_pool_hands_nothing_off():
    assert "--kv-transfer-config" not in command(role="aggregated", connector="nixl").argv
    assert "--kv-transfer-config" not in command(connector=None).argv


def test_environment_is_the_containers_with_the_pods_addresses():
    given = {
        "PATH": "/bin",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "TWINPOOL_WORKER": "{}",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
    }
    environment = command(given, gpus=0).environment
    assert environment == {
        "PATH": "/bin",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_HOST_IP": "10.0.0.7",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }


@pytest.mark.parametrize("flag", MANAGED_FLAGS)
def test_every_managed_flag_is_refused_by_name(flag):
    for argument in (flag, f"{flag}=1"):
        with pytest.raises(InvalidValue) as refused:
            command(args=("--seed", "0", argument))
        assert repr(argument) in str(refused.value)
        assert flag in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--tensor_parallel_size=2", "--tensor-parallel-size"),
        ("--tensor-par", "--tensor-parallel-size"),
        ("--max_model=9", "--max-model-len"),
        ("--kv-transfer-config.kv_role", "--kv-transfer-config"),
        ("--spec", "--speculative-config"),
        ("-t=2", "-tp"),
        ("-e", "-ep"),
        ("-n2", "-n"),
        ("-r1", "-r"),
    ],
)
def test_other_spellings_are_refused_too(argument, flag):
    with pytest.raises(InvalidValue, match=flag):
        refuse_managed([argument])


@pytest.mark.parametrize(
    "argument",
    [
        "--seed",
        "0",
        "-5",
        "--",
        "--model-loader-extra-config={}",
        "--data-parallel-backend=mp",
        "--kv-cache-dtype",
        "-O3",
        "-nothing",
    ],
)
def test_the_users_own_flags_pass(argument):
    refuse_managed([argument])


def test_the_simulated_engine_is_this_package():
    environment = {"TWINPOOL_WORKER": "{}", "A": "b"}
    changes = {"role": "prefill", "connector": "nixl", "max_model_len": 512, "args": ("--seed", "1")}
    got = command(environment, engine="simulated", **changes)
    assert got.argv == (
        *("/usr/bin/python3", "-m", "twinpool.worker", "simulate", "--host", "10.0.0.7", "--port", "8000"),
        *("--role", "prefill", "--model", "org/model", "--tensor-parallel-size", "1", "--shutdown-timeout", "5"),
        *("--connector", "nixl", "--max-model-len", "512", "--seed", "1"),
    )
    assert got.environment == {"A": "b"}
    plain = command(engine="simulated", role="aggregated").argv
    assert "--connector" not in plain
    assert "--max-model-len" not in plain


def test_kv_events_name_blocks_as_routers_do():
    plain = command()
    assert "--kv-events-config" not in plain.argv
    assert "PYTHONHASHSEED" not in plain.environment
    for engine in ("vllm", "simulated"):
        got = command({"PYTHONHASHSEED": "0"}, engine=engine, kv_events=True)
        assert json.loads(value_of(got.argv, "--kv-events-config")) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5577",
        }
    real = command(kv_events=True)
    shared = engine_command(worker_config(kv_events=True), Pod("127.3.0.9"), {}, 1, "python3")
    assert "tcp://[::ffff:127.3.0.9]:5557" in value_of(shared.argv, "--kv-events-config")
    assert value_of(real.argv, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert real.environment["PYTHONHASHSEED"] == "0"


def test_ranks_of_a_pod_have_ports_of_their_own_for_events_and_replays():
    for engine in ("vllm", "simulated"):
        assert "--kv-events-config" in command(engine=engine, kv_events=True, data=40, nodes=2).argv
        with pytest.raises(InvalidValue, match="21 data-parallel ranks in one pod"):
            command(engine=engine, kv_events=True, data=21)


@pytest.mark.parametrize(
    ("environment", "args", "words"),
    [
        ({}, ("--prefix_caching_hash_algo=xxhash",), "--prefix-caching-hash-algo contradicts"),
        ({}, ("--no-enable-prefix-caching",), "--no-enable-prefix-caching contradicts"),
        ({"PYTHONHASHSEED": "7"}, (), "PYTHONHASHSEED is 0"),
    ],
)
def test_what_would_change_the_names_of_blocks_is_refused(environment, args, words):
    with pytest.raises(InvalidValue, match=words):
        command(environment, kv_events=True, args=args)
    command(environment, args=args)


def test_spans_go_where_the_pool_says_and_only_of_requests_that_are_traced():
    got = command({"OTEL_SERVICE_NAME": "ours"}, tracing_url="http://c:4318/v1/traces", role="prefill")
    assert value_of(got.argv, "--otlp-traces-endpoint") == "http://c:4318/v1/traces"
    assert got.environment["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"
    assert got.environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert got.environment["OTEL_SERVICE_NAME"] == "ours", "what the user sets stays"
    assert not [name for name in command().environment if name.startswith("OTEL_")]


def test_pod_identity_comes_from_the_environment():
    environment = {"POD_IP": "10.0.0.7", "POD_NAME": "p-0", "POD_UID": "uid", "POD_NAMESPACE": "default"}
    assert Pod.from_environment(environment) == POD
    assert Pod.from_environment({"POD_IP": "::1"}) == Pod("::1")
    with pytest.raises(InvalidValue, match="POD_IP is not set"):
        Pod.from_environment({})


def test_secrets_are_not_logged():
    argv = ["serve", "--hf-token", "abc", "--api_key=abc", "--seed", "0", "--x-token", "--y"]
    assert redacted(argv) == ["serve", "--hf-token", "***", "--api_key=***", "--seed", "0", "--x-token", "--y"]


def test_a_group_over_nodes_tells_every_rank_where_it_stands():
    leader = command(gpus=8, tensor=8, pipeline=2, nodes=2).argv
    assert value_of(leader, "--pipeline-parallel-size") == "2"
    assert (value_of(leader, "--nnodes"), value_of(leader, "--node-rank")) == ("2", "0")
    assert (value_of(leader, "--master-addr"), value_of(leader, "--master-port")) == ("10.0.0.7", "29501")
    assert "--headless" not in leader
    place = Place(1, "10.0.0.9")
    for engine in ("vllm", "simulated"):
        settings = config(gpus=8, tensor=8, pipeline=2, nodes=2, engine=engine)
        rank = engine_command(settings, POD, {}, 8, "/usr/bin/python3", place).argv
        assert (value_of(rank, "--node-rank"), value_of(rank, "--master-addr")) == ("1", "10.0.0.9")
        assert "--headless" in rank


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_copies_are_balanced_by_the_leader_and_each_pod_has_equally_many(engine):
    one = command(gpus=8, data=4, tensor=2, engine=engine).argv
    assert (value_of(one, "--data-parallel-size"), value_of(one, "--tensor-parallel-size")) == ("4", "2")
    assert not {"--data-parallel-size-local", "--nnodes", "--headless"} & set(one)
    settings = config(gpus=4, data=4, tensor=2, nodes=2, engine=engine)
    leader, rank = (
        engine_command(settings, POD, {}, 4, "python3", place).argv for place in (Place(0, "l"), Place(1, "l"))
    )
    for argv in (leader, rank):
        assert (value_of(argv, "--data-parallel-size"), value_of(argv, "--data-parallel-size-local")) == ("4", "2")
        assert (value_of(argv, "--data-parallel-address"), value_of(argv, "--data-parallel-rpc-port")) == ("l", "29521")
    assert not {"--data-parallel-start-rank", "--headless", "--nnodes"} & set(leader)
    assert value_of(rank, "--data-parallel-start-rank") == "2"
    assert "--headless" in rank
    assert wants_preflight(config(data=2))
    assert "--enable-expert-parallel" in command(gpus=8, data=8, expert=True, engine=engine).argv
    assert "--enable-expert-parallel" not in one


def test_a_group_of_one_node_has_no_word_about_nodes():
    assert not {"--nnodes", "--master-addr", "--pipeline-parallel-size", "--headless"} & set(command(tensor=2).argv)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"tensor": 2}, True),
        ({"pipeline": 2, "nodes": 2}, True),
        ({}, False),
        ({"tensor": 2, "preflight": False}, False),
        ({"tensor": 2, "engine": "simulated"}, False),
    ],
)
def test_a_preflight_is_made_where_links_are_between_ranks(changes, wanted):
    assert wants_preflight(config(**changes)) is wanted


def test_the_engine_comes_behind_its_preflight():
    settings = config(tensor=4, pipeline=2, nodes=2, gpus=4)
    place = Place(1, "10.0.0.9")
    engine = engine_command(settings, POD, {"A": "b"}, 4, "python3", place)
    got = behind_preflight(engine, settings, POD, place, ("python3", "/twinpool/worker.pyz"), "/tmp/x/preflight.json")
    end = got.argv.index("--")
    assert got.argv[end + 1 :] == engine.argv
    assert got.environment == engine.environment
    assert got.argv[:3] == ("python3", "/twinpool/worker.pyz", "preflight")
    assert {"--local=4", "--first=4", "--world=8", "--leader=10.0.0.9", "--port=29511", "--pod=p-0"} <= {
        *got.argv[3:end]
    }


def test_experts_are_balanced_only_where_asked_and_on_gpus():
    argv = command(gpus=2, data=2, expert=True, expert_balancing=True, redundant_experts=4).argv
    assert argv.count("--enable-eplb") == 1
    assert json.loads(value_of(argv, "--eplb-config")) == {
        "num_redundant_experts": 4,
        "step_interval": 3000,
        "window_size": 1000,
        "log_balancedness": True,
        "log_balancedness_interval": 100,
    }
    assert "--enable-eplb" not in command(gpus=2, data=2, expert=True).argv
    simulated = command(engine="simulated", data=2, expert=True, expert_balancing=True).argv
    assert "--enable-eplb" in simulated
    with pytest.raises(InvalidValue, match="expertBalancing needs GPUs"):
        command(gpus=0, data=2, expert=True, expert_balancing=True)


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_adapters_are_loaded_at_the_start(engine):
    assert "--enable-lora" not in command(engine=engine).argv
    argv = command(engine=engine, adapters=("sql=org/sql", "legal=/models/legal")).argv
    assert value_of(argv, "--max-loras") == "2"
    begin = argv.index("--lora-modules")
    assert argv[begin + 1 : begin + 3] == ("sql=org/sql", "legal=/models/legal")
    assert "--enable-lora" in argv
    many = command(engine=engine, adapters=tuple(f"a{n}=org/a" for n in range(12))).argv
    assert value_of(many, "--max-loras") == "8"


def test_a_renderer_names_the_workers_model_and_gets_the_engines_arguments():
    settings = config(model_revision="abc", max_model_len=4096, kv_events=True, connector="nixl", args=("--seed=0",))
    got = render_command(settings, POD, {"A": "1", "VLLM_PORT": "tcp://10.0.0.1", "TWINPOOL_WORKER": "{}"}, "python3")
    argv = " ".join(got.argv)
    assert argv.startswith("/opt/venv/bin/python -m vllm.entrypoints.cli.main launch render /models/m ")
    assert argv.endswith(" --host 10.0.0.7 --port 8000 --max-model-len 4096 --seed=0")
    assert (value_of(got.argv, "--served-model-name"), value_of(got.argv, "--revision")) == ("org/model", "abc")
    assert got.environment == {"A": "1"}


def test_a_simulated_renderer_is_run_by_the_launchers_own_interpreter():
    argv = render_command(config(engine="simulated"), POD, {}, "/usr/bin/python3").argv
    assert argv[:5] == ("/usr/bin/python3", "-m", "twinpool.worker", "simulate", "--enable-scale-out")
    assert value_of(argv, "--model") == "org/model"
    assert "--max-model-len" not in argv


def test_a_renderer_refuses_the_flags_that_workers_refuse():
    with pytest.raises(InvalidValue, match="--port"):
        render_command(config(args=("--port=1",)), POD, {}, "python3")
