"""The simulator beside the real vLLM: times fitted on some runs of it, the distributions of others foretold.

One engine with the tiny model on the CPU, stepped in its own process by the CPU time that it uses, so that a busy
machine hardly counts. Prices are fitted on prompts that come alone and on batches that begin together. Foretold are
Poisson arrivals at two loads: of prompts alone, as a prefill worker has them, and of whole requests. Bars were set
before looking: each median within 20 %, each 90th percentile within 30 %.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.harness.vllm import prepared
from bench.timing.compare import Times, error, foretold, times
from bench.timing.fit import Step, fit
from twinpool.core.errors import TwinpoolError
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY
from twinpool.simulate.traces import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.core.economics import Prices
    from twinpool.localengine.layout import Engine

TITLE = "timing: the simulator's times beside those of the real vLLM (CPU, tiny model, CPU time)"

_SCRIPT = Path(__file__).with_name("stepped.py")
#: Tokens of prompts that come alone, and (sequences, tokens of a prompt) of batches that begin together.
_ALONE = (32, 64, 128, 256, 512, 1024, 1536)
_BATCHES = ((1, 100), (2, 100), (4, 100), (8, 100), (16, 100), (1, 1000), (4, 1000), (8, 500))
_ANSWER = 40
#: Held-out runs: name, requests a second, whether anything is written.
HELD_OUT = (("prompts", 8.0, False), ("prompts", 16.0, False), ("requests", 6.0, True), ("requests", 10.0, True))
_NOTE = "error: |foretold / observed - 1| of a quantile over the requests of one run, in CPU time of the engine"
#: A folder in which what was asked for and found is kept, if anywhere.
_RECORD = "TWINPOOL_TIMING_RECORD"


def calibration() -> list[list[Request]]:
    """Return the runs that prices are fitted on."""
    alone = [[Request(2.0 * number, tokens, 2) for number in range(4)] for tokens in _ALONE]
    return alone + [[Request(0.0, tokens, _ANSWER)] * count for count, tokens in _BATCHES]


def drawn(rate: float, seconds: float, dice: Random, *, writes: bool) -> list[Request]:
    """Return requests that arrive at ``rate`` for ``seconds`` (Poisson), with prompts and answers of many lengths."""
    now, found = 0.0, []
    while (now := now + dice.expovariate(rate)) < seconds:
        prompt = max(32, min(1536, int(dice.expovariate(1 / 400))))
        output = max(4, min(160, int(dice.expovariate(1 / 40)))) if writes else 1
        found.append(Request(now, prompt, output))
    return found


def priced(found: Sequence[Sequence[Step]], runs: Sequence[Sequence[Request]]) -> Prices:
    """Return the prices fitted on the steps of a calibration that read one prompt alone or wrote for a whole batch."""
    steps = [
        step
        for several, requests in zip(found, runs, strict=True)
        for step in several
        if (step.new == 0 and step.batch == sum(r.arrival == 0 for r in requests)) or step.new == requests[0].prompt
    ]
    return fit(steps)


def stepped(engine: Engine, runs: Sequence[Sequence[Request]]) -> list[tuple[list[tuple[float, float]], list[Step]]]:
    """Return for each run when first and last tokens came, and what the steps were.

    Raises
    ------
    TwinpoolError
        The engine failed; its last lines are in the message.
    """
    asked = [[[request.arrival, request.prompt, request.output] for request in run] for run in runs]
    environment = {"HOME": os.environ.get("HOME", "/"), **serving_environment(engine)}
    done = subprocess.run(
        [str(engine.python), str(_SCRIPT)],
        input=json.dumps({"model": str(TINY.folder), "runs": asked}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TwinpoolError(f"vLLM failed: {done.stderr[-500:]}", "run `make demo`, which shows its log")
    lines = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
    return [([(first, last) for first, last in found], [Step(*step) for step in steps]) for found, steps in lines]


@dataclass
class Runs:
    """What was foretold and observed in the newest run, by held-out run."""

    engine: Engine
    seconds: float
    _taken: int = 0
    _found: list[tuple[Times, Times]] = field(default_factory=list)

    def take(self) -> None:
        """Calibrate, play what is held out, and foretell it."""
        dice = Random(self._taken)
        self._taken += 1
        first, held = calibration(), [drawn(rate, self.seconds, dice, writes=writes) for _, rate, writes in HELD_OUT]
        found = stepped(self.engine, [*first, *held])
        prices = priced([steps for _, steps in found[: len(first)]], first)
        seen = [times(run, ends) for run, (ends, _) in zip(held, found[len(first) :], strict=True)]
        self._found = [(foretold(run, prices), one) for run, one in zip(held, seen, strict=True)]
        if folder := os.environ.get(_RECORD):
            steps = [[[s.new, s.batch, s.context, s.seconds] for s in steps] for _, steps in found[: len(first)]]
            runs = [
                {"requests": [[r.arrival, r.prompt, r.output] for r in run], "ends": ends}
                for run, (ends, _) in zip(held, found[len(first) :], strict=True)
            ]
            (Path(folder) / f"run{self._taken}.json").write_text(json.dumps({"steps": steps, "runs": runs}))

    def error(self, number: int, what: str, share: float) -> float:
        """Return the error of one quantile; the first one asked for in a round takes a new run."""
        if (number, what, share) == (0, "ttft", 0.5):
            self.take()
        said, seen = self._found[number]
        return abs(error(getattr(said, what), getattr(seen, what), share))


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give a cell for each quantile that is foretold."""
    runs = Runs(prepared(), 6.0 if quick else 20.0)
    yield [
        Cell(
            f"{what.upper()} of {name} at {rate:g}/s, {'median' if share == 0.5 else 'p90'}",
            "error",
            partial(runs.error, number, what, share),
            None,
            Bar("ours", at_most=0.2 if share == 0.5 else 0.3),
            _NOTE,
        )
        for number, (name, rate, writes) in enumerate(HELD_OUT)
        for what in (("ttft", "itl") if writes else ("ttft",))
        for share in (0.5, 0.9)
    ]
