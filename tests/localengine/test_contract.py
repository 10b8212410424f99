"""What Twinpool needs of vLLM is compared by name, from source that is never imported."""

import json

import pytest

from twinpool.localengine import __main__ as program
from twinpool.localengine import contract, newest
from twinpool.localengine.contract import Contract
from twinpool.localengine.errors import EngineError


@pytest.fixture
def package(tmp_path):
    """Write a vLLM of a few lines that cannot be imported."""
    files = {
        "engine/arg_utils.py": "import nowhere\ngroup.add_argument('--tensor-parallel-size', '-tp', **some['x'])\n",
        "entrypoints/launchers/cli_args.py": "class FrontendArgs:\n    host: str\n    enable_log: bool = True\n",
        "v1/metrics/loggers.py": "Gauge(name='vllm:num_requests_running', doc='vllm: not a name')\n",
        "entrypoints/openai/completion/protocol.py": "class CompletionRequest(Base):\n    prompt: str\n    x = 1\n",
        "config/kv_transfer.py": "class KVTransferConfig:\n    kv_role: str\n",
        "distributed/kv_transfer/kv_connector/v1/nixl/s.py": "name = 'do_remote_prefill'\n",
    }
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "vllm"


def test_names_are_read_from_source(package):
    got = contract.read(package)
    assert got.flags == {"--tensor-parallel-size", "-tp", "--host", "--enable-log"}
    assert got.metrics == {"vllm:num_requests_running"}
    assert got.requests == {"CompletionRequest.prompt"}
    assert got.configs == {"KVTransferConfig.kv_role"}
    assert "do_remote_prefill" in got.transfer


def test_what_a_version_lacks_is_named(package):
    have = contract.read(package)
    wanted = contract.needed()
    lacks = contract.missing(wanted, have)
    assert "flags: --port" in lacks
    assert "metrics: vllm:kv_cache_usage_perc" in lacks
    assert "requests: ChatCompletionRequest.kv_transfer_params" in lacks
    assert "transfer: remote_block_ids" in lacks
    assert "flags: --host" not in lacks
    assert contract.missing(wanted, wanted) == []


def test_what_changed_between_versions_is_named():
    def version(*flags):
        return Contract(frozenset(flags), *(frozenset() for _ in range(5)))

    assert contract.changes(version("--a", "--old"), version("--a", "--new")) == ["flags: ---old", "flags: +--new"]


def test_what_prometheus_adds_is_no_part_of_a_name():
    assert {"vllm:prompt_tokens", "vllm:iteration_tokens"} <= contract.needed().metrics


def test_a_folder_without_vllm_is_refused(tmp_path):
    with pytest.raises(EngineError, match="is not the source of vLLM"):
        contract.read(tmp_path)
    with pytest.raises(EngineError, match="has no vLLM"):
        contract.installed_package(tmp_path)


def test_the_command_fails_when_a_needed_name_is_gone(package, monkeypatch, capsys):
    monkeypatch.setattr(contract, "installed_package", lambda _: package)
    assert program.main(["contract", str(package)]) == 1
    assert "MISSING flags: --port" in capsys.readouterr().out
    monkeypatch.setattr(contract, "needed", lambda: contract.read(package))
    assert program.main(["contract", str(package), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"missing": [], "changes": []}


def test_of_a_fetched_version_only_the_source_stays(tmp_path):
    for name in ("vllm/engine/x.py", "vllm/_C.abi3.so", "vllm/py.typed", "vllm-0.33.0.dist-info/METADATA"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    newest.keep_source(tmp_path)
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"vllm/engine/x.py", "vllm-0.33.0.dist-info/METADATA"}
    assert newest.version_in(tmp_path) == "0.33.0"
    with pytest.raises(EngineError, match="holds no vllm"):
        newest.version_in(tmp_path / "vllm")
