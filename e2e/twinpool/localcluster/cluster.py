"""Clusters as tests, demo and command line see them: a local one, or any that a kubeconfig leads to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.localcluster import control, images
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.paths import state_dir
from twinpool.localcluster.processes import end_marked
from twinpool.localcluster.supervisor import lock_name
from twinpool.localcluster.waiting import WaitTimeout, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twinpool.localcluster.images import Image
    from twinpool.localcluster.progress import Progress


class Cluster:
    """Any Kubernetes cluster: a kubeconfig and a kubectl."""

    def __init__(self, kubeconfig: Path, kubectl: str, environment: Mapping[str, str] | None = None) -> None:
        self.kubeconfig = kubeconfig
        self.kubectl_path = kubectl
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig), **(environment or {})}

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - the name that subprocess.run has
        check: bool = True,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return what it said.

        Raises
        ------
        ClusterError
            It failed, unless ``check`` is off; the message holds its complaint.
        """
        done = subprocess.run(
            [self.kubectl_path, *args],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.environment,
        )
        if check and done.returncode:
            raise ClusterError(f"kubectl {' '.join(args)} failed ({done.returncode}): {done.stderr.strip()}")
        return done

    def json(self, *args: str, timeout: float = 60) -> Any:
        """Run kubectl with ``-o json`` and return the object that it printed."""
        return json.loads(self.kubectl(*args, "-o", "json", timeout=timeout).stdout)

    @contextlib.contextmanager
    def fresh_namespace(self) -> Iterator[str]:
        """Make a namespace in which pods can be made; delete it afterwards, without waiting for its end."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            wait_until(
                lambda: self.kubectl("-n", name, "get", "serviceaccount", "default").stdout,
                timeout=20,
                what=f"service account of namespace {name}",
            )
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")


class ExternalCluster(Cluster):
    """The cluster of ``KUBECONFIG``; its nodes are not ours to kill."""

    @classmethod
    def from_environment(cls) -> ExternalCluster:
        """Return the cluster that ``KUBECONFIG`` and kubectl on PATH lead to.

        Raises
        ------
        ClusterError
            One of the two is missing.
        """
        kubeconfig = os.environ.get("KUBECONFIG")
        if not kubeconfig:
            raise ClusterError("KUBECONFIG is not set", "set it to the file of the cluster to use")
        if not Path(kubeconfig).is_file():
            raise ClusterError(f"KUBECONFIG={kubeconfig} is no file", "set it to the one file of the cluster to use")
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ClusterError("kubectl is not on PATH", "install the kubectl that belongs to the cluster")
        return cls(Path(kubeconfig), kubectl)


class LocalCluster(Cluster):
    """A running local cluster, known by its name."""

    def __init__(self, name: str, status: Mapping[str, Any]) -> None:
        folder = state_dir(name)
        # Ports come again: what kubectl remembers about an address may be about another cluster.
        super().__init__(
            Path(status["kubeconfig"]),
            str(Path(status["binaries"]) / "kubectl"),
            {"KUBECACHEDIR": str(folder / "kubectl-cache")},
        )
        self.name = name
        self.folder = folder
        self.binaries = Path(status["binaries"])
        self.images: dict[str, Image] = images.load(folder / "images.json")

    @classmethod
    def find(cls, name: str) -> LocalCluster:
        """Return the running cluster of this name.

        Raises
        ------
        ClusterError
            There is none, or it is not ready yet.
        """
        status = status_of(name)
        if status is None:
            raise ClusterError(
                f"no cluster {name!r} is running", f"start it with 'python -m twinpool.localcluster up --name {name}'"
            )
        if not status["ready"]:
            raise ClusterError(f"cluster {name!r} is still starting", "try again in some seconds")
        return cls(name, status)

    def _ask(self, **request: object) -> dict[str, Any]:
        reply = control.ask(self.folder, request)
        if reply is None:
            raise ClusterError(f"cluster {self.name!r} has ended", f"see the logs in {self.folder / 'log'}")
        return reply

    def status(self) -> dict[str, Any]:
        """Return the supervisor's view: process ids, addresses, files."""
        return self._ask(do="status")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, dead ones too."""
        return tuple(self.status()["nodes"])

    def kill_node(self, name: str) -> None:
        """Take the node's power: all its processes are killed at once. Nobody tells the API server."""
        self._ask(do="kill-node", node=name)

    def start_node(self, name: str) -> None:
        """Switch a dead node on again, under its old name and address."""
        self._ask(do="start-node", node=name)

    def add_images(self, more: Mapping[str, Image]) -> None:
        """Add or replace images; containers that start from now on use them."""
        self.images = {**self.images, **more}
        self._ask(do="set-images", images=images.as_json(self.images))


