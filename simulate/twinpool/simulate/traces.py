"""Request traces: what arrived when, how long it was, and which prompts began alike. Pure; times in seconds.

Five formats are read: Mooncake's JSON lines (FAST'25; ``timestamp`` in milliseconds, ``hash_ids`` of blocks of 512
tokens), Azure's CSV of 2023 (Splitwise, ISCA'24), BurstGPT's CSV (``Timestamp`` in seconds, ``Request tokens``,
``Response tokens``), JSON lines with fields of the router's access log (``time`` in seconds, ``prompt_tokens``, and
``output_tokens`` or ``events``), and what ``vllm bench serve --save-detailed`` saves (``start_times``, ``input_lens``,
``output_lens``). A line that cannot be read is named by number and reason.
"""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from random import Random

#: Tokens of one block of a Mooncake trace.
BLOCK_TOKENS = 512
#: Mooncake's time stamps come in steps of three seconds; the moments inside are drawn anew.
_STEP_SECONDS = 3.0
#: Names of blocks that are not full begin here, where lines are written.
_PARTIAL = 1 << 52


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``blocks`` names the prompt's full blocks; two prompts with equal leading names began alike."""

    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that cannot be read."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


def read(lines: Iterable[str]) -> tuple[tuple[Request, ...], tuple[Problem, ...]]:
    """Read a trace in the format that its first line is in; lines that cannot be read are left out and named."""
    lines = iter(lines)
    first = next((line for line in lines if line.strip()), "")
    found: list[Request] = []
    problems: list[Problem] = []
    rows = enumerate(itertools.chain([first], lines), 1)
    if not first.lstrip().startswith("{"):
        columns = next(csv.reader([next(rows)[1]]), [])
        row = _burstgpt if "Request tokens" in columns else _azure
        for number, line in rows:
            values = next(csv.reader([line]), [])
            _take(number, lambda values=values: row(dict(zip(columns, values, strict=False))), found, problems)  # type: ignore[misc]
        return _sorted(found), tuple(problems)
    if '"start_times"' in first or first.strip() == "{":
        return _vllm("".join(line for _, line in rows))
    entry = _mooncake if '"hash_ids"' in first else _logged
    for number, line in rows:
        if line.strip():
            _take(number, lambda line=line: entry(json.loads(line)), found, problems)  # type: ignore[misc]
    return _sorted(found), tuple(problems)


def _take(number: int, make: Callable[[], Request], found: list[Request], problems: list[Problem]) -> None:
    try:
        found.append(make())
    except (ValueError, TypeError, KeyError, IndexError) as error:
        problems.append(Problem(number, f"{type(error).__name__}: {error}"))


def read_mooncake(lines: Iterable[str], name: str) -> tuple[Request, ...]:
    """Read a trace of JSON lines.

    Raises
    ------
    InvalidValue
        With file, line number and reason.
    """
    found: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_mooncake(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(name, number, error, "timestamp, input_length, output_length and hash_ids") from None
    return _sorted(found)


def _mooncake(entry: Mapping[str, Any]) -> Request:
    prompt = int(entry["input_length"])
    # The last name stands for a block that is not full and so cannot be reused.
    blocks = tuple(int(block) for block in entry["hash_ids"])[: prompt // BLOCK_TOKENS]
    return Request(float(entry["timestamp"]) / 1000, prompt, int(entry["output_length"]), blocks)


def read_azure(lines: Iterable[str], name: str) -> tuple[Request, ...]:
    """Read a trace of CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``. Its prompts have nothing in common.

    Raises
    ------
    InvalidValue
        With file, line number and reason.
    """
    found = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            found.append(_azure(row))
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(name, number, error, "TIMESTAMP,ContextTokens,GeneratedTokens") from None
    return _sorted(found)


def _azure(row: Mapping[str, Any]) -> Request:
    moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return Request(moment, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _burstgpt(row: Mapping[str, Any]) -> Request:
    """Read one row; a request that failed there, and has no token, is none."""
    prompt, answer = int(row["Request tokens"]), int(row["Response tokens"])
    if min(prompt, answer) < 1:
        raise ValueError("a request without tokens: it failed")
    return Request(float(row["Timestamp"]), prompt, answer)


def _vllm(text: str) -> tuple[tuple[Request, ...], tuple[Problem, ...]]:
    """Read the one object of a saved benchmark, requests numbered as lines; those that failed have no tokens."""
    found: list[Request] = []
    problems: list[Problem] = []
    try:
        whole = json.loads(text)
        rows = list(zip(whole["start_times"], whole["input_lens"], whole["output_lens"], strict=True))
    except (ValueError, TypeError, KeyError) as error:
        return (), (Problem(1, f"{type(error).__name__}: {error}"),)
    for number, (moment, prompt, answer) in enumerate(rows, 1):
        if answer:
            found.append(Request(float(moment), int(prompt), int(answer)))
        else:
            problems.append(Problem(number, "a request without an answer: it failed"))
    return _sorted(found), tuple(problems)


def line_of(request: Request, number: int) -> str:
    """Return the ``number``-th request as a line in Mooncake's format, which keeps what prompts have in common."""
    # Its last name stands for a block that is not full, which is nobody else's.
    rest = (_PARTIAL + number,) if request.prompt % BLOCK_TOKENS else ()
    entry = {
        "timestamp": round(request.arrival * 1000, 3), "input_length": request.prompt, "output_length": request.output,
        "hash_ids": [*request.blocks, *rest],
    }  # fmt: skip
    return json.dumps(entry)


def _logged(entry: Mapping[str, Any]) -> Request:
    """Read one line of the router's access log; the last event of a stream is no token."""
    output = entry["output_tokens"] if "output_tokens" in entry else int(entry["events"]) - 1
    return Request(float(entry["time"]), int(entry["prompt_tokens"]), max(1, int(output)))


def _unreadable(name: str, number: int, error: Exception, wanted: str) -> InvalidValue:
    return InvalidValue(f"{name}, line {number}: {type(error).__name__}: {error}", f"each line needs {wanted}")


def _sorted(found: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests by arrival, the first at 0."""
    if not found:
        return ()
    begin = min(request.arrival for request in found)
    return tuple(sorted((replace(r, arrival=r.arrival - begin) for r in found), key=lambda request: request.arrival))


def sample(trace: Sequence[Request], share: float, speed: float, rng: Random) -> tuple[Request, ...]:
    """Return one sample of ``trace``: each request is kept with probability ``share``, at ``speed`` times the rate.

    Arrivals are moved within Mooncake's step of time, so that no two samples are the same; time is squeezed so that a
    smaller share does not lower the rate.
    """
    squeeze = share / speed
    kept = [
        replace(request, arrival=(request.arrival + rng.random() * _STEP_SECONDS) * squeeze)
        for request in trace
        if share >= 1 or rng.random() < share
    ]
    kept.sort(key=lambda request: request.arrival)
    return tuple(kept)
