"""A client for many small writes at once, which kubectl would take hours for."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

Request = tuple[str, str, Any]
#: Requests on their way at the same time.
_AT_ONCE = 48


class ApiFailed(TwinpoolError):
    """The API server refused what the benchmark needs."""


class Api:
    """The API server of a kubeconfig with a client certificate; an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster, self._user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        self._server: str = cluster["server"]
        self._authority = base64.b64decode(cluster["certificate-authority-data"]).decode()

    async def __aenter__(self) -> Api:
        """Open the connections."""
        tls = ssl.create_default_context(cadata=self._authority)
        with tempfile.NamedTemporaryFile() as pair:
            for name in ("client-certificate-data", "client-key-data"):
                pair.write(base64.b64decode(self._user[name]) + b"\n")
            pair.flush()
            tls.load_cert_chain(pair.name)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE + 2, ssl=tls)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(self, verb: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Send one request and return the answer."""
        headers = {"Content-Type": kind}
        async with self._session.request(
            verb, self._server + path, data=None if body is None else json.dumps(body), headers=headers
        ) as answer:
            text = await answer.text()
        if answer.status >= 400:
            raise ApiFailed(f"{verb} {path} was answered with {answer.status}: {text[:300]}")
        return json.loads(text)

    async def send_all(self, requests: Iterable[Request]) -> None:
        """Send many requests, each ``(verb, path, body)``, some dozens at a time; merge patches where it is a PATCH."""
        waiting = iter(requests)

        async def sender() -> None:
            for verb, path, body in waiting:
                await self.send(verb, path, body, "application/merge-patch+json" if verb == "PATCH" else _JSON)

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))

    async def watch(self, path: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a watch."""
        query = f"?watch=true&resourceVersion={version}"
        async with self._session.get(self._server + path + query) as answer:
            async for line in answer.content:
                yield json.loads(line)


_JSON = "application/json"