def status_of(name: str) -> dict[str, Any] | None:
    """Return the status of a cluster that runs or starts, else None."""
    return control.ask(state_dir(name), {"do": "status"})


def is_free(name: str) -> bool:
    """Say whether no cluster has this name now."""
    lock = lock_name(name)
    if lock is None:
        return False
    lock.close()
    return True


def _command(name: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "twinpool.localcluster", "up", "--name", name, *arguments]


def _file_arguments(name: str, nodes: Path | None, extra: Mapping[str, Image]) -> list[str]:
    folder = state_dir(name).parent
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.images.json"
    images.write(file, extra)
    return ["--images", str(file), *(["--nodes", str(nodes)] if nodes else [])]


@contextlib.contextmanager
def running(
    name: str,
    nodes: Path | None = None,
    extra_images: Mapping[str, Image] | None = None,
    progress: Progress | None = None,
) -> Iterator[LocalCluster]:
    """Run a cluster for the time of a ``with`` block; it also ends when this process does, however that ends.

    Its supervisor holds a pipe from here as its standard input and stops at its end. With ``progress``, the steps of
    the start are shown.
    """
    arguments = _file_arguments(name, nodes, extra_images or {})
    log = state_dir(name).with_name(f"{name}.log")
    with log.open("w") as output:
        supervisor = subprocess.Popen(
            _command(name, ["--until-eof", *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield _await_ready(name, supervisor, log, progress)
    finally:
        assert supervisor.stdin
        supervisor.stdin.close()
        supervisor.wait(timeout=60)
        Path(arguments[1]).unlink(missing_ok=True)


def start_detached(
    name: str, nodes: Path | None, extra_images: Mapping[str, Image], progress: Progress
) -> LocalCluster:
    """Start a cluster that outlives this process, or find the one that runs; return it when it is ready."""
    arguments = _file_arguments(name, nodes, extra_images)
    log = state_dir(name).with_name(f"{name}.log")
    try:
        if status_of(name) is not None:
            progress.say(f"cluster {name!r} runs already")
            found = _await_started(name)
            found.add_images(extra_images)
            return found
        with log.open("w") as output:
            supervisor = subprocess.Popen(
                _command(name, arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        return _await_ready(name, supervisor, log, progress)
    finally:
        Path(arguments[1]).unlink(missing_ok=True)


def _await_started(name: str) -> LocalCluster:
    with contextlib.suppress(WaitTimeout):
        wait_until(
            lambda: (status_of(name) or {"ready": True})["ready"], timeout=120, what="the start of another process"
        )
    return LocalCluster.find(name)


def _await_ready(name: str, supervisor: subprocess.Popen[bytes], log: Path, progress: Progress | None) -> LocalCluster:
    shown = 0
    while True:
        status = status_of(name)
        text = log.read_text(errors="replace")
        whole = text[: text.rfind("\n") + 1]
        if progress:
            sys.stderr.write(whole[shown:])
            sys.stderr.flush()
            shown = len(whole)
        if supervisor.poll() is not None:
            lines = [line for line in text.splitlines() if line.strip()]
            last = lines[-1].removeprefix("error: ") if lines else f"exit status {supervisor.returncode}"
            raise ClusterError(f"cluster {name!r} did not start: {last}", f"see {log}")
        if status and status["ready"]:
            return LocalCluster(name, status)
        time.sleep(0.05)


def stop(name: str, progress: Progress, timeout: float = 30) -> bool:
    """Stop a cluster, and return when no process of it is left; False when none was running.

    A supervisor that does not obey is killed; its processes die with it.
    """
    folder = state_dir(name)
    running_now = True
    pid = None
    try:
        status = control.ask(folder, {"do": "stop"}, timeout=timeout / 3)
        running_now, pid = status is not None, status["pid"] if status else None
    except ClusterError as error:
        progress.say(str(error))
    deadline = time.monotonic() + timeout
    while (lock := lock_name(name)) is None:
        if time.monotonic() > deadline:
            if pid is None:
                raise ClusterError(
                    f"the supervisor of cluster {name!r} does not end", "end its process, then try again"
                )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with lock:
        end_marked(str(folder))
    return running_now
