"""What comes from mounted Secrets: API keys and the TLS certificate, read again when Kubernetes replaces them.

Always true: a Secret that cannot be used any more changes nothing for those who are served; one that cannot be used at
the start stops the router with the reason. No key reaches a log.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path

from twinpool.core.errors import InvalidValue
from twinpool.router.logic.keys import digest_of

log = logging.getLogger(__name__)

Keys = tuple[tuple[str, bytes], ...]


def read_keys(directory: str) -> Keys:
    """Return names and digests of the keys in a mounted Secret; what is no key is left out and named in the log.

    Raises
    ------
    InvalidValue
        When the directory cannot be read.
    """
    found: dict[str, bytes] = {}
    try:
        for path in sorted(Path(directory).iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            try:
                found[path.name] = digest_of(path.read_bytes(), path.name)
            except InvalidValue as error:
                log.warning("left out: %s", error)
    except OSError as error:
        raise InvalidValue(
            f"the API keys in {directory} cannot be read: {error.strerror}", "mount the Secret of routing.auth there"
        ) from None
    if not found:
        log.warning("there is no API key in %s, so every request is refused", directory)
    return tuple(found.items())


class Certificate:
    """A TLS context that follows its files; connections that are open keep what they began with."""

    def __init__(self, directory: str) -> None:
        self._files = (Path(directory) / "tls.crt", Path(directory) / "tls.key")
        self._seen = self._stamp()
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        """Read both files into a context of their own, so that a half-replaced pair does no harm.

        Raises
        ------
        InvalidValue
            When they are no certificate and its key.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self._files)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidValue(
                f"{self._files[0]} and {self._files[1]} are not a certificate and its key: {error}",
                "give a Secret of type kubernetes.io/tls as routing.tls",
            ) from None
        return context

    def refresh(self) -> None:
        """Load the files again if they changed; new connections get the new certificate."""
        seen = self._stamp()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load()
        except InvalidValue as error:
            log.warning("keeping the certificate: %s", error)
            return
        # The listener has this context, so this one is changed in place.
        self.context.load_cert_chain(*self._files)
        log.info("the certificate was replaced")

    def _stamp(self) -> tuple[float, ...]:
        stamps: list[float] = []
        for path in self._files:
            with contextlib.suppress(OSError):
                status = path.stat()
                stamps += [status.st_mtime_ns, status.st_ino, status.st_size]
        return tuple(stamps)
