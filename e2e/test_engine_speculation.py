"""The real vLLM drafts by n-grams, one number and a schedule: the same tokens, fewer steps, told by position."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.worker.inject import inject
from twinpool.worker.logic import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: The tiny model's weights are random: it soon says the same again and again, which n-grams foresee.
PROMPT = " ".join(f"word{i} alpha beta" for i in range(20))
LENGTH = 300


@pytest.fixture(scope="module")
def serve(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., contextlib.AbstractContextManager]:
    """Return a context in which one pod serves, on an address of its own."""
    folder = tmp_path_factory.mktemp("pods")
    zipapp = inject(folder)
    numbers = iter(range(1, 200))

    @contextlib.contextmanager
    def _serve(**changes: Any) -> Iterator[LauncherPod]:
        number = next(numbers)
        ip = f"127.{160 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}"
        settings = tiny_config(
            connector=None, role="aggregated", python=str(engine.python), stall_timeout=18.0, **changes
        )
        pod = LauncherPod(engine, zipapp, folder / str(number), ip, settings)
        try:
            pod.wait_ready()
            yield pod
        finally:
            end(pod.process)

    return _serve


def answers(pod: LauncherPod) -> list[str]:
    """Return one answer alone, and several at once."""
    whole = pod.complete(prompt=PROMPT, max_tokens=LENGTH, ignore_eos=True)["choices"]
    beside = pod.complete(prompt=[PROMPT[start:] for start in (0, 5, 11)], max_tokens=60, ignore_eos=True)["choices"]
    return [choice["text"] for choice in whole + beside]


@pytest.fixture(scope="module")
def plain(serve: Callable[..., Any]) -> list[str]:
    with serve() as pod:
        found = answers(pod)
        assert "speculation" not in pod.status()
        assert "spec_decode" not in pod.metrics()
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "4 tokens, best for 32 sequences"),
        # A pool with GPUs, of which none is here: nothing is known of them, and an H100 gets a schedule.
        ({"gpus": 1}, "tokens by batch: 4 for 1 to"),
    ],
    ids=["one number", "schedule"],
)
def test_ngram_gives_the_same_tokens_in_fewer_steps(
    serve: Callable[..., Any], plain: list[str], changes: dict[str, Any], words: str
) -> None:
    with serve(speculation="ngram", **changes) as pod:
        assert words in pod.status()["speculation"]["chosen"]
        assert answers(pod) == plain
        found = wait_for_acceptance(pod)
        assert len(found["acceptance"]) == 4
        assert found["acceptance"] == sorted(found["acceptance"], reverse=True), "kept with all before it"
        assert found["acceptance"][0] > 0.1, "the model repeats itself, so drafts are right"
        assert found["tokensPerStep"] == pytest.approx(1 + sum(found["acceptance"]))
        assert "twinpool_worker_speculation_tokens_per_step" in pod.get("/metrics")[1]
        before = counted(pod)
        pod.complete(prompt=PROMPT, max_tokens=LENGTH, ignore_eos=True)
        steps, kept = (now - then for now, then in zip(counted(pod), before, strict=True))
        assert steps <= LENGTH - kept + 3, "every draft that is right saves a step; the launcher may probe in between"


def counted(pod: LauncherPod) -> tuple[float, float]:
    """Return the engine's steps, and the drafted tokens that it kept."""
    names = ("vllm:iteration_tokens_total_count", "vllm:spec_decode_num_accepted_tokens_total")
    text = pod.metrics()
    steps, kept = (sum(value for _, value in load.series(text, name)) for name in names)
    return steps, kept


def wait_for_acceptance(pod: LauncherPod) -> dict[str, Any]:
    what = "the launcher looks at the engine's counters once in a while"
    wait_until(lambda: pod.status()["speculation"].get("drafts"), 60, what)
    found: dict[str, Any] = pod.status()["speculation"]
    return found
