"""A case for every rule of the CRD: a manifest that it accepts, one that it refuses, and what the refusal names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.demo.crd_case import Case, nested

if TYPE_CHECKING:
    from collections.abc import Sequence


ARGS = [
    "--enforce-eager",
    "--max-num-seqs=8",
    "--data-parallel-backend=mp",
    "-5",
    "--",
    "-nothing",
    "--=x",
    "{'-t': 1}",
]
COLLIDING = [
    *("--model=x", "--tensor-parallel-size", "--tensor_parallel_size=2", "-tp", "--port=1", "-n2", "-sc"),
    *("--kv-transfer-config.kv_role=kv_both", "--speculative-config.num_speculative_tokens=3"),
]
COLLIDING_ENV = ["POD_IP", "VLLM_HOST_IP", "TWINPOOL_ANYTHING"]


def _role_cases(role: str) -> list[Case]:
    split = (f"spec.{role}.parallelism", "must divide resources.gpu.perNode")
    return [
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"tensor": 8, "pipeline": 2}}},
            {role: {"parallelism": {"tensor": 3}}},
            split,
            extra=(
                {role: {"parallelism": {"tensor": 4, "pipeline": 3}}},
                {role: {"parallelism": {"tensor": 2}, "resources": {"gpu": {"perNode": 0}}}},
            ),
        ),
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"tensor": 2, "data": 8}}},
            {role: {"parallelism": {"tensor": 16, "data": 2}}},
            (f"spec.{role}.parallelism.data", "each copy (tensor x pipeline) must fit into a node"),
        ),
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"data": 8, "expert": True}, "expertBalancing": {"redundantExperts": 32}}},
            {role: {"parallelism": {"data": 8}, "expertBalancing": {}}},
            (f"spec.{role}.expertBalancing", "needs parallelism.expert"),
            extra=({role: {"parallelism": {"pipeline": 2, "expert": True}, "expertBalancing": {}}},),
        ),
        *_argument_cases(f"{role}.engine"),
        *_unit_cases(f"{role}.resources.cpu", ["4", "0.5", "500m"], ["two", "4 ", "-1"]),
        *_unit_cases(f"{role}.resources.memory", ["25Gi", "16"], ["25GB ", "25GB", "Gi", "0Gi"]),
        *_unit_cases(f"{role}.resources.shm", ["8Gi"], ["8 Gi"]),
        *_unit_cases(f"{role}.startupTimeout", ["30m"], ["800", "1.5h", "0s"]),
        *_unit_cases(f"{role}.drainTimeout", ["800ms"], ["800"]),
    ]


def _argument_cases(engine: str) -> list[Case]:
    args, env = f"{engine}.args", f"{engine}.env"
    return [
        Case(
            f".spec.{args}",
            nested(args, ARGS),
            nested(args, [*ARGS, COLLIDING[0]]),
            (f"spec.{args}", "is set by Twinpool"),
            extra=tuple(nested(args, [flag]) for flag in COLLIDING),
        ),
        Case(
            f".spec.{env}[].name",
            nested(env, [{"name": "A", "value": "1"}]),
            nested(env, [{"name": COLLIDING_ENV[0], "value": "1"}]),
            (f"spec.{env}[0].name", "is set by Twinpool"),
            extra=tuple(nested(env, [{"name": name}]) for name in COLLIDING_ENV),
        ),
    ]


def _unit_cases(path: str, good: list[str], bad: list[str]) -> list[Case]:
    words = (f"spec.{path}", "must be")
    (first, *others) = bad
    made = [Case(f".spec.{path}", nested(path, value), nested(path, first), words) for value in good]
    return [*made, Case(f".spec.{path}", nested(path, good[0]), nested(path, first), words, extra=_all(path, others))]


def _rendering(**renderer: Any) -> dict[str, Any]:
    return {"engine": {"kvEvents": True}, "routing": {"policy": "price", "renderer": renderer}}


def _renderer_case(name: str, good: str, bad: str) -> Case:
    path = f"routing.renderer.resources.{name}"
    right, wrong = (_rendering(resources={name: value}) for value in (good, bad))
    return Case(f".spec.{path}", right, wrong, (f"spec.{path}", "must be"))


def _all(path: str, values: Sequence[object]) -> tuple[dict[str, Any], ...]:
    return tuple(nested(path, value) for value in values)


def _band(low: str, high: str = "1:1") -> dict[str, Any]:
    return {"prefill": {}, "ratio": {"min": low, "max": high}}


def _amount_cases(path: str) -> list[Case]:
    words = (f"spec.{path}", "must be a count from 0 to 1000, or a percentage")
    wrong = [-1, 1001, "1", "101%", "5.5%", "%"]
    good = [Case(f".spec.{path}", nested(path, value), nested(path, "x"), words) for value in (2, "25%", "100%")]
    return [*good, Case(f".spec.{path}", nested(path, 1), nested(path, "x%"), words, extra=_all(path, wrong))]


def _speculating(**block: Any) -> dict[str, Any]:
    return {"speculation": block}


def _tokens_case(role: str) -> Case:
    def made(tokens: Any) -> dict[str, Any]:
        return {**_speculating(method="ngram"), role: {"speculation": {"tokens": tokens}}}

    path = f"spec.{role}.speculation.tokens"
    return Case(f".{path}", made(4), made(0), (path, "1 to 32, or auto"), extra=(made(33), made("4"), made("all")))


def _tier_cases(role: str) -> list[Case]:
    """Return the cases of what a role keeps of its KV cache outside the accelerator."""
    host = {"kind": "host", "size": "64Gi"}
    disk = {"kind": "disk", "size": "1Ti", "storageClass": "local-nvme"}
    shared = {"kind": "shared", "size": "4Ti", "claim": "kv"}
    path = f"spec.{role}.kvCache"

    def made(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {role: {"kvCache": {"tiers": list(tiers)}, **more}}

    wide = {"parallelism": {"tensor": 16}}
    alone = {"parallelism": {"tensor": 8, "data": 2}}
    within = (f"{path}.tiers", "need a host tier")
    odd = {**host, "storageClass": "x"}
    bare = without(shared, "claim")
    both = {**disk, "claim": "kv"}
    stored = {"kind": "mooncake", "address": "master:50051", "size": "64Gi"}
    other = {**stored, "kind": "lmcache", "address": "lm://store:65432"}

    def kept(store: dict[str, Any], *tiers: dict[str, Any]) -> dict[str, Any]:
        return {role: {"kvCache": {"store": store, **({"tiers": list(tiers)} if tiers else {})}}}

    return [
        Case(f".{path}", kept(stored), kept(stored, host), (path, "memory of its own")),
        Case(f".{path}.store", kept(stored), kept({**stored, "address": "lm://m"}), (path, "HOST:PORT")),
        Case(f".{path}.store", kept(other), kept({**other, "address": "store:1"}), (path, "remote_url")),
        Case(f".{path}.store", kept(stored), kept({**other, "metadata": "etcd"}), (path, "belongs to a Mooncake")),
        Case(f".{path}.store.size", kept(stored), kept({**stored, "size": "64GB"}), (path, "must be a size")),
        Case(f".{path}.tiers", made(host, disk, shared), made(disk), within, extra=(made(shared),)),
        Case(f".{path}.tiers[]", made(host, disk), made(odd), (path, "belongs to a disk tier")),
        Case(
            f".{path}.tiers[]",
            made(host, shared),
            made(host, bare),
            (path, "a shared tier needs claim"),
            extra=(made(host, both),),
        ),
        Case(f".{path}.tiers[].size", made(host), made({**host, "size": "64GB"}), (path, "must be a size")),
        Case(f".spec.{role}", made(host, **alone), made(host, **wide), (path, "within a node")),
    ]


def _stuck_case(role: str, good: dict[str, Any], bad: dict[str, Any], *more: dict[str, Any]) -> Case:
    """Return a case for the rule that a group must be allowed to be one more or one fewer."""
    words = ("spec.rollout.maxSurge", f"cannot both be 0 for {role}")
    return Case(".spec.rollout", {"rollout": good}, {"rollout": bad}, words, extra=tuple({"rollout": m} for m in more))


def elastic(spec: dict[str, Any] | None = None, **scaling: Any) -> dict[str, Any]:
    """Return a pool whose numbers follow the work, with changes to its spec and to the block."""
    block = {"prefill": {"max": 4}, "decode": {"max": 4}, **scaling}
    return {"prefill": {}, "objectives": {"ttft": "1s", "itl": "40ms"}, "scaling": block, **(spec or {})}


def without(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ``spec`` without one of its fields."""
    return {key: value for key, value in spec.items() if key != name}


