"""The real vLLM over two tensor- or data-parallel ranks, in one pod and in two; a lost rank restarts both.

And the router in front of data-parallel ones: it knows what each holds, and names the rank on both hops.
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.protocol import KV_EVENTS_PORT, KV_REPLAY_PORT, ROLES, Leader
from twinpool.demo.client import get, post
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.models import TINY_MOE, ensure_model
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.localengine.router import admin, routing
from twinpool.worker.inject import inject
from twinpool.worker.logic import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: A prompt of token ids, and how many whole blocks of vLLM's size on a CPU it has.
IDS = list(range(10, 710))
BLOCK, BLOCKS = 128, 5
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
EVENTS = {"kvEvents": KV_EVENTS_PORT, "kvReplay": KV_REPLAY_PORT}

PROMPT = " ".join(f"word{i} alpha beta" for i in range(20))


@pytest.fixture(scope="module")
def start(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LauncherPod]]:
    """Start pods, each on its own address; :func:`end` ends one."""
    started: list[LauncherPod] = []
    folder = tmp_path_factory.mktemp("pods")
    zipapp = inject(folder)

    def _start(environment: dict[str, str] | None = None, **changes: Any) -> LauncherPod:
        number = len(started) + 1
        ip = f"127.{144 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}"
        fixed = {"connector": None, "role": "aggregated", "python": str(engine.python)}
        settings = tiny_config(**{**fixed, **changes})
        started.append(LauncherPod(engine, zipapp, folder / str(number), ip, settings, environment))
        return started[-1]

    yield _start
    end(*(pod.process for pod in started))


@pytest.fixture(scope="module")
def alone(start: Callable[..., LauncherPod]) -> str:
    """What one rank alone answers."""
    pod = start()
    pod.wait_ready()
    text = answer(pod)
    assert pod.get("/preflight")[0] == 404, "one rank has no links"
    end(pod.process)
    return text


def answer(pod: LauncherPod, headers: dict[str, str] | None = None) -> str:
    body = {"model": "tiny", "temperature": 0, "prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}
    with pod.open("/v1/completions", body, headers) as got:
        return str(json.load(got)["choices"][0]["text"])


def copies(pod: LauncherPod) -> dict[str, Any]:
    """Return what the counters of each data-parallel rank say that it has done."""
    return {work.engine: work.marks for work in load.work(pod.metrics())}


def complete_at(pod: LauncherPod, rank: int, prompt: list[int]) -> dict[str, Any]:
    """Have a rank complete a prompt of token ids."""
    with pod.open("/v1/completions", {**GREEDY, "prompt": prompt}, {"X-data-parallel-rank": str(rank)}) as got:
        completion: dict[str, Any] = json.load(got)
    return completion


def rank_holds(ip: str, pod: LauncherPod, rank: int) -> bool:
    """Return whether the router at ``ip`` relies on all ranks of a worker, of which one holds the prompt."""
    (found,) = (each for each in admin(ip, "index")["endpoints"] if each["name"] == f"{pod.ip}:8000")
    return bool(found["relied"] and found["ranks"][rank]["blocks"] >= BLOCKS)


def group(start: Callable[..., LauncherPod], file: Path, **changes: Any) -> list[LauncherPod]:
    """Start two pods that are one group, with the leader's address in ``file``, and wait until both are ready."""
    pods = [
        start(
            {
                "POD_UID": f"uid-{number}",
                "POD_NAME": f"pod-{number}",
                "TWINPOOL_NODE_RANK": str(number),
                "TWINPOOL_LEADER_FILE": str(file),
            },
            nodes=2,
            **changes,
        )
        for number in (0, 1)
    ]
    file.write_text(Leader(pods[0].ip, "uid-0", 1).to_json())
    for pod in pods:
        pod.wait_ready()
    return pods


def check_copies(leader: LauncherPod, alone: str) -> None:
    """Ask each of two data-parallel ranks behind one endpoint; each counts for itself."""
    before = copies(leader)
    assert sorted(before) == ["0", "1"]
    for number in ("0", "1"):
        assert answer(leader, {"X-data-parallel-rank": number}) == alone
        after = copies(leader)
        assert after[number] != before[number], f"rank {number} answered"
        before = after
    assert "twinpool_worker_engine_restarts_total 0" in leader.get("/metrics")[1]


def test_two_copies_in_one_pod_answer_as_one_does(start: Callable[..., LauncherPod], alone: str) -> None:
    pod = start(data=2)
    pod.wait_ready()
    check_copies(pod, alone)
    end(pod.process)


