"""What the launcher asks its engine over HTTP. It dials only its own pod's engine port."""

from __future__ import annotations

import http.client
import json
from typing import Any

from twinpool.worker.logic.events import ProbeEnded

#: Seconds for one look; a starting engine may accept and not answer.
CHECK_TIMEOUT = 5.0
#: Largest answer that is read, in bytes; vLLM's metrics are about 100 kB.
MAX_ANSWER = 8 * 2**20
#: vLLM's header that names the data-parallel rank which is to answer.
RANK_HEADER = "X-data-parallel-rank"


class EngineClient:
    """Health, one probe token, and counters of the engine at ``host``:``port``."""

    def __init__(self, host: str, port: int, model: str, api_key: str = "", ranks: int = 1) -> None:
        self._host = host
        self._port = port
        self._model = model
        self._ranks = ranks
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def healthy(self) -> bool | None:
        """Return whether ``/health`` answers 200; None when it does not answer."""
        try:
            return self._ask("GET", "/health", CHECK_TIMEOUT)[0] == 200
        except (OSError, http.client.HTTPException):
            return None

    def metrics(self) -> str:
        """Return the text of ``/metrics``, or an empty text when it did not come."""
        try:
            code, body = self._ask("GET", "/metrics", CHECK_TIMEOUT)
        except (OSError, http.client.HTTPException):
            return ""
        return body.decode(errors="replace") if code == 200 else ""

    def probe(self, timeout: float, epoch: int) -> ProbeEnded:
        """Ask every data-parallel rank for one token and say how it went; the first that fails decides."""
        ended = ProbeEnded(epoch, ok=True)
        for rank in range(self._ranks):
            ended = self._probe(timeout, epoch, {RANK_HEADER: str(rank)} if self._ranks > 1 else {})
            if not ended.ok:
                return ended
        return ended

    def _probe(self, timeout: float, epoch: int, headers: dict[str, str]) -> ProbeEnded:
        request = {"model": self._model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        try:
            code, body = self._ask("POST", "/v1/completions", timeout, json.dumps(request).encode(), headers)
        except TimeoutError:
            return ProbeEnded(epoch, ok=False, reason=f"no answer within {timeout:g} s", late=True)
        except (OSError, http.client.HTTPException) as error:
            return ProbeEnded(epoch, ok=False, reason=f"{type(error).__name__}: {error}")
        if code != 200:
            return ProbeEnded(epoch, ok=False, reason=f"HTTP {code}: {body[:300].decode(errors='replace')}")
        return _read(body, epoch)

    def _ask(
        self, method: str, path: str, timeout: float, body: bytes | None = None, more: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            headers = {**self._headers, **(more or {}), **({"Content-Type": "application/json"} if body else {})}
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER)
        finally:
            connection.close()


def _read(body: bytes, epoch: int) -> ProbeEnded:
    """Say whether a completion with status 200 holds a token; vLLM answers with ``abort`` while it stops."""
    try:
        answer: Any = json.loads(body)
        reason = answer["choices"][0].get("finish_reason")
        tokens = (answer.get("usage") or {}).get("completion_tokens", 1)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ProbeEnded(epoch, ok=False, reason=f"no completion: {body[:300].decode(errors='replace')}")
    if reason == "abort" or not tokens:
        text = f"the completion ended without a token (finish_reason {reason!r})"
        return ProbeEnded(epoch, ok=False, reason=text, aborted=reason == "abort")
    return ProbeEnded(epoch, ok=True)