def _scaling_cases() -> list[Case]:
    two = {"prefill": {"parallelism": {"tensor": 2}}}
    never = {"handoff": {"conditional": "never"}}
    return [
        Case(".spec", elastic(), without(elastic(), "prefill"), ("spec.scaling", "without a prefill role")),
        Case(
            ".spec",
            elastic(),
            without(elastic(), "objectives"),
            ("spec.objectives", "set objectives.ttft"),
            extra=(elastic({"objectives": {"ttft": "1s"}}),),
        ),
        Case(".spec", elastic({"handoff": {}}), elastic(never), ("spec.handoff.conditional", "is never")),
        Case(
            ".spec",
            elastic(two, gpuBudget=3),
            elastic(two, gpuBudget=2),
            ("spec.scaling.gpuBudget", "less than prefill.min and decode.min"),
        ),
        *(
            Case(
                f".spec.scaling.{role}",
                elastic(**{role: {"min": 0, "max": 4}}),
                elastic(**{role: {"min": 5, "max": 4}}),
                (f"spec.scaling.{role}.min", "must not be above max"),
            )
            for role in ("prefill", "decode")
        ),
        Case(".spec.scaling.window", elastic(window="30s"), elastic(window="30"), ("spec.scaling.window", "must be")),
        *(
            Case(
                f".spec.scaling.stabilization.{name}",
                elastic(stabilization={name: "10s"}),
                elastic(stabilization={name: "0s"}),
                (f"spec.scaling.stabilization.{name}", "must be"),
            )
            for name in ("scaleIn", "scaleOut")
        ),
    ]


