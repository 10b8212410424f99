"""Which files of a model are fetched and checked before the engine starts, and how far that is.

The engine would fetch them too, but says nothing while it does, checks only their sizes, and every pod of a node on its
own. The choice follows vLLM 0.32 (``model_executor/model_loader/default_loader.py``); what it leaves out the engine
fetches itself, so a wrong choice costs time and breaks nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Literal

from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.protocol import WorkerConfig

#: Kinds of weights, the best first: vLLM takes the first that the model has.
_KINDS = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
#: Left out by vLLM too (``--ignore-patterns``).
_IGNORED = "original/*"
#: Files beside the weights that a tokenizer, a configuration or the model's own code may be in.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.yaml", "*.yml")
#: The list of checksums in a model's folder, as ``sha256sum`` writes it.
SUMS = "SHA256SUMS"
_SUM = re.compile(r"^([0-9a-f]{64}) [ *](.+)$")
_ANEW = f"write it anew in the model's folder: find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"

Stage = Literal["waiting", "downloading", "checking", "done"]
STAGES: tuple[Stage, ...] = ("waiting", "downloading", "checking", "done")
_VERBS: dict[Stage, str] = {
    "waiting": "weights: another pod of the node fetches them",
    "downloading": "weights are downloaded",
    "checking": "weights are checked",
    "done": "weights are there",
}


@dataclass(frozen=True)
class WeightFile:
    """One file of a model: its size in bytes, and its content's name.

    ``sha256`` is empty for small files of the hub, which ``blob`` names as git does: by SHA-1 of a header and the
    content. In the hub's cache a file is called by ``sha256``, or else by ``blob``.
    """

    name: str
    size: int
    sha256: str = ""
    blob: str = ""

    @property
    def content(self) -> str:
        """Return the name of the content."""
        return self.sha256 or self.blob


@dataclass(frozen=True)
class Progress:
    """How far it is, in bytes of all files; ``commit`` is the model's on the hub, empty elsewhere."""

    stage: Stage
    done: int = 0
    total: int = 0
    commit: str = ""
    #: The hub did not answer, and the cache held all that it was asked for before: the engine need not ask either.
    offline: bool = False

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Progress | None:
        """Read what :meth:`to_json` wrote; None for anything else."""
        try:
            value = json.loads(text)
            stage = value["stage"]
            found = cls(
                stage, int(value["done"]), int(value["total"]), str(value["commit"]), offline=bool(value["offline"])
            )
        except (ValueError, TypeError, KeyError):
            return None
        return found if stage in STAGES else None

    def __str__(self) -> str:
        """Return it in words, with gigabytes of 10^9 bytes."""
        if not self.total:
            return _VERBS[self.stage]
        share = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB ({100 * self.done // self.total} %)"
        return f"{_VERBS[self.stage]}: {share}"


def repositories(config: WorkerConfig, environment: Mapping[str, str]) -> tuple[tuple[str, str | None], ...]:
    """Return the models to fetch from the hub, each with its revision; none where the engine has its own way to them.

    That is so offline, with another hub (ModelScope) and with another format than files (``--load-format``).
    """
    own = any(word.startswith("--load-format") for word in config.args)
    elsewhere = any(_on(environment.get(name, "")) for name in ("HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE"))
    if config.engine != "vllm" or own or elsewhere:
        return ()
    asked = [(config.model_path, config.model_revision), (config.draft_model or "/", None)]
    asked += [(path, None) for path in config.adapter_paths]
    return tuple((path, revision) for path, revision in asked if not path.startswith("/"))


def wanted(config: WorkerConfig, environment: Mapping[str, str]) -> bool:
    """Return whether there is anything to fetch or to check before the engine starts."""
    return bool(repositories(config, environment)) or (config.engine == "vllm" and config.model_checksum is not None)


def _on(value: str) -> bool:
    return value.strip().upper() in ("1", "ON", "YES", "TRUE")


def choose(files: Iterable[WeightFile]) -> tuple[WeightFile, ...]:
    """Return the files that the engine will want: one kind of weights, and what stands beside them."""
    there = [file for file in files if not fnmatch(file.name, _IGNORED)]
    weights: list[WeightFile] = []
    for kind in _KINDS:
        weights = weights or [file for file in there if fnmatch(file.name, kind)]
    beside = [file for file in there if any(fnmatch(file.name, pattern) for pattern in _BESIDE)]
    return tuple(sorted([*weights, *beside], key=lambda file: file.name))


def exact(names: Sequence[str]) -> list[str]:
    """Return patterns that match exactly these names."""
    return [re.sub(r"([*?[])", r"[\1]", name) for name in names]


def listed(text: str, where: str) -> dict[str, str]:
    """Return the SHA-256 of every file that a list of ``sha256sum`` names.

    Raises
    ------
    InvalidValue
        A line is not one of such a list, it names a file outside its folder, or there is none.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _SUM.match(line)
        name = match.group(2).removeprefix("./") if match else ""
        if match is None or name.startswith("/") or ".." in name.split("/"):
            raise InvalidValue(
                f"line {number} of {where} is not a checksum and the name of a file below it",
                _ANEW,
            )
        found[name] = match.group(1)
    if not found:
        raise InvalidValue(f"{where} is empty", _ANEW)
    return found


def strangers(names: Iterable[str], sums: Mapping[str, str]) -> list[str]:
    """Return the files of a model's folder that its engine may read and its list of checksums does not name."""
    return sorted(
        name
        for name in names
        if name not in sums and any(fnmatch(name, pattern) for pattern in (*_KINDS, *_BESIDE)) and name != SUMS
    )
