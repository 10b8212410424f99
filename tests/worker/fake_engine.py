"""A program that looks like vLLM to the launcher: same arguments, /health, /metrics and one-token completions.

``FAKE_DIR`` names a folder in which tests steer it: ``busy`` makes it report a running request, ``working`` makes its
counters move, ``no-token`` makes its completions end without a token, ``abort`` makes them end as while vLLM drains,
``wedged`` leaves them unanswered, ``unhealthy`` makes /health fail. ``FAKE_MODE`` is one of ``serve``, ``crash`` (ends
at once with a traceback), ``stubborn`` (ignores SIGTERM) and ``orphan`` (leaves a grandchild in a session of its own).
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEER = Path(os.environ["FAKE_DIR"])
MODE = os.environ.get("FAKE_MODE", "serve")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            running = int((STEER / "busy").exists())
            tokens = time.monotonic() if (STEER / "working").exists() else 0
            text = f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting 0\n'
            self._answer(200, text + f"vllm:generation_tokens_total {tokens}\n")
        else:
            self._answer(503 if (STEER / "unhealthy").exists() else 200, "")

    def do_POST(self):
        json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = 0 if (STEER / "no-token").exists() else 1
        while (STEER / "wedged").exists():
            time.sleep(0.05)
        reason = "abort" if (STEER / "abort").exists() else "length"
        body = {"choices": [{"text": "x", "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
        self._answer(200, json.dumps(body))

    def _answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


def orphan():
    """Start a process that outlives its parent, outside the engine's group; write its pid down."""
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(STEER / 'orphan')!r}, 'w').write(str(child.pid))\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def main():
    arguments = sys.argv[1:]
    (STEER / "arguments").write_text(json.dumps(arguments))
    with (STEER / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    print("the engine speaks", flush=True)
    if MODE == "crash":
        raise ValueError("no such weights")
    if MODE == "orphan":
        orphan()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else lambda *_: os._exit(0))
    if "--headless" in arguments:
        signal.pause()
    host = arguments[arguments.index("--host") + 1]
    port = int(arguments[arguments.index("--port") + 1])
    http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()


main()
