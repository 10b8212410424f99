"""The published traces that the benchmark replays; none is part of the repository."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.simulate.traces import read_azure, read_mooncake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twinpool.simulate.traces import Request

VARIABLE = "TWINPOOL_TRACES"


class TraceMissing(TwinpoolError):
    """A trace file is not there."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trace: its file, and how it is read."""

    name: str
    file: str
    read: Callable[[Iterable[str], str], tuple[Request, ...]]


CONVERSATION = Source("conversation", "mooncake_conversation_trace.jsonl", read_mooncake)
SYNTHETIC = Source("synthetic", "mooncake_synthetic_trace.jsonl", read_mooncake)
AZURE_CODE = Source("azure code", "AzureLLMInferenceTrace_2023_code.csv", read_azure)
AZURE_CHAT = Source("azure chat", "AzureLLMInferenceTrace_2023_conv.csv", read_azure)


def load(source: Source) -> tuple[Request, ...]:
    """Read a trace from the folder that ``TWINPOOL_TRACES`` names.

    Raises
    ------
    TraceMissing
        With where the file comes from.
    """
    folder = Path(os.environ.get(VARIABLE) or "traces")
    path = folder / source.file
    try:
        with path.open() as lines:
            return source.read(lines, source.file)
    except OSError as error:
        raise TraceMissing(
            f"{path}: {error.strerror}",
            f"put the traces into a folder and name it in {VARIABLE}: Mooncake's are in kvcache-ai/Mooncake, folder "
            "FAST25-release/traces (conversation_trace.jsonl, synthetic_trace.jsonl; add mooncake_ in front of the "
            "name), Azure's in Azure/AzurePublicDataset, folder data",
        ) from None