CASES: list[Case] = [
    *_scaling_cases(),
    Case(".spec", _band("1:4"), {"ratio": {"min": "1:4", "max": "1:2"}}, ("spec.ratio", "needs a prefill role")),
    Case(
        ".spec",
        {**_speculating(method="mtp"), "decode": {"speculation": {"tokens": "auto"}}},
        {"decode": {"speculation": {"tokens": 2}}},
        ("spec.speculation", "needs the pool's spec.speculation"),
        extra=({"prefill": {"speculation": {}}},),
    ),
    Case(
        ".spec",
        _rendering(),
        {"routing": {"policy": "price", "renderer": {}}},
        ("spec.routing.renderer", "set engine.kvEvents, and routing.policy to price"),
        extra=({"engine": {"kvEvents": True}, "routing": {"renderer": {}}},),
    ),
    Case(
        ".spec.speculation",
        _speculating(method="eagle3", model="org/draft"),
        _speculating(method="eagle3"),
        ("spec.speculation.model", "need a model that drafts"),
        extra=(_speculating(method="ngram", model="org/draft"),),
    ),
    _tokens_case("prefill"),
    _tokens_case("decode"),
    *_tier_cases("prefill"),
    *_tier_cases("decode"),
    Case(".spec.ratio", _band("1:2", "1:2"), _band("1:1", "1:2"), ("spec.ratio.min", "must not be above ratio.max")),
    Case(".spec.ratio.min", _band("1:999"), _band("1:0"), ("spec.ratio.min", "must be PREFILL:DECODE")),
    Case(".spec.ratio.max", _band("1:4", "3:4"), _band("1:4", "0.75"), ("spec.ratio.max", "must be PREFILL:DECODE")),
    Case("", {}, {}, ("metadata.name", "at most 37"), names=("a" * 37, "a" * 38)),
    Case("", {}, {}, ("metadata.name", "start with a letter"), names=("a-1", "1-a")),
    Case(
        ".spec.model",
        {"model": {"name": "m", "revision": "main"}},
        {"model": {"name": "m", "revision": "main", "source": "pvc://claim/m"}},
        ("spec.model.revision", "Hugging Face hub"),
    ),
    Case(
        ".spec.model",
        {"model": {"name": "m", "cache": {"hostPath": "/var/lib/weights"}}},
        {"model": {"name": "m", "source": "oci://image", "cache": {"hostPath": "/var/lib/weights"}}},
        ("spec.model.cache", "Hugging Face hub"),
    ),
    Case(
        ".spec.model",
        {"model": {"name": "m", "source": "pvc://c/m", "checksum": f"sha256:{'0' * 64}"}},
        {"model": {"name": "m", "checksum": f"sha256:{'0' * 64}"}},
        ("spec.model.checksum", "belongs to"),
    ),
    Case(
        ".spec.model.checksum",
        {"model": {"name": "m", "source": "oci://image", "checksum": f"sha256:{'a' * 64}"}},
        {"model": {"name": "m", "source": "oci://image", "checksum": f"sha256:{'A' * 64}"}},
        ("spec.model.checksum", "hexadecimal"),
    ),
    Case(
        ".spec.model.cache",
        {"model": {"name": "m", "cache": {"claim": "weights"}}},
        {"model": {"name": "m", "cache": {"claim": "weights", "hostPath": "/w"}}},
        ("spec.model.cache", "either hostPath or claim"),
        extra=({"model": {"name": "m", "cache": {}}},),
    ),
    Case(
        ".spec.model.cache.hostPath",
        {"model": {"name": "m", "cache": {"hostPath": "/var/lib/weights"}}},
        {"model": {"name": "m", "cache": {"hostPath": "weights"}}},
        ("spec.model.cache.hostPath", "absolute"),
        extra=({"model": {"name": "m", "cache": {"hostPath": "/var/../etc"}}},),
    ),
    Case(".spec.model.name", {"model": {"name": "org/m-1.0_x:y"}}, {"model": {"name": "-m"}}, ("spec.model.name",)),
    Case(
        ".spec.model.aliases[]",
        {"model": {"name": "m", "aliases": ["a", "org/b:1"]}},
        {"model": {"name": "m", "aliases": ["a", "-b"]}},
        ("spec.model.aliases", "letters, digits"),
    ),
    Case(
        ".spec.model",
        {"model": {"name": "m", "adapters": [{"name": "a", "source": "hf://org/a"}]}},
        {"model": {"name": "m", "adapters": [{"name": "m", "source": "hf://org/a"}]}},
        ("spec.model.adapters", "neither the model's nor one of its aliases"),
        extra=({"model": {"name": "m", "aliases": ["a"], "adapters": [{"name": "a", "source": "hf://org/a"}]}},),
    ),
    Case(
        ".spec.model.adapters[].name",
        {"model": {"name": "m", "adapters": [{"name": "org/a", "source": "file:///a"}]}},
        {"model": {"name": "m", "adapters": [{"name": "-a", "source": "file:///a"}]}},
        ("spec.model.adapters", "letters, digits"),
    ),
    Case(
        ".spec.model.adapters[].source",
        {"model": {"name": "m", "adapters": [{"name": "a", "source": "hf://org/a"}]}},
        {"model": {"name": "m", "adapters": [{"name": "a", "source": "pvc://claim/a"}]}},
        ("spec.model.adapters", "must be hf://ORG/NAME or file:///"),
    ),
    Case(
        ".spec.model.source",
        {"model": {"name": "m", "source": "file:///data/m"}},
        {"model": {"name": "m", "source": "s3://bucket/m"}},
        ("spec.model.source", "hf://ORG/NAME"),
        extra=(
            {"model": {"name": "m", "source": "file://m/x"}},
            {"model": {"name": "m", "source": "pvc:///x"}},
            {"model": {"name": "m", "source": "oci://#path"}},
        ),
    ),
    Case(
        ".spec.model.source",
        {"model": {"name": "m", "source": "oci://registry.example:5000/models/llama@sha256:0123#weights"}},
        {"model": {"name": "m", "source": "oci://"}},
        ("spec.model.source",),
    ),
    *_argument_cases("engine"),
    Case(
        ".spec.engine",
        {"engine": {"kvEvents": True, "args": ["--prefix-caching=x", "--enable-prefix-caching"]}},
        {"engine": {"kvEvents": True, "args": ["--no-enable-prefix-caching"]}},
        ("spec.engine.args", "kvEvents needs prefix caching"),
        extra=({"engine": {"kvEvents": True, "args": ["--prefix_caching_hash_algo=xxhash"]}},),
    ),
    *_role_cases("prefill"),
    *_role_cases("decode"),
    *_unit_cases("objectives.ttft", ["800ms"], ["800"]),
    *_unit_cases("objectives.itl", ["40ms"], ["40 ms"]),
    *_unit_cases("routing.queue.timeout", ["30s"], ["30"]),
    *_unit_cases("routing.queue.hold", ["5m"], ["5", "0s"]),
    *_unit_cases("routing.resources.cpu", ["1"], ["one"]),
    *_unit_cases("routing.resources.memory", ["512Mi"], ["512MB"]),
    _renderer_case("cpu", "1", "one"),
    _renderer_case("memory", "4Gi", "4GB"),
    *(
        case
        for block in ("rollout", "rollout.prefill", "rollout.decode")
        for name in ("maxSurge", "maxUnavailable")
        for case in _amount_cases(f"{block}.{name}")
    ),
    *_unit_cases("rollout.progressDeadline", ["1h"], ["60"]),
    _stuck_case("decode", {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 0}, {"maxSurge": "0%"}),
    _stuck_case(
        "decode", {"maxSurge": 0, "decode": {"maxSurge": 1}, "prefill": {"maxSurge": 1}}, {"decode": {"maxSurge": 0}}
    ),
    _stuck_case("prefill", {"prefill": {"maxSurge": 0, "maxUnavailable": "1%"}}, {"prefill": {"maxSurge": 0}}),
    Case(
        ".spec.tracing.endpoint",
        {"tracing": {"endpoint": "http://collector.monitoring.svc:4318", "sampling": 0.5}},
        {"tracing": {"endpoint": "collector:4317"}},
        ("spec.tracing.endpoint", "address of a collector"),
    ),
]
