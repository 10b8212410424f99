"""Fetch a model from the hub into its cache, once for all pods that share it.

The hub's client (``huggingface_hub``, which vLLM depends on) does the transfer, with its own settings from the
environment; what is added is one download at a time, checksums, and how far it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.worker.logic import weights
from twinpool.worker.logic.weights import Progress, WeightFile
from twinpool.worker.shell.contents import WeightsError, mismatched, named, short, size_of
from twinpool.worker.shell.host import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.worker.shell.contents import Teller

#: Seconds after which a part of a file that nobody writes to is left over from a download that died.
LEFTOVER = 600.0
#: Seconds for the hub's list of files.
ASK_TIMEOUT = 30.0
#: In a model's folder of the cache: what was fetched and checked, so that nobody reads it again.
RECORD = ".twinpool.json"
#: Errors of the disk; the hub's client has errors of its own that are ``OSError`` too.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_ADVICE = (
    "check model.source, model.revision and the Secret of model.secretRef, and that the node reaches the hub; without "
    "a way there use pvc:// or oci://"
)


@dataclass
class _Record:
    """What was fetched and checked of one model, over all pods that share its folder."""

    file: Path
    #: Files of each commit: their contents' names and sizes.
    commits: dict[str, dict[str, tuple[str, int]]] = field(default_factory=dict)
    #: Names of contents that were right.
    checked: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, file: Path) -> _Record:
        """Read it; empty when it is not there or damaged."""
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            commits = {
                str(commit): {str(name): (str(content), int(size)) for name, (content, size) in files.items()}
                for commit, files in value["commits"].items()
            }
            return cls(file, commits, {str(each) for each in value["checked"]})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(file)

    def write(self) -> None:
        """Write it, whole."""
        temporary = self.file.with_suffix(".part")
        temporary.write_text(json.dumps({"commits": self.commits, "checked": sorted(self.checked)}), encoding="utf-8")
        temporary.replace(self.file)


class Fetch:
    """One model of the hub, on its way into the cache that ``HF_HOME`` or ``HF_HUB_CACHE`` names.

    Raises
    ------
    ImportError
        The hub's client is not there.
    """

    def __init__(self, repository: str, revision: str | None, teller: Teller) -> None:
        from huggingface_hub import constants

        self._repository = repository
        self._revision = revision or constants.DEFAULT_REVISION
        self._teller = teller
        self._folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
        self._name = f"{repository} at {self._revision}"

    def run(self) -> bool:
        """Fetch it; return whether all was there and the hub does not answer.

        Raises
        ------
        WeightsError
            It cannot be fetched, or its files are not what the hub says.
        """
        try:
            commit, files = self._ask()
        except Exception as error:  # the client's errors are of a dozen kinds, and of other kinds in each version
            commit = self._there()
            if not commit:
                raise WeightsError(f"{self._name} is not to be had from the hub: {short(error)}", _ADVICE) from None
            log(f"WARNING: the hub does not answer for {self._name} ({short(error)}); the cache has all of {commit}")
            self._teller.tell(Progress("done", commit=commit, offline=True))
            return True
        total = sum(file.size for file in files)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._teller.tell(Progress("waiting", 0, total, commit), lambda: self._present(commit, files))
            with _alone(self._folder / ".twinpool.lock"):
                self._download(commit, files, total)
        except OSError as error:
            where = f"{self._name} cannot be fetched into {self._folder}: {short(error)}"
            raise WeightsError(where, "give the folder room, and make it writable for the engine's user") from None
        return False

    def _ask(self) -> tuple[str, tuple[WeightFile, ...]]:
        """Return the commit and the files that the engine will want, by what the hub says of them."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(self._repository, revision=self._revision, files_metadata=True, timeout=ASK_TIMEOUT)
        found = [
            WeightFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "", each.blob_id or "")
            for each in info.siblings or ()
        ]
        return info.sha or self._revision, weights.choose(found)

    def _there(self) -> str:
        """Return the commit that the cache holds in full for the revision, empty when it does not."""
        commit = self._revision
        with contextlib.suppress(OSError):
            commit = (self._folder / "refs" / self._revision).read_text(encoding="utf-8").strip()
        files = _Record.read(self._folder / RECORD).commits.get(commit, {})
        whole = all(size_of(self._path(commit, name)) == size for name, (_, size) in files.items())
        return commit if files and whole else ""

    def _path(self, commit: str, name: str) -> Path:
        return self._folder / "snapshots" / commit / name

    def _present(self, commit: str, files: Sequence[WeightFile]) -> int:
        """Return the bytes of the files that are there, also of those on their way."""
        done = 0
        for file in files:
            here = size_of(self._path(commit, file.name))
            parts = self._folder.glob(f"blobs/{file.content}*.incomplete") if here is None and file.content else ()
            done += max([here or 0, *(_written(part) for part in parts)])
        return done

    def _download(self, commit: str, files: Sequence[WeightFile], total: int) -> None:
        record = _Record.read(self._folder / RECORD)
        self._clean()
        for attempt in (1, 2):
            self._teller.tell(Progress("downloading", 0, total, commit), lambda: self._present(commit, files))
            self._get(commit, files)
            unknown = [file for file in files if file.content and file.content not in record.checked]
            paths = {self._path(commit, file.name): file for file in unknown}
            known = total - sum(file.size for file in unknown)
            wrong = mismatched(paths, self._teller, Progress("checking", known, total, commit))
            record.checked |= {file.content for file in unknown} - {paths[path].content for path in wrong}
            for path in wrong:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            if not wrong:
                break
            log(f"WARNING: {self._name}: {named(wrong)} is not what the hub says; it is fetched again")
            if attempt == 2:
                text = f"{self._name}: {named(wrong)} has another checksum than the hub says, twice"
                raise WeightsError(text, "look at the node's disk, and at the proxy or mirror between it and the hub")
        record.commits[commit] = {file.name: (file.content, file.size) for file in files}
        record.write()
        if commit != self._revision:
            reference = self._folder / "refs" / self._revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit, encoding="utf-8")

    def _get(self, commit: str, files: Sequence[WeightFile]) -> None:
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(
                self._repository, revision=commit, allow_patterns=weights.exact([file.name for file in files])
            )
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise WeightsError(f"{self._name} is not to be had from the hub: {short(error)}", _ADVICE) from None
        missing = [path for file in files if not (path := self._path(commit, file.name)).exists()]
        if missing:
            raise WeightsError(f"{self._name}: the hub's client did not fetch {named(missing)}", _ADVICE)

    def _clean(self) -> None:
        """Remove what downloads that died have left: the client begins such a file anew under another name."""
        for part in self._folder.glob("blobs/*.incomplete"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > LEFTOVER:
                    part.unlink()


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep others that share the folder waiting; a file system without locks costs them a download each."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log(f"WARNING: {file} cannot be locked ({error.strerror}): pods that share it may fetch the model each")
        yield


def _written(path: Path) -> int:
    """Return the bytes of a file that were written; some downloads reserve all of it first."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return min(found.st_size, found.st_blocks * 512)
