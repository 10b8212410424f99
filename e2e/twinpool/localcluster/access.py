"""Access to the API server: kubeconfig files, and a client of a few lines for looking at the cluster."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path


def write_kubeconfig(path: Path, server: str, pki: Path, user: str) -> None:
    """Write a kubeconfig with everything in it, so that the file may be copied elsewhere."""

    def data(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "local",
        "clusters": [{"name": "local", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "users": [
            {
                "name": user,
                "user": {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")},
            }
        ],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": user}}],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


class Api:
    """Reads objects as the user of a kubeconfig that :func:`write_kubeconfig` made."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        url = urlsplit(cluster["server"])
        self._host, self._port = url.hostname or "", url.port or 443
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile(dir=kubeconfig.parent) as pair:  # ssl takes the pair from a file only
            for name in ("client-certificate-data", "client-key-data"):
                pair.write(base64.b64decode(user[name]))
            pair.flush()
            self._tls.load_cert_chain(pair.name)

    def raw(self, path: str, timeout: float = 5) -> tuple[int, bytes]:
        """Return status and body of a GET.

        Raises
        ------
        OSError
            The API server does not answer.
        """
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """Return the object at ``path``."""
        status, body = self.raw(path)
        if status != http.client.OK:
            raise ClusterError(f"the API server answers {status} to GET {path}: {body[:200].decode(errors='replace')}")
        return json.loads(body)


def ready_nodes(listing: Any) -> set[str]:
    """Return the names of the nodes of a NodeList that are ready."""
    return {
        item["metadata"]["name"]
        for item in listing["items"]
        for condition in item["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }
