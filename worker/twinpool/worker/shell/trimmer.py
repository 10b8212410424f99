"""Keeps disk and shared KV tiers within their sizes: looks at their files once in a while and removes the oldest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.worker.logic.trimming import KvFile, surplus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: Seconds between two looks; a tier with many files is looked at less often, so that looking takes a twentieth at most.
INTERVAL, REST = 30.0, 20.0
#: vLLM's name of a block's file; what ends otherwise is not ours.
_SUFFIX = ".bin"
#: Whoever holds it trims; pods that share a volume take turns.
_LOCK = ".twinpool-trim"


class Trimmer:
    """Trims ``places``: for each kind of tier its folder and its size in bytes."""

    def __init__(self, places: Mapping[str, tuple[Path, int]], log: Callable[[str], None]) -> None:
        self._places = places
        self._log = log
        #: Bytes removed so far, by kind of tier.
        self.removed = dict.fromkeys(places, 0)

    def start(self) -> None:
        """Trim from now on until the process ends; without places nothing is done."""
        if self._places:
            threading.Thread(target=self._run, name="trimmer", daemon=True).start()

    def _run(self) -> None:
        while True:
            begun = time.monotonic()
            for kind in self._places:
                try:
                    self.trim(kind)
                except OSError as error:
                    self._log(f"WARNING: the {kind} KV tier cannot be kept within its size: {error}")
            time.sleep(max(INTERVAL, REST * (time.monotonic() - begun)))

    def trim(self, kind: str) -> None:
        """Remove what is too much of one tier, unless another pod does so right now.

        Raises
        ------
        OSError
            The folder cannot be read or written.
        """
        folder, bound = self._places[kind]
        with _alone(folder) as mine:
            for file in surplus(_files(folder), bound) if mine else ():
                with contextlib.suppress(FileNotFoundError):
                    Path(file.path).unlink()
                    self.removed[kind] += file.size


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _files(folder: Path) -> Iterator[KvFile]:
    """Yield the files of blocks below ``folder``; links are not followed."""
    waiting = [str(folder)]
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        yield KvFile(entry.path, about.st_size, about.st_mtime)
