"""Flags and variables of the engine that Twinpool sets itself, and how a user's argument is recognised as one of them.

Standard library only, like :mod:`twinpool.core.protocol`, which others take these names from.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Engine flags that Twinpool sets itself. Each entry lists a flag with its short forms. vLLM takes ``_`` for ``-``
#: and ``--flag.key`` for JSON values, which :func:`managed_flag` knows.
MANAGED_FLAGS: tuple[str, ...] = (
    "--model",
    "--served-model-name",
    "--revision",
    "--max-model-len",
    "--enable-lora",
    "--lora-modules",
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--api-server-count",
    "--root-path",
    "--headless",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--data-parallel-size-local",
    "--data-parallel-rank",
    "--data-parallel-start-rank",
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
    "--data-parallel-multi-port-external-lb",
    "--enable-expert-parallel",
    "--enable-eplb",
    "--eplb-config",
    "--kv-transfer-config",
    "--kv-events-config",
    "--kv-offloading-size",
    "--kv-offloading-backend",
    "--otlp-traces-endpoint",
    "--speculative-config",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--shutdown-timeout",
    "-tp",
    "-pp",
    "-dp",
    "-dpl",
    "-dpn",
    "-dpr",
    "-dpa",
    "-dpp",
    "-dph",
    "-dpe",
    "-dpm",
    "-ep",
    "-sc",
    "-n",
    "-r",
)

#: Environment variables of the engine container that Twinpool sets itself; so is everything from ``TWINPOOL_``.
MANAGED_ENV: tuple[str, ...] = (
    "POD_IP",
    "POD_NAME",
    "POD_UID",
    "POD_NAMESPACE",
    "VLLM_HOST_IP",
    "VLLM_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
)


def managed_flag_pattern() -> str:
    """Return a regular expression, RE2's and Python's, for arguments that set a managed flag in full, for the CRD.

    Shared letters are written once: the API server estimates a rule's cost by the length of its pattern, and has no
    room for abbreviations, which the operator and the launcher refuse (:func:`refuse_managed`). A value may be glued to
    ``-n``.
    """
    long = _either([flag[2:] for flag in MANAGED_FLAGS if flag.startswith("--")])
    short = _either([flag[1:] for flag in MANAGED_FLAGS if not flag.startswith("--")])
    return f"^(--{long}|-{short})([=.]|$)|^-[nr][0-9]+$"


def _either(words: list[str]) -> str:
    """Return a pattern for exactly one of ``words``."""
    by_letter: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_letter.setdefault(word[0], []).append(word[1:])
    found = "|".join(letter.replace("-", "[-_]") + _either(rests) for letter, rests in by_letter.items())
    if "" in words:
        return f"({found})?" if found else ""
    return f"({found})" if len(by_letter) > 1 else found


_FLAG = re.compile("^--?[a-z]")
_GLUED = re.compile("^-[nr][0-9]+$")


def managed_flag(argument: str) -> str | None:
    """Return the managed flag that ``argument`` sets, or None when the argument is the user's own.

    argparse completes abbreviations (``--tensor-par``, ``-t``), so whatever begins a managed flag sets it; no flag of
    vLLM's own does.
    """
    if _GLUED.match(argument):
        return argument[:2]
    if not _FLAG.match(argument):
        return None
    name = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    return next((flag for flag in (name, *MANAGED_FLAGS) if flag in MANAGED_FLAGS and flag.startswith(name)), None)


def refuse_managed(args: Sequence[str]) -> None:
    """Refuse arguments that set a managed flag, also abbreviated (argparse completes ``--tensor-par``) or as ``-n2``.

    Raises
    ------
    InvalidValue
        Names the argument and the managed flag that it sets.
    """
    for argument in args:
        flag = managed_flag(argument)
        if flag is not None:
            raise InvalidValue(
                f"engine.args: {argument!r} sets {flag}, which Twinpool sets itself",
                "remove it and use the field of the pool that stands for it (model, parallelism, handoff, kvCache, "
                "speculation)",
            )
