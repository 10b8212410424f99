"""Command lines of the control plane and of the nodes: pure functions of addresses, ports and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from twinpool.localcluster.addresses import Network
    from twinpool.localcluster.nodes import NodeSpec
    from twinpool.localcluster.toolchain import Binaries

PORTS = ("etcd", "etcd-peer", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
LEASE_SECONDS = 8
"""A node that is silent for this long is not ready: real clusters wait 40 s, tests should not."""


@dataclass(frozen=True)
class Layout:
    """Where one start of a cluster has its files and listens."""

    folder: Path
    network: Network
    ports: Mapping[str, int]

    @property
    def pki(self) -> Path:
        """Folder of the certificates."""
        return self.folder / "pki"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.folder / "log"

    @property
    def images(self) -> Path:
        """File with the images."""
        return self.folder / "images.json"

    def kubeconfig(self, user: str = "admin") -> Path:
        """File with the access of ``user``."""
        return self.folder / ("kubeconfig" if user == "admin" else f"{user}.kubeconfig")

    def url(self, port: str) -> str:
        """Return where one of ``PORTS`` is."""
        return f"https://{self.network.control_plane}:{self.ports[port]}"


def etcd(layout: Layout, binaries: Binaries) -> list[str]:
    """Return the command of etcd, which speaks to holders of the cluster's certificates only."""
    pki, client, peer = layout.pki, layout.url("etcd"), layout.url("etcd-peer")
    certificates = {"cert-file": "server.crt", "key-file": "server.key", "trusted-ca-file": "ca.crt"}
    return [
        binaries.command("etcd"),
        "--name=local",
        f"--data-dir={layout.folder / 'etcd'}",
        "--unsafe-no-fsync=true",  # the data ends with the cluster
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=local={peer}",
        "--client-cert-auth",
        "--peer-client-cert-auth",
        *(f"--{side}{flag}={pki / file}" for side in ("", "peer-") for flag, file in certificates.items()),
    ]


def apiserver(layout: Layout, binaries: Binaries) -> list[str]:
    """Return the command of kube-apiserver."""
    pki, address = layout.pki, layout.network.control_plane
    return [
        binaries.command("kube-apiserver"),
        f"--etcd-servers={layout.url('etcd')}",
        f"--etcd-cafile={pki / 'ca.crt'}",
        f"--etcd-certfile={pki / 'server.crt'}",
        f"--etcd-keyfile={pki / 'server.key'}",
        f"--bind-address={address}",
        f"--secure-port={layout.ports['kube-apiserver']}",
        f"--advertise-address={address}",
        "--endpoint-reconciler-type=none",  # loopback addresses are refused in EndpointSlices
        f"--tls-cert-file={pki / 'server.crt'}",
        f"--tls-private-key-file={pki / 'server.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'tokens.pub'}",
        f"--service-account-signing-key-file={pki / 'tokens.key'}",
        "--service-cluster-ip-range=10.0.0.0/16",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki / 'admin.crt'}",
        f"--kubelet-client-key={pki / 'admin.key'}",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def controller_manager(layout: Layout, binaries: Binaries) -> list[str]:
    """Return the command of kube-controller-manager, which notices a dead node after ``LEASE_SECONDS``."""
    return [
        *_controller(layout, binaries, "kube-controller-manager"),
        f"--service-account-private-key-file={layout.pki / 'tokens.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={LEASE_SECONDS}s",
    ]


def scheduler(layout: Layout, binaries: Binaries) -> list[str]:
    """Return the command of kube-scheduler."""
    return _controller(layout, binaries, "kube-scheduler")


def _controller(layout: Layout, binaries: Binaries, name: str) -> list[str]:
    return [
        binaries.command(name),
        f"--kubeconfig={layout.kubeconfig()}",
        f"--bind-address={layout.network.control_plane}",
        f"--secure-port={layout.ports[name]}",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]


def node(layout: Layout, binaries: Binaries, spec: NodeSpec, index: int, port: int) -> list[str]:
    """Return the command of a node; ``index`` decides its addresses, ``port`` is its kubelet's."""
    return [
        binaries.command("node"),
        f"--name={spec.name}",
        f"--address={layout.network.node(index)}",
        f"--port={port}",
        f"--pod-cidr={layout.network.pods(index)}",
        f"--state-dir={layout.folder / 'nodes' / spec.name}",
        f"--kubeconfig={layout.kubeconfig(spec.name)}",
        f"--client-ca-file={layout.pki / 'ca.crt'}",
        f"--images={layout.images}",
        f"--init={binaries.command('podinit')}",
        f"--lease-duration={LEASE_SECONDS}",
        "--sync-frequency=5s",  # with the usual minute, changed volumes and CrashLoopBackOff show late
        *_pairs("labels", [f"{key}={value}" for key, value in spec.labels.items()]),
        *_pairs("capacity", [f"{key}={value}" for key, value in spec.capacity.items()]),
        *_pairs("taints", spec.taints),
    ]


def _pairs(flag: str, values: Sequence[str]) -> list[str]:
    return [f"--{flag}={','.join(values)}"] if values else []
