"""The supervisor: starts the processes of one cluster, watches them, obeys the control socket, ends them all.

One thread, one loop (:meth:`Supervisor._pump`), which runs during the start as well: a stop is obeyed at any time. The
lock on the cluster's name is held from the first step to the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from twinpool.localcluster import control, controlplane, images
from twinpool.localcluster.access import Api, ready_nodes, write_kubeconfig
from twinpool.localcluster.addresses import claim, free_ports
from twinpool.localcluster.certificates import Authority
from twinpool.localcluster.controlplane import Layout
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.images import SYSTEM_PATH, Image
from twinpool.localcluster.paths import state_dir
from twinpool.localcluster.processes import ProcessTree, end_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.localcluster.nodes import NodeSpec
    from twinpool.localcluster.progress import Progress
    from twinpool.localcluster.toolchain import Binaries

_START_SECONDS = 90.0
_LOG_LINES = 8


class Stopped(Exception):
    """A stop was asked for: by a signal, the control socket, or the end of standard input."""


@dataclass(frozen=True)
class Settings:
    """What a cluster is made of."""

    name: str
    nodes: tuple[NodeSpec, ...]
    images: Mapping[str, Image]
    binaries: Binaries
    until_eof: bool = False
    """Stop when standard input ends: the way in which a test run takes its cluster with it."""


def lock_name(name: str) -> TextIO | None:
    """Take the lock on a cluster's name; None when somebody has it. It is held until the file is closed."""
    folder = state_dir(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f"{folder.name}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


class Supervisor:
    """One cluster from start to end. To be used once, in the main thread of a process of its own."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._folder = state_dir(settings.name)
        self._ready = False
        self._selector = selectors.DefaultSelector()

    def run(self, when_ready: Callable[[dict[str, Any]], None]) -> None:
        """Run the cluster until a stop is asked for; return when no process is left.

        Raises
        ------
        ClusterError
            It cannot start, or a part of the control plane ended by itself.
        """
        lock = lock_name(self._settings.name)
        if lock is None:
            raise ClusterError(
                f"cluster {self._settings.name!r} runs already",
                "use it ('status' shows it), stop it with 'down', or give another --name",
            )
        with lock, contextlib.ExitStack() as cleanup:
            self._clear()
            self._listen(cleanup)
            network = claim()
            cleanup.callback(network.release)
            ports = free_ports(network.network.control_plane, len(controlplane.PORTS))
            self._layout = Layout(self._folder, network.network, dict(zip(controlplane.PORTS, ports, strict=True)))
            self._tree = ProcessTree(self._layout.logs, str(self._folder))
            cleanup.callback(self._end)
            with contextlib.suppress(Stopped):
                self._start()
                when_ready(self.status())
                while True:
                    self._pump(None)

    def _clear(self) -> None:
        """Remove what an earlier cluster of this name left, which ended without a chance to do so."""
        end_marked(str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        for name in ("log", "nodes", "pki"):
            (self._folder / name).mkdir(mode=0o700)

    def _end(self) -> None:
        self._progress.say(f"stopping cluster {self._settings.name!r}")
        self._tree.kill_all()
        for path in self._folder.iterdir():
            if path.name != "log":  # for those who wonder why it ended
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._progress.say("stopped, no process is left")

    # -- events ------------------------------------------------------------------------------------------------------

    def _listen(self, cleanup: contextlib.ExitStack) -> None:
        self._control = cleanup.enter_context(control.listen(self._folder))
        self._selector.register(self._control, selectors.EVENT_READ, self._serve)
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
            cleanup.callback(end.close)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            cleanup.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        cleanup.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        self._selector.register(reader, selectors.EVENT_READ, self._signalled)
        self._signals = reader
        if self._settings.until_eof:
            self._selector.register(sys.stdin, selectors.EVENT_READ, self._input)
        cleanup.callback(self._selector.close)

    def _pump(self, timeout: float | None) -> None:
        """Wait for events, at most ``timeout`` seconds, and handle them."""
        for key, _ in self._selector.select(timeout):
            key.data()

    def _signalled(self) -> None:
        numbers = self._signals.recv(4096)
        if set(numbers) - {signal.SIGCHLD}:
            raise Stopped
        for name, code in self._tree.reap().items():
            if not self._ready or name not in {node.name for node in self._settings.nodes}:
                raise self._died(name, code)
            self._progress.say(f"node {name} ended ({code}); see {self._tree.log(name)}")

    def _input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            raise Stopped

    def _died(self, name: str, code: int) -> ClusterError:
        lines = self._tree.log(name).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return ClusterError(f"{name} ended with {code}: " + " | ".join(lines), f"see {self._tree.log(name)}")

    # -- the start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        layout, binaries = self._layout, self._settings.binaries
        self._progress.say(f"starting the control plane at {layout.network.control_plane}")
        self._prepare()
        self._spawn("etcd", controlplane.etcd(layout, binaries))
        self._spawn("kube-apiserver", controlplane.apiserver(layout, binaries))
        api = Api(layout.kubeconfig())
        self._await("the API server", lambda: api.raw("/readyz")[0] == 200)
        self._spawn("kube-controller-manager", controlplane.controller_manager(layout, binaries))
        self._spawn("kube-scheduler", controlplane.scheduler(layout, binaries))
        names = {node.name for node in self._settings.nodes}
        self._progress.say(f"starting {len(names)} nodes")
        for name in sorted(names):
            self._start_node(name)
        self._await("the nodes", lambda: ready_nodes(api.get("/api/v1/nodes")) >= names)
        self._await("service accounts", lambda: bool(api.get("/api/v1/namespaces/default/serviceaccounts/default")))
        self._progress.say(f"cluster {self._settings.name!r} is ready")
        self._ready = True

    def _prepare(self) -> None:
        layout = self._layout
        authority = Authority(layout.pki)
        authority.sign("server", "kube-apiserver", address=layout.network.control_plane)
        authority.sign("admin", "admin", group="system:masters")
        authority.key_pair("tokens")
        server = layout.url("kube-apiserver")
        write_kubeconfig(layout.kubeconfig(), server, layout.pki, "admin")
        for node in self._settings.nodes:
            authority.sign(node.name, f"system:node:{node.name}", group="system:nodes")
            write_kubeconfig(layout.kubeconfig(node.name), server, layout.pki, node.name)
        images.write(layout.images, self._settings.images)

    def _spawn(self, name: str, command: list[str]) -> None:
        # A clean environment: what a container sees must not depend on the shell that started the cluster.
        env = {"PATH": SYSTEM_PATH, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
        self._tree.spawn(name, command, env, self._folder)

    def _start_node(self, name: str) -> None:
        index, spec = next((i, node) for i, node in enumerate(self._settings.nodes) if node.name == name)
        (port,) = free_ports(self._layout.network.node(index), 1)
        self._spawn(name, controlplane.node(self._layout, self._settings.binaries, spec, index, port))

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError, ClusterError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} of the cluster are not ready", f"see the logs in {self._layout.logs}")
            self._pump(0.05)

    # -- requests ----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what clients of the control socket are told about the cluster."""
        components = {name: self._tree.pid(name) for name in controlplane.PORTS if name != "etcd-peer"}
        nodes = {
            node.name: {"pid": self._tree.pid(node.name), "address": self._layout.network.node(i)}
            for i, node in enumerate(self._settings.nodes)
        }
        return {
            "name": self._settings.name,
            "ready": self._ready,
            "pid": os.getpid(),
            "server": self._layout.url("kube-apiserver"),
            "kubeconfig": str(self._layout.kubeconfig()),
            "binaries": str(self._settings.binaries.folder),
            "logs": str(self._layout.logs),
            "components": components,
            "nodes": nodes,
        }

    def _serve(self) -> None:
        stop = False
        with contextlib.suppress(OSError, ValueError):
            connection, _ = self._control.accept()
            with connection:
                request = control.receive(connection)
                stop = request.get("do") == "stop"
                try:
                    reply = self._obey(request)
                except ClusterError as error:
                    reply = {"error": error.problem, "remedy": error.remedy}
                control.answer(connection, reply)
        if stop:
            raise Stopped

    def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"do": "status" | "stop"}:
                pass
            case {"do": "kill-node", "node": str(name)}:
                self._known(name)
                self._tree.kill(name)
            case {"do": "start-node", "node": str(name)}:
                self._known(name)
                if self._tree.pid(name) is None:
                    self._start_node(name)
            case {"do": "set-images", "images": dict(entries)}:
                images.write(self._layout.images, images.parse(entries, "request"))
            case _:
                raise ClusterError(f"the supervisor does not understand {request.get('do')!r}", "stop it with 'down'")
        return self.status()

    def _known(self, name: str) -> None:
        names = [node.name for node in self._settings.nodes]
        if name not in names:
            raise ClusterError(f"there is no node {name!r}", f"the nodes are {', '.join(names)}")
