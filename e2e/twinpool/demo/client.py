"""A small client of the OpenAI interface and of Prometheus text, with the standard library alone.

The demonstration and the end-to-end tests use it to ask the way a stranger with ``curl`` would.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: status, lower-case headers, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


def post(url: str, body: Mapping[str, Any], timeout: float = 120.0, **headers: str) -> Reply:
    """Send ``body`` as JSON and return the whole answer, whatever its status (``timeout`` in seconds)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, received, response.read())
    finally:
        connection.close()


def get(url: str, timeout: float = 30.0) -> str:
    """Return the text behind ``url``; an error status raises ``urllib.error.HTTPError``."""
    with urllib.request.urlopen(url, timeout=timeout) as response:  # noqa: S310 - the caller's own http address
        text: str = response.read().decode()
        return text


def stream(url: str, body: Mapping[str, Any], timeout: float = 120.0) -> Iterator[dict[str, Any]]:
    """Send ``body`` with streaming on and yield the JSON of each event until ``[DONE]``.

    Raises
    ------
    RuntimeError
        When the status is not 200, the stream carries an error, or it ends without ``[DONE]``.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    try:
        payload = json.dumps({**body, "stream": True})
        connection.request("POST", parts.path, payload, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if not data or data.startswith(":"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"error in the stream: {event['error']}")
            yield event
        raise RuntimeError("the stream ended without [DONE]")
    finally:
        connection.close()


def samples(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples called ``name`` in Prometheus text, by their sorted labels."""
    found = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match.group(1) == name:
            labels = tuple(sorted(_LABEL.findall(match.group(2) or "")))
            found[labels] = float(match.group(3))
    return found


def total(text: str, name: str, **labels: str) -> float:
    """Return the sum of the samples called ``name`` whose labels include ``labels``."""
    wanted = set(labels.items())
    return sum(value for found, value in samples(text, name).items() if wanted <= set(found))
