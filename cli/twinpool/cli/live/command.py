"""The command ``twinpool live``."""

from __future__ import annotations

import sys
import threading
import time
import webbrowser
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from twinpool.cli.forward import Forwards
from twinpool.cli.kubectl import Kubectl
from twinpool.cli.live.server import Server
from twinpool.cli.live.watcher import Watcher
from twinpool.cli.options import Context, Namespace  # noqa: TC001 - read at run time by cyclopts


def live(
    pool: str,
    *,
    port: int = 8787,
    browser: Annotated[bool, Parameter(name="--open", negative="")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> int:
    """Show a pool at work on a page of this machine: its graph, where requests are, latencies, KV handed over.

    Ends with Ctrl-C. Reads the pool through kubectl and the pods' metrics through `kubectl port-forward`.

    Parameters
    ----------
    pool
        Name of the pool.
    port
        Port on 127.0.0.1; 0 takes any that is free.
    browser
        Open the page in a browser.
    """
    kubectl = Kubectl(namespace, context)
    with Forwards(kubectl) as forwards, Server(port, watcher := Watcher(kubectl, forwards, pool)) as server:
        watcher.look(time.monotonic())  # a pool that is not there ends the command, instead of an empty page
        watching = threading.Thread(target=watcher.run, name="watcher")
        watching.start()
        Console(highlight=False).print(f"{pool} at {server.url}  (Ctrl-C ends)", soft_wrap=True)
        sys.stdout.flush()  # a pipe would keep the address back
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
        finally:
            watcher.stop()
            watching.join()
    return 0
