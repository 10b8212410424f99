"""Before the engine: fetch the model from the hub, once for each node, and check its files against their checksums.

This is a process of its own, run by the engine's interpreter, because the hub's client (``huggingface_hub``, which vLLM
depends on) is a library of the engine's image. What it has is written to a file that the launcher reads.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.worker.logic import weights
from twinpool.worker.logic.weights import SUMS, Progress, WeightFile
from twinpool.worker.shell.contents import Teller, WeightsError, mismatched, named, size_of
from twinpool.worker.shell.host import log
from twinpool.worker.shell.hub import Fetch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import WorkerConfig


def run(config: WorkerConfig, environment: Mapping[str, str], file: Path) -> int:
    """Fetch and check what ``config`` asks for; return the exit code."""
    teller = Teller(file)
    try:
        wanted = weights.repositories(config, environment)
        offline = [_fetched(repository, revision, teller) for repository, revision in wanted]
        if config.model_checksum is not None:
            check_folder(Path(config.model_path), config.model_checksum, teller)
        last = teller.now
        teller.tell(Progress("done", last.total, last.total, last.commit, offline=bool(offline) and all(offline)))
    except TwinpoolError as error:
        print(f"WeightsError: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        teller.close()
    return 0


def _fetched(repository: str, revision: str | None, teller: Teller) -> bool:
    """Fetch one model; return whether the hub was not needed. Without its client the engine is left to it."""
    try:
        fetch = Fetch(repository, revision, teller)
    except ImportError:
        log(f"{repository} is not fetched before the engine starts: its image has no huggingface_hub")
        return False
    return fetch.run()


def check_folder(folder: Path, checksum: str, teller: Teller) -> None:
    """Check a model's folder against its list of checksums, and that list against ``checksum`` (``sha256:`` and hex).

    Raises
    ------
    WeightsError
        The list is another one or is not there, or a file is not what it says.
    """
    sums = folder / SUMS
    try:
        text = sums.read_bytes()
    except OSError as error:
        advice = "write it beside the model's files as docs/weights.md says, or remove model.checksum"
        raise WeightsError(f"model.checksum needs {sums}: {error.strerror}", advice) from None
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    if digest != checksum:
        advice = "name the checksum of the list that belongs to the model"
        raise WeightsError(f"{sums} has the checksum {digest}, model.checksum is {checksum}", advice)
    listed = weights.listed(text.decode(errors="replace"), str(sums))
    sizes = {name: size_of(folder / name) for name in listed}
    gone = [name for name, size in sizes.items() if size is None]
    present = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    others = weights.strangers(present, listed)
    paths = {folder / name: WeightFile(name, sizes[name] or 0, sha256) for name, sha256 in listed.items()}
    total = sum(file.size for file in paths.values())
    wrong = [] if gone or others else mismatched(paths, teller, Progress("checking", 0, total))
    for what, found in (("lacks", gone), ("has other content than listed in", wrong), ("has, unlisted,", others)):
        if found:
            advice = f"copy the model again, or make {SUMS} and model.checksum anew if it was changed on purpose"
            raise WeightsError(f"{folder} {what} {named([Path(name) for name in found])}", advice)
