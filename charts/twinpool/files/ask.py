"""What `helm test` runs in the operator's image: asks for one token and says what is wrong when none comes."""

import json
import os
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Ask once and return the exit code: 0 a token came, 1 none did."""
    url, model, key = (os.environ.get(name, "") for name in ("ENDPOINT", "MODEL", "API_KEY"))
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def ask(path: str, body: bytes | None = None) -> dict:
        request = urllib.request.Request(url + path, body, headers)  # noqa: S310 - the schema lets http and https in
        with urllib.request.urlopen(request, timeout=float(os.environ["TIMEOUT"])) as answer:  # noqa: S310
            return json.load(answer)

    try:
        model = model or ask("/v1/models")["data"][0]["id"]
        wanted = {"model": model, "prompt": "The capital of France is", "max_tokens": 1}
        answer = ask("/v1/completions", json.dumps(wanted).encode())
    except urllib.error.HTTPError as error:
        print(f"{url} answered {error.code}: {error.read(2000).decode(errors='replace')}")
        return 1
    except OSError as error:
        print(f"{url} cannot be reached: {error}\nIs the pool Ready? See: kubectl get tpool -A")
        return 1
    print(f"{url}: {model} answered {answer['choices'][0]['text']!r}, {answer['usage']['completion_tokens']} token")
    return 0


sys.exit(main())
