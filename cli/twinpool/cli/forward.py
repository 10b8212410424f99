"""Ports of pods on this machine, by ``kubectl port-forward``: it needs no Service, and the user's own rights suffice.

The API server's pod proxy would be less work, but it refuses pods at loopback addresses, which the local cluster has.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import subprocess

    from twinpool.cli.kubectl import Kubectl

#: Pods that are forwarded to at the same time; each takes a process of kubectl.
MOST = 32
#: Seconds for one page of a pod.
TIMEOUT = 2.0
#: Bytes of one page that are read.
MAX_PAGE = 8 * 2**20

_LISTENING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


class Forwards:
    """Pages of pods; each pod is connected to when it is first asked for, and again when its connection ended."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._open: dict[tuple[str, int], tuple[subprocess.Popen[str], int]] = {}

    def __enter__(self) -> Self:
        """Begin without any connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """End every connection."""
        for place in list(self._open):
            self._close(place)

    def page(self, pod: str, port: int, path: str) -> str | None:
        """Return what a pod answers at ``path``, or None when it gives no answer, or too many pods are asked."""
        here = self._port(pod, port)
        if here is None:
            return None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{here}{path}", timeout=TIMEOUT) as answer:
                content: bytes = answer.read(MAX_PAGE)
        except OSError:
            # What goes to a pod that is gone never comes back, and kubectl does not end by itself.
            self._close((pod, port))
            return None
        return content.decode(errors="replace")

    def post(self, pod: str, port: int, path: str, body: bytes, timeout: float) -> tuple[int, str] | None:
        """Send JSON to a pod and return status and answer, or None when none came within ``timeout`` seconds."""
        here = self._port(pod, port)
        if here is None:
            return None
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{here}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - always http, see above
                return answer.status, answer.read(MAX_PAGE).decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(MAX_PAGE).decode(errors="replace")
        except OSError:
            self._close((pod, port))
            return None

    def keep(self, pods: set[str]) -> None:
        """End the connections to all other pods."""
        for place in [place for place in self._open if place[0] not in pods]:
            self._close(place)

    def _port(self, pod: str, port: int) -> int | None:
        place = (pod, port)
        if place in self._open and self._open[place][0].poll() is not None:
            self._close(place)
        if place not in self._open:
            if len(self._open) >= MOST:
                return None
            process = self._kubectl.start("port-forward", f"pod/{pod}", f":{port}")
            assert process.stdout is not None
            # The first line comes when it listens; without one it has ended.
            match = _LISTENING.match(process.stdout.readline())
            if match is None:
                process.kill()
                process.communicate()
                return None
            self._open[place] = (process, int(match[1]))
        return self._open[place][1]

    def _close(self, place: tuple[str, int]) -> None:
        process, _ = self._open.pop(place)
        process.kill()
        process.communicate()
