"""The real vLLM is killed where it hurts: prefill between the hops, decode in a stream; and drains under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import urllib.error
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = " ".join(f"word{i} alpha beta" for i in range(30))
ASK_REMOTE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
STREAMS, LENGTH = 8, 200


@pytest.fixture(scope="module")
def pair(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LauncherPod, LauncherPod]]:
    """A prefill and a decode worker, both ready."""
    folder = tmp_path_factory.mktemp("pods")
    zipapp = inject(folder)
    pods = []
    for number, role in enumerate(("prefill", "decode"), start=1):
        ip = f"127.{176 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}"
        settings = tiny_config(role=role, python=str(engine.python))
        pods.append(LauncherPod(engine, zipapp, folder / role, ip, settings))
    try:
        for pod in pods:
            pod.wait_ready()
        yield pods[0], pods[1]
    finally:
        end(*(pod.process for pod in pods))


@pytest.fixture(scope="module")
def alone(pair: tuple[LauncherPod, LauncherPod]) -> str:
    """What one worker answers by itself."""
    return str(pair[0].complete(prompt=PROMPT, max_tokens=16, ignore_eos=True)["choices"][0]["text"])


def prefilled(prefill: LauncherPod) -> dict[str, Any]:
    first = prefill.complete(prompt=PROMPT, max_tokens=1, ignore_eos=True, kv_transfer_params=ASK_REMOTE)
    found: dict[str, Any] = first["kv_transfer_params"]
    return found


def decoded(decode: LauncherPod, parameters: dict[str, Any]) -> str:
    answer = decode.complete(prompt=PROMPT, max_tokens=16, ignore_eos=True, kv_transfer_params=parameters)
    return str(answer["choices"][0]["text"])


def kill_engine(pod: LauncherPod) -> int:
    """Kill the engine and wait until its launcher says so; return the epoch that it had."""
    epoch: int = pod.status()["epoch"]
    os.kill(pod.status()["engine"]["pid"], signal.SIGKILL)
    what = "a launcher without its engine is not ready"
    wait_until(lambda: pod.readyz()[0] != 200 or pod.status()["epoch"] != epoch, 60, what, interval=0.05)
    return epoch


def recovered(pod: LauncherPod, epoch: int) -> None:
    """Wait until the engine was restarted in place and serves."""
    pod.wait_ready()
    assert pod.status()["epoch"] == epoch + 1
    # SIGKILL from outside is put down to memory, which is what sends it by itself.
    assert 'twinpool_worker_engine_losses_total{cause="OutOfMemory"} 1' in pod.get("/metrics")[1]


def test_a_prefill_worker_that_dies_between_the_hops_fails_that_request_and_nothing_else(
    pair: tuple[LauncherPod, LauncherPod], alone: str
) -> None:
    prefill, decode = pair
    assert decoded(decode, prefilled(prefill)) == alone
    # A prompt that decode holds nothing of, so that the lost blocks are missed.
    lost = prefill.complete(prompt="other " + PROMPT, max_tokens=1, ignore_eos=True, kv_transfer_params=ASK_REMOTE)
    epoch = kill_engine(prefill)
    with pytest.raises(urllib.error.HTTPError) as failed:
        decode.complete(prompt="other " + PROMPT, max_tokens=16, kv_transfer_params=lost["kv_transfer_params"])
    with failed.value:
        assert failed.value.code == 500, "the lost KV is not made up"
    assert decode.readyz()[0] == 200, "a decode worker is well when prefill is not"
    assert decode.complete(prompt=PROMPT, max_tokens=16, ignore_eos=True)["choices"][0]["text"] == alone
    recovered(prefill, epoch)
    assert decoded(decode, prefilled(prefill)) == alone, "the new engine's id is learnt from its answer"


def test_a_decode_worker_that_dies_in_a_stream_breaks_it_off_and_comes_back(
    pair: tuple[LauncherPod, LauncherPod], alone: str
) -> None:
    prefill, decode = pair
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1500, "min_tokens": 1500, "stream": True}
    with decode.open("/v1/completions", body) as stream:
        seen = [stream.readline() for _ in range(3)]
        epoch = kill_engine(decode)
        with contextlib.suppress(OSError, http.client.HTTPException):
            seen += stream.readlines()
    assert b"data: [DONE]\n" not in seen, "a stream that was cut does not end as if it were whole"
    recovered(decode, epoch)
    assert prefill.readyz()[0] == 200
    assert decoded(decode, prefilled(prefill)) == alone


def test_a_worker_that_must_go_ends_every_stream_under_load(pair: tuple[LauncherPod, LauncherPod]) -> None:
    _, decode = pair
    begun = threading.Barrier(STREAMS + 1, timeout=120)
    reasons: list[str] = []

    def stream(number: int) -> None:
        prompt = f"stream {number} {PROMPT}"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "min_tokens": LENGTH, "stream": True}
        with decode.open("/v1/completions", body) as answer:
            seen = [answer.readline()]
            begun.wait()
            seen += answer.readlines()
        chunks = [line for line in seen if line.startswith(b"data: ")]
        assert chunks[-1] == b"data: [DONE]\n"
        reasons.append(json.loads(chunks[-2][6:])["choices"][0]["finish_reason"])

    clients = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for client in clients:
        client.start()
    begun.wait()
    decode.process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(timeout=180)
    assert reasons == ["length"] * STREAMS, "no stream is cut by a drain"
    assert decode.process.wait(timeout=60) == 0
    assert not decode.termination.exists()