def test_two_copies_in_two_pods_have_one_endpoint(
    start: Callable[..., LauncherPod], alone: str, tmp_path: Path
) -> None:
    pods = group(start, tmp_path / "leader", data=2, kv_events=True)
    check_copies(pods[0], alone)
    worker = {"role": "decode", "host": pods[0].ip, "ranks": 2, "rankHosts": [pod.ip for pod in pods]}
    ip = f"{pods[0].ip.rpartition('.')[0]}.200"
    with routing(tmp_path, ip, [{**worker, **EVENTS}], policy="price", disaggregated=False) as url:
        leader = pods[0]
        held = complete_at(leader, 1, IDS)
        assert held["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_until(lambda: rank_holds(ip, leader, 1), 60, "the router knows what the rank in the other pod holds")
        before = copies(leader)
        answer = post(f"{url}/v1/completions", {**GREEDY, "prompt": IDS}).json()
        assert answer["choices"] == held["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == BLOCKS * BLOCK
        after = copies(leader)
        assert (after["0"] == before["0"], after["1"] == before["1"]) == (True, False), (
            "the rank that holds it answered"
        )
    end(*(pod.process for pod in pods))


def test_a_handoff_from_and_to_a_rank_is_pulled_from_the_one_that_prefilled(
    start: Callable[..., LauncherPod], tmp_path: Path
) -> None:
    # Two preflights at a time would want one port of this machine.
    shared = {"data": 2, "kv_events": True, "connector": "nixl", "preflight": False}
    pods = {role: start(role=role, **shared) for role in ROLES}
    for pod in pods.values():
        pod.wait_ready()
    prefill, decode = pods.values()
    ip = f"{prefill.ip.rpartition('.')[0]}.201"
    workers = [{"role": role, "host": pod.ip, "ranks": 2, **EVENTS} for role, pod in pods.items()]
    with routing(tmp_path, ip, workers, policy="price") as url:
        complete_at(prefill, 1, IDS)
        wait_until(lambda: rank_holds(ip, prefill, 1), 60, "the router knows what the prefill rank holds")
        texts = []
        for number in range(2):
            if number:
                at_decode = "the router knows what a rank of decode has pulled"
                wait_until(lambda: any(rank_holds(ip, decode, rank) for rank in range(2)), 60, at_decode)
            before, pulled = copies(prefill), decode.prompt_tokens_by_source().get("external_kv_transfer", 0)
            text = post(f"{url}/v1/completions", {**GREEDY, "prompt": [*IDS, number]}).json()["choices"][0]["text"]
            assert decode.prompt_tokens_by_source()["external_kv_transfer"] > pulled, "its KV came over the wire"
            after = copies(prefill)
            assert (after["0"] == before["0"], after["1"] == before["1"]) == (True, False), (
                "the rank that holds it read"
            )
            texts.append(text)
        chosen = get(f"http://{ip}:8081/metrics")
    assert texts == [complete_at(prefill, 0, [*IDS, number])["choices"][0]["text"] for number in range(2)]
    assert 'twinpool_router_rank_choices_total{role="prefill",by="router"} 2' in chosen
    # What a pull of so few tokens saves is within the 5 % that count as equal: the lot may leave it to the engine.
    by = re.findall(r'rank_choices_total\{role="decode",by="(?:router|engine)"\} (\d+)', chosen)
    assert sum(map(int, by)) == 2
    end(*(pod.process for pod in pods.values()))


def test_two_ranks_in_one_pod_answer_as_one_does(start: Callable[..., LauncherPod], alone: str) -> None:
    pod = start(tensor=2)
    pod.wait_ready()
    assert answer(pod) == alone
    code, body = pod.get("/preflight")
    found = json.loads(body)
    assert (code, found["outcome"], found["backend"], found["world"]) == (200, "passed", "gloo", 2)
    assert len(found["links"]) == 1
    assert 'twinpool_worker_preflight_outcome{outcome="passed"} 1' in pod.get("/metrics")[1]
    end(pod.process)


def test_two_ranks_in_two_pods_are_one_and_a_lost_one_restarts_both(
    start: Callable[..., LauncherPod], alone: str, tmp_path: Path
) -> None:
    file = tmp_path / "leader"

    pods = group(start, file, tensor=2)
    assert answer(pods[0]) == alone
    assert json.loads(pods[0].get("/preflight")[1])["slowest"] == "pod-0 (rank 0) - pod-1 (rank 1)"

    os.kill(pods[1].status()["engine"]["pid"], signal.SIGKILL)
    what = "a leader without its headless rank serves nobody, whatever /health says"
    wait_until(lambda: pods[0].readyz()[0] != 200, 30, what, interval=0.02)
    assert json.loads(pods[0].readyz()[1])["cause"] == "RankLost"
    for pod in pods:
        pod.wait_ready()
    assert answer(pods[0]) == alone
    assert [pod.status()["epoch"] for pod in pods] == [2, 2]
    assert 'twinpool_worker_engine_losses_total{cause="RankLost"} 1' in pods[0].get("/metrics")[1]

    os.kill(pods[0].status()["engine"]["pid"], signal.SIGKILL)
    what = "a rank without its leader starts anew with it"
    wait_until(lambda: all(pod.status()["epoch"] > 2 for pod in pods), 120, what)
    for pod in pods:
        pod.wait_ready()
    assert answer(pods[0]) == alone
    assert [pod.status()["epoch"] for pod in pods] == [3, 3]
    assert 'twinpool_worker_engine_losses_total{cause="OutOfMemory"} 1' in pods[0].get("/metrics")[1]
    end(*(pod.process for pod in pods))


def test_a_mixture_with_expert_parallelism_answers_as_without(
    start: Callable[..., LauncherPod], engine: Engine
) -> None:
    """On one rank, the most that vLLM 0.32 runs of it on a CPU: several ranks are for the simulated engine."""
    folder = str(ensure_model(TINY_MOE, engine, Progress()))
    texts = []
    for expert in (False, True):
        pod = start(model_path=folder, expert=expert)
        pod.wait_ready()
        texts.append(answer(pod))
        assert ("--enable-expert-parallel" in pod.log.read_text()) is expert
        end(pod.process)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10
