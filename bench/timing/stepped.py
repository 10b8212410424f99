"""Run by the engine's own Python: vLLM in this process, one step after another, by the CPU time of the process.

Reads ``{"model": FOLDER, "runs": [[[arrival, prompt tokens, output tokens], ...], ...]}`` from its input and writes
for each run ``RUN [[[first, finish], ...], [[prompt tokens, batch, context, seconds], ...]]``: when the first and the
last token of each request came, in seconds since it arrived; and of each step what waited to be read, what was
written for, how many tokens stood before, and how long it took. The clock is the CPU time that the engine used,
plus what it would have waited idle for the next arrival: neighbours on the machine do not count.
"""

import json
import os
import random
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import EngineArgs, LLMEngine, SamplingParams

#: Prompt tokens that one step reads at most, as the simulator has it.
CHUNK = 2048


def play(engine: Any, requests: list[list[float]], name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return first tokens and ends of ``requests``, and what each step did."""
    dice = random.Random(name)
    begin, idle = time.process_time(), 0.0
    waiting = sorted(enumerate(requests), key=lambda item: item[1][0])[::-1]
    times = [[0.0, 0.0] for _ in requests]
    written: dict[str, int] = {}
    steps: list[list[float]] = []
    while waiting or written:
        now = time.process_time() - begin + idle
        if not written and waiting[-1][1][0] > now:
            idle += waiting[-1][1][0] - now
            now = waiting[-1][1][0]
        while waiting and waiting[-1][1][0] <= now:
            number, (_, prompt, output) = waiting.pop()
            ids = [dice.randrange(100, 2000) for _ in range(int(prompt))]
            sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            engine.add_request(f"{name}-{number}", {"prompt_token_ids": ids}, sampling)
            written[f"{name}-{number}"] = 0
        running = [key for key, count in written.items() if count]
        new = sum(requests[place(key)][1] for key, count in written.items() if not count)
        context = sum(requests[place(key)][1] + written[key] for key in running)
        outputs = engine.step()
        after = time.process_time() - begin + idle
        steps.append([new, len(running), context, after - now])
        for found in outputs:
            key, number = found.request_id, place(found.request_id)
            if not written[key]:
                times[number][0] = after - requests[number][0]
            written[key] = len(found.outputs[0].token_ids)
            if found.finished:
                times[number][1] = after - requests[number][0]
                del written[key]
    return times, steps


def place(key: str) -> int:
    """Return the number of a request of a run."""
    return int(key.rpartition("-")[2])


def main() -> None:
    """Play all runs, after one that warms up."""
    asked = json.load(sys.stdin)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=asked["model"],
            max_model_len=2048,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=256 * 2**20,
            enforce_eager=True,
            dtype="float32",
            enable_prefix_caching=False,
            seed=0,
        )
    )
    play(engine, [[0.0, 900, 20], [0.0, 60, 20]], "warm")
    for number, requests in enumerate(asked["runs"]):
        print("RUN " + json.dumps(play(engine, requests, f"r{number}")), flush=True)


if __name__ == "__main__":
    main()
