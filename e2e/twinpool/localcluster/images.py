"""Images of the local cluster: not files, but how a command of this machine starts in the name of an image.

A name that is not in the list is an image too, one without entry point and environment: it runs the pod's own command.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """How an image starts.

    ``entrypoint`` and ``args`` follow the rules of containers: a pod's command replaces both, a pod's args replace
    ``args``. ``env`` is weaker than the pod's. ``files`` are paths of this machine by the path at which a container
    sees them, read-only. ``pull_error`` makes pulls fail with this message.
    """

    entrypoint: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    pull_error: str = ""


def environment_image(scripts: Path, entrypoint: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Image:
    """Return an image that sees the console scripts of the Python environment whose ``bin`` folder is ``scripts``."""
    return Image(entrypoint=entrypoint, env={"PATH": f"{scripts}:{SYSTEM_PATH}", **(env or {})})


def default_images() -> dict[str, Image]:
    """Return the images of Twinpool's own parts, served by the Python environment that runs this."""
    scripts = Path(sys.executable).absolute().parent
    return {
        f"twinpool/{part}:dev": environment_image(scripts, (f"twinpool-{part}",))
        for part in ("operator", "router", "worker")
    }


_KEYS = {
    "entrypoint": "entrypoint",
    "args": "args",
    "env": "env",
    "files": "files",
    "workingDir": "working_dir",
    "pullError": "pull_error",
}


def as_json(images: Mapping[str, Image]) -> dict[str, dict[str, object]]:
    """Return the object that :func:`parse` reads, as nodes do."""
    names = {python: key for key, python in _KEYS.items()}
    return {name: {names[k]: v for k, v in asdict(image).items() if v} for name, image in images.items()}


def load(path: Path) -> dict[str, Image]:
    """Read a JSON file of images by name.

    Raises
    ------
    ClusterError
        The file is not such a file; the message names the image and the field.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ClusterError(f"images file {path}: {error}", "give a JSON object of images by name") from error
    return parse(data, f"images file {path}")


def parse(data: object, where: str) -> dict[str, Image]:
    """Turn an object of images by name into images; ``where`` names its source in errors."""
    if not isinstance(data, dict):
        raise ClusterError(f"{where} holds no JSON object", "give a JSON object of images by name")
    return {name: _parse(entry, f"{where}: image {name!r}") for name, entry in data.items()}


def _parse(entry: object, where: str) -> Image:
    if not isinstance(entry, dict) or not set(entry) <= set(_KEYS):
        raise ClusterError(f"{where} is not understood", f"the fields are {', '.join(_KEYS)}")
    for key in ("entrypoint", "args"):
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ClusterError(f"{where}: {key} is not a list of strings", 'write it as ["command", "argument"]')
    for key in ("env", "files"):
        value = entry.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(inner, str) for inner in value.values()):
            raise ClusterError(f"{where}: {key} is not an object of strings", 'write it as {"NAME": "value"}')
    return Image(
        entrypoint=tuple(entry.get("entrypoint", ())),
        args=tuple(entry.get("args", ())),
        env=entry.get("env", {}),
        files=entry.get("files", {}),
        working_dir=str(entry.get("workingDir", "")),
        pull_error=str(entry.get("pullError", "")),
    )


def write(path: Path, images: Mapping[str, Image]) -> None:
    """Write the file that nodes read, at once for those that read it meanwhile."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(as_json(images), indent=1))
    new.replace(path)
