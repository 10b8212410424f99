"""The files of a model: what was read of them, and whether they are what their checksums say."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.worker.logic.weights import Progress, WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

#: Seconds between two looks at what is there.
LOOK = 1.0
#: Files read at the same time; SHA-256 takes 0.5 to 2 GB/s of one core.
READERS = 8
_CHUNK = 4 * 2**20


class WeightsError(TwinpoolError):
    """The model's files cannot be had, or are not what they should be."""


class Teller:
    """Writes how far it is to a file, whole each time, until :meth:`close`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._measure: Callable[[], int] = int
        self._ended = threading.Event()
        self.now = Progress("waiting")
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def tell(self, now: Progress, measure: Callable[[], int] = int) -> None:
        """Say from now on that it is at ``now``, with the bytes that ``measure`` counts beside its own."""
        with self._lock:
            self.now, self._measure = now, measure
            self._write()

    def close(self) -> None:
        """Say no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK):
            with self._lock:
                self._write()

    def _write(self) -> None:
        now = self.now
        told = Progress(now.stage, now.done + self._measure(), now.total, now.commit, offline=now.offline)
        temporary = self._file.with_suffix(".part")
        with contextlib.suppress(OSError):
            temporary.write_text(told.to_json(), encoding="utf-8")
            temporary.replace(self._file)


def mismatched(files: Mapping[Path, WeightFile], teller: Teller, before: Progress) -> list[Path]:
    """Return the files whose content is not what their checksum says, telling how far the reading is."""
    read = _Counter()
    teller.tell(before, read.value)

    def right(item: tuple[Path, WeightFile]) -> bool:
        path, file = item
        if file.sha256:
            return _digest(path, "sha256", b"", read) == file.sha256
        return _digest(path, "sha1", b"blob %d\0" % path.stat().st_size, read) == file.blob

    with ThreadPoolExecutor(READERS) as readers:
        return [path for path, good in zip(files, readers.map(right, files.items()), strict=True) if not good]


class _Counter:
    """Bytes that several threads count."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._value += count

    def value(self) -> int:
        return self._value


def _digest(path: Path, kind: str, header: bytes, read: _Counter) -> str:
    found = hashlib.new(kind, header, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            read.add(len(chunk))
    return found.hexdigest()


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None when it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def named(paths: Sequence[Path], shown: int = 3) -> str:
    """Return the names of the first files, and how many more there are."""
    more = f" and {len(paths) - shown} more" if len(paths) > shown else ""
    return ", ".join(path.name for path in paths[:shown]) + more


def short(error: Exception) -> str:
    """Return an error of somebody else's library on one line of bounded length."""
    words = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {words}"[:400]
