"""The cluster's binaries: built once from pinned Go modules into the cache, or ready-made ones that the user names.

A finished build is a folder with a manifest, put in its place by one rename: a folder without a manifest, or with
files that do not fit it, is the rest of something that went wrong and is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.build import GIB, FirstBuild, Target, build
from twinpool.localcluster.errors import ToolchainError
from twinpool.localcluster.golang import WHEEL_VERSION, find_go
from twinpool.localcluster.paths import cache_dir, sources_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twinpool.localcluster.progress import Progress

KUBERNETES_VERSION = "1.36.3"
_RECIPE = "1"
"""Changed when the way of building changes without any of the sources."""

FIRST_BUILD = FirstBuild(
    "k8s.io/kubernetes@*",
    6 * GIB,
    "building the control plane from source, once: 6 to 12 minutes on two cores, 6 GB of disk",
)
"""1 GB of modules, 3.5 GB of Go's build cache, the binaries, the linker's files."""

_MODULES = ("etcd", "node")
_COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Binaries:
    """How to start each program, and the folder that has them under their usual names."""

    folder: Path
    ready_made: tuple[str, ...] = ()

    def command(self, name: str) -> str:
        """Return the path of a program: etcd, kube-apiserver, ..., kubectl, node."""
        return str(self.folder / name)


def _ready_made() -> dict[str, Path]:
    """Return the programs of the folder that the user names, by name."""
    for variable in ("TWINPOOL_KUBE_BIN", "KUBEBUILDER_ASSETS"):
        if value := os.environ.get(variable):
            folder = Path(value).expanduser().absolute()
            if not folder.is_dir():
                raise ToolchainError(
                    f"{variable}={value} is no folder", f"name a folder with binaries, or unset {variable}"
                )
            return {name: folder / name for name in ("etcd", *_COMPONENTS) if os.access(folder / name, os.X_OK)}
    return {}


def _targets(ready: dict[str, Path]) -> tuple[Target, ...]:
    sources = sources_dir()
    stamp = _stamp(KUBERNETES_VERSION)
    combined = not all(name in ready for name in _COMPONENTS)
    program = "controlplane" if combined else "node"
    targets = [Target("podinit", sources / "node", "./cmd/podinit", "-s -w")]
    if "etcd" not in ready:
        targets.append(Target("etcd", sources / "etcd", "go.etcd.io/etcd/server/v3", "-s -w"))
    targets.append(Target(program, sources / "node", f"./cmd/{program}", f"-s -w {stamp}"))
    return tuple(targets)


def _stamp(version: str) -> str:
    """Return linker flags that tell the version: without them clients misjudge what the server can do."""
    major, minor, _ = version.split(".")
    values = {
        "gitVersion": f"v{version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "0" * 40,
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(f"-X {package}.{key}={value}" for package in packages for key, value in values.items())


def cache_key(targets: tuple[Target, ...], sources: Path, modules: tuple[str, ...] = _MODULES) -> str:
    """Return a key that changes with everything that the binaries depend on; ``modules`` are folders of ``sources``."""
    digest = hashlib.sha256()
    for text in (_RECIPE, KUBERNETES_VERSION, WHEEL_VERSION, *map(_words, targets)):
        digest.update(text.encode() + b"\0")
    for module in modules:
        for path in sorted((sources / module).rglob("*")):
            if path.name in ("go.mod", "go.sum") or (path.suffix == ".go" and not path.name.endswith("_test.go")):
                digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _words(target: Target) -> str:
    return " ".join(filter(None, (target.name, target.package, target.ldflags, target.tags)))


def is_complete(folder: Path) -> bool:
    """Say whether the folder holds a finished build: every file of its manifest, with its size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return bool(manifest) and all((folder / name).stat().st_size == size for name, size in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _seal(folder: Path, ready: Mapping[str, Path], targets: tuple[Target, ...]) -> None:
    """Add the usual names to a folder of fresh binaries, then the manifest, last."""
    built = {target.name for target in targets}
    if "controlplane" in built:
        for name in (*_COMPONENTS, "node"):
            if name not in ready:
                (folder / name).symlink_to("controlplane")
    sizes = {name: (folder / name).stat().st_size for name in sorted(built)}
    (folder / _MANIFEST).write_text(json.dumps(sizes))


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process is building the same binaries: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(progress: Progress) -> Binaries:
    """Return the binaries, after building what is not in the cache.

    Raises
    ------
    ToolchainError
        They cannot be built or the ready-made ones cannot be used; the message says what to do.
    """
    if sys.platform != "linux":
        raise ToolchainError(
            f"the local cluster needs Linux, this is {sys.platform}",
            "use --cluster=external with a cluster of your own",
        )
    ready = _ready_made()
    targets = _targets(ready)
    folder = cache_dir() / "cluster" / cache_key(targets, sources_dir())
    if not is_complete(folder):
        build_into(folder, targets, FIRST_BUILD, progress, ready)
    return Binaries(_with_ready_made(folder, ready), tuple(sorted(ready)))


def build_into(
    folder: Path,
    targets: tuple[Target, ...],
    first: FirstBuild,
    progress: Progress,
    ready: Mapping[str, Path] | None = None,
) -> None:
    """Build the targets into a folder that does not hold them whole; another process that does so is waited for.

    Raises
    ------
    ToolchainError
        They cannot be built, or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock", progress):
            if is_complete(folder):
                return
            for rest in [*folder.parent.glob(f"{folder.name}.building-*"), folder]:
                if rest.exists():
                    progress.say(f"{rest} is the rest of an unfinished build: building anew")
                    shutil.rmtree(rest)
            building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
            building.mkdir()
            try:
                build(find_go(progress), targets, building, first, progress)
                _seal(building, ready or {}, targets)
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
            progress.say(f"binaries are in {folder}")
    except OSError as error:
        raise ToolchainError(
            f"cannot write built binaries: {error}",
            "make room or set TWINPOOL_CACHE to a folder with 6 GB free",
        ) from error


def _with_ready_made(folder: Path, ready: dict[str, Path]) -> Path:
    """Return a folder with links to the ready-made binaries and to ours; ours alone need none."""
    if not ready:
        return folder
    key = hashlib.sha256(json.dumps({name: str(path) for name, path in ready.items()}).encode()).hexdigest()[:8]
    links = folder.with_name(f"{folder.name}-{key}")
    links.mkdir(exist_ok=True)
    for path in [*folder.iterdir(), *ready.values()]:
        if path.name not in ready or path in ready.values():
            with contextlib.suppress(FileExistsError):
                (links / path.name).symlink_to(path)
    return links
