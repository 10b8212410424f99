"""The cluster as ``kubectl`` reaches it: its credentials, contexts and login plugins are the user's own."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from twinpool.core.errors import TwinpoolError


class KubectlFailed(TwinpoolError):
    """``kubectl`` could not do what it was asked; the message is its own."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One namespace of one cluster; empty values leave the choice to kubectl's own configuration."""

    namespace: str = ""
    context: str = ""

    def run(self, *arguments: str) -> str:
        """Run kubectl and return what it prints.

        Raises
        ------
        KubectlFailed
            When it is not installed or complains.
        """
        done = subprocess.run([*self._command(), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise KubectlFailed(done.stderr.strip() or f"kubectl {arguments[0]} failed", "see the message")
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start kubectl and return the running process, whose output can be read; whoever calls this ends it.

        Raises
        ------
        KubectlFailed
            When it is not installed.
        """
        # Its complaints would be printed over what the user looks at; the process ends with them.
        return subprocess.Popen(
            [*self._command(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def _command(self) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlFailed("kubectl is not on the PATH", "install it; twinpool reaches the cluster through it")
        chosen = [f"--context={self.context}"] if self.context else []
        return [program, *chosen, *([f"--namespace={self.namespace}"] if self.namespace else [])]

    def get(self, kinds: str, *arguments: str) -> dict[str, Any]:
        """Return objects as JSON."""
        found: dict[str, Any] = json.loads(self.run("get", kinds, *arguments, "--output=json"))
        return found
