"""Find, in what an engine printed last, the line that says why it ended.

vLLM prints the cause in the process where it happened, then a generic error in each process above it ("See root cause
above"), each line with a process prefix, a log prefix, and a traceback. The cause is the last exception line that is
not generic. Engines print what they like, so every answer here is a best effort over untrusted text: bounded, and
printable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Longest reason, in characters; the termination message has room for it and the engine's last lines.
MAX_REASON = 800
#: The kubelet keeps this many bytes of a termination message.
MAX_TERMINATION_MESSAGE = 4096

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: ``(EngineCore_DP0 pid=123) ``, once per process level.
_PROCESS = re.compile(r"^(\([A-Za-z][\w ]{0,60}pid=\d+\)\s?)+")
#: ``ERROR 11-30 10:31:20 [core.py:943] ``, with or without a year.
_LOG = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.,]+ \[[^\]]{1,120}\] ?")
#: ``torch.OutOfMemoryError: ...``: how Python prints an exception.
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Refused|NotFound|InvalidValue)\b(?::|$)"
)
#: ``vllm serve: error: unrecognized arguments: --x``: how argparse ends a program.
_USAGE = re.compile(r"^\S.{0,80}: error: ")
#: A line of a traceback that only shows code.
_FRAME = re.compile(r"^(  File |    |\s+[\^~]+$)")
_GENERIC = re.compile(
    r"Engine core initialization failed|See (?:root|the) (?:cause|stack trace) above|EngineDeadError"
    r"|WorkerProc initialization failed|cancelled|^SystemExit|^KeyboardInterrupt|^asyncio\.exceptions\.CancelledError"
    r"|DistNetworkError.*Connection reset|Executor failed"
)

#: What vLLM says of a process that vanished without a word, such as one killed for want of memory.
_DIED = re.compile(r"died unexpectedly")

#: What to do about failures that users can mend: a pattern in the reason, and the advice.
_ADVICE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (
            _DIED.pattern,
            "it was most often killed for want of memory: raise resources.memory of the role",
        ),
        (
            r"out of memory|OutOfMemory|No available memory for the cache blocks",
            "use more or larger GPUs, or less memory (--gpu-memory-utilization, maxModelLen, quantization in args)",
        ),
        (
            r"requested memory for kv|kv-cache-memory-bytes",
            "lower --kv-cache-memory-bytes in args, or raise resources.memory of the role",
        ),
        (
            r"KV cache.*(?:larger|less|exceed)|max seq len|estimated maximum model length",
            "lower model.maxModelLen or give the engine more memory",
        ),
        (
            r"max_model_len|max_position_embeddings",
            "lower model.maxModelLen to what the model allows",
        ),
        (
            r"address already in use|Errno 98",
            "another process has the port; hostNetwork pods of one node collide",
        ),
        (
            r"gated repo|401 Client Error|403 Client Error|Access to model",
            "name a Secret with HF_TOKEN in model.secretRef",
        ),
        (
            r"repository ID or local|not a local folder|RepositoryNotFound|couldn't connect|Repo id must|LocalEntryNot",
            "check model.source: the path must exist in the engine's container, or the id on the Hugging Face hub",
        ),
        (
            r"unrecognized arguments|: error: argument",
            "correct engine.args; this engine does not know that flag or value",
        ),
        (
            r"No module named|No such file or directory.*python",
            "set engine.python to the interpreter of the image that has the engine",
        ),
        (
            r"safetensor|deserializ|header too|incomplete metadata",
            "the weights are damaged or incomplete; fetch them again",
        ),
    )
)


def clean(line: str) -> str:
    """Return ``line`` without colours, process prefix, log prefix and unprintable characters."""
    line = _PROCESS.sub("", _ANSI.sub("", line))
    line = _LOG.sub("", line)
    return "".join(c if c.isprintable() else " " for c in line).rstrip()


def failure_reason(lines: Sequence[str], exit_code: int) -> str:
    """Say in at most :data:`MAX_REASON` characters why the engine ended, and what to do when that is known.

    Parameters
    ----------
    lines:
        The engine's last lines, oldest first.
    exit_code:
        As Python gives it: negative for a signal.
    """
    how = _how_it_ended(exit_code)
    cause = _cause([clean(line) for line in lines])
    if not cause:
        return how
    advice = next((advice for pattern, advice in _ADVICE if pattern.search(cause)), "")
    tail = f" ({how})" + (f" - {advice}" if advice else "")
    return _shorten(cause, MAX_REASON - len(tail)) + tail


def termination_message(reason: str, lines: Sequence[str]) -> str:
    """Join the reason and as many of the last lines as the kubelet keeps, newest kept first."""
    message = _shorten(reason, MAX_REASON)
    room = MAX_TERMINATION_MESSAGE - len(message.encode()) - len("\nlast lines of the engine:")
    kept: list[str] = []
    for line in reversed([clean(line) for line in lines]):
        if not line.strip() or _FRAME.match(line):
            continue
        size = len(line.encode()) + 1
        if size > room:
            break
        room -= size
        kept.append(line)
    return "\n".join([message, "last lines of the engine:", *reversed(kept)]) if kept else message


def _how_it_ended(exit_code: int) -> str:
    signal = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code <= 192 else 0
    if signal == 9:
        return "the engine was killed (SIGKILL), most often for want of memory: raise resources.memory of the role"
    if signal:
        names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV", 15: "SIGTERM"}
        return f"the engine was ended by {names.get(signal, f'signal {signal}')}"
    return f"the engine ended with exit code {exit_code}"


def _cause(lines: Sequence[str]) -> str:
    """Return the last exception or usage error that is not generic, with its lines; else the best there is."""
    generic = next((line for line in reversed(lines) if _DIED.search(line)), "")
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if not (_EXCEPTION.match(line) or _USAGE.match(line)):
            continue
        if _GENERIC.search(line):
            generic = generic or line
            continue
        return " ".join([line, *_continuation(lines[index + 1 : index + 4])])
    return generic


def _continuation(following: Sequence[str]) -> list[str]:
    """Return the indented lines after an exception line (pydantic writes what is wrong there)."""
    kept: list[str] = []
    for line in following:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "For further information")):
            break
        kept.append(line.strip())
    return kept


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
