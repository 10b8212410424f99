"""One namespace through kubectl: the verbs that scenarios need, each failing with what was seen."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    import subprocess

    from twinpool.localcluster.cluster import Cluster


class View:
    """A namespace of a cluster."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *args: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl("-n", self.namespace, *args, check=check, timeout=timeout)

    def apply(self, manifest: str) -> None:
        """Apply YAML."""
        self.cluster.kubectl("-n", self.namespace, "apply", "-f", "-", input=manifest)

    def read(self, what: str, path: str) -> str:
        """Return the fields of an object (``pod/web-0``) or of a list (``pods``) at a JSONPath."""
        return self.kubectl("get", *what.split(), "-o", f"jsonpath={path}").stdout

    def exec(self, pod: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the first container of a pod."""
        return self.kubectl("exec", pod, "--", *command, check=check)

    def await_fields(self, what: str, path: str, wanted: str, timeout: float) -> str:
        """Wait until the fields at a JSONPath match the pattern ``wanted`` (``*`` stands for anything), return them."""
        seen = ""

        def matches() -> bool:
            nonlocal seen
            seen = self.read(what, path).strip()
            if not fnmatch.fnmatchcase(seen, wanted):
                raise LookupError(f"{seen!r} is not {wanted!r}")
            return True

        wait_until(matches, timeout, f"{path} of {what}")
        return seen

    def await_ready(self, pod: str, timeout: float = 30) -> None:
        """Wait until a pod is ready."""
        self.await_fields(f"pod/{pod}", '{.status.conditions[?(@.type=="Ready")].status}', "True", timeout)
