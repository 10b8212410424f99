"""Put the launcher into a pod: one zipapp that needs nothing but a Python interpreter.

The init container runs this from the worker image; the engine container then starts ``python3 /twinpool/worker.pyz``
in whatever image the user brought.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from pathlib import Path

from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.worker.release import version

FILE_NAME = "worker.pyz"

#: Modules of the core that the launcher imports.
_CORE = (
    "blockhash.py",
    "accelerators.py",
    "drafts.py",
    "economics.py",
    "errors.py",
    "experts.py",
    "kv.py",
    "expert_load.py",
    "managed.py",
    "model_config.py",
    "protocol.py",
    "tier_use.py",
    "tiers.py",
    "timing.py",
    *(f"metrics/{name}.py" for name in ("__init__", "declare", "exposition", "worker")),
)
_MAIN = b"from twinpool.worker.__main__ import main\n\nraise SystemExit(main())\n"
#: A fixed time stamp, so that equal sources give equal bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class CannotInject(TwinpoolError):
    """The launcher cannot be written."""


def build() -> bytes:
    """Return the zipapp's bytes, built from the installed package."""
    core = Path(protocol.__file__).parent
    worker = Path(__file__).parent
    files = {f"twinpool/core/{name}": (core / name).read_bytes() for name in _CORE}
    for path in sorted(worker.rglob("*.py")):
        relative = path.relative_to(worker)
        if relative.parts[:2] != ("engines", "simulated"):
            files[f"twinpool/worker/{relative.as_posix()}"] = path.read_bytes()
    metadata = f"Metadata-Version: 2.1\nName: twinpool\nVersion: {version()}\n"
    files[f"twinpool-{version()}.dist-info/METADATA"] = metadata.encode()
    files["__main__.py"] = _MAIN
    # Python before 3.13 finds a namespace package in an archive only when its folder has an entry.
    folders = {f"{parent.as_posix()}/" for name in files for parent in Path(name).parents if parent != Path()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted({*folders, *files}):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o40755 if name.endswith("/") else 0o100644) << 16
            archive.writestr(entry, files.get(name, b""))
    return buffer.getvalue()


def inject(directory: Path) -> Path:
    """Write the zipapp into ``directory``, readable by everyone, and return its path.

    A reader sees the old file or the new one, never half of one.

    Raises
    ------
    CannotInject
        When the directory is missing or not writable.
    """
    target = directory / FILE_NAME
    try:
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=f".{FILE_NAME}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(build())
            temporary.chmod(0o644)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CannotInject(
            f"the launcher cannot be written to {target}: {error.strerror}",
            f"mount a writable emptyDir at {directory}",
        ) from None
    return target
