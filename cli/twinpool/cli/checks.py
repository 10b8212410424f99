"""What ``twinpool doctor`` concludes from what it saw: one finding for each step from the CRD to the engine. Pure.

Steps come in the order in which they depend on each other; what cannot be known because an earlier step failed, or
because the user may not read it, is ``unknown`` and never counts as a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twinpool.cli.status import problems, state
from twinpool.core import protocol
from twinpool.core.crd import custom_resource_definition
from twinpool.operator.logic import names
from twinpool.operator.logic.rights import missing_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twinpool.operator.logic.observed import ContainerView, Observed, PodView

Body = dict[str, Any]
Outcome = Literal["ok", "failed", "unknown"]
#: Characters of an error's body that are shown.
_MOST_WORDS = 300
CRD = f"{protocol.PLURAL}.{protocol.GROUP}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One step: what was looked at, how it is, and what to do when it is not well."""

    check: str
    outcome: Outcome
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that could not be read: absent, or not for this user; ``why`` are the API server's words."""

    absent: bool
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a router answered to a question for one token: its pod, status (0: none came in time) and body."""

    pod: str
    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was read of the cluster for one pool; ``secrets`` are all that the pool names.

    ``answer`` is what came of asking, or why nobody was asked.
    """

    name: str
    crd: Body | Unread
    operators: Sequence[Body] | Unread
    stored: Body | Unread
    observed: Observed | None
    secrets: Mapping[str, bool | None]
    answer: Answer | str = "the pool was not asked"


def findings(seen: Evidence) -> Iterator[Finding]:
    """Yield what is found at each step; ends early where nothing more can be known."""
    yield _crd(seen.crd)
    yield _operator(seen.operators)
    yield _pool(seen)
    if isinstance(seen.stored, Unread) or seen.observed is None:
        return
    yield from _secrets(seen)
    yield from _conditions(seen.stored)
    pods = seen.observed.pods
    for role in (*names.roles(seen.observed.pool), names.ROUTER):
        yield _pods(role, [pod for pod in pods if pod.role == role])
    yield _answer(seen.answer)


def _crd(found: Body | Unread) -> Finding:
    what = "CRD"
    if isinstance(found, Unread):
        if found.absent:
            fix = "helm install twinpool charts/twinpool, or kubectl apply --server-side -f crds/"
            return Finding(what, "failed", f"the cluster does not know {CRD}", fix)
        return Finding(what, "unknown", found.why)
    served = next((version for version in found["spec"]["versions"] if version["name"] == protocol.VERSION), None)
    if served is None:
        return Finding(
            what, "failed", f"{CRD} does not serve {protocol.VERSION}", "helm upgrade twinpool charts/twinpool"
        )
    wanted = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    if lacking := missing_fields(wanted, served["schema"]["openAPIV3Schema"]):
        detail = f"it is older than this twinpool: fields such as {lacking[0]} would be dropped"
        return Finding(what, "failed", detail, "helm upgrade twinpool charts/twinpool")
    return Finding(what, "ok", f"{CRD} knows every field")


def _operator(found: Sequence[Body] | Unread) -> Finding:
    what = "operator"
    if isinstance(found, Unread):
        return Finding(what, "unknown", f"deployments of other namespaces cannot be read: {found.why}")
    if not found:
        fix = "helm install twinpool charts/twinpool --namespace twinpool-system --create-namespace"
        return Finding(what, "failed", "no operator is installed: pools serve on, but nothing is made or repaired", fix)
    places = [f"{body['metadata']['namespace']}/{body['metadata']['name']}" for body in found]
    running = [body for body in found if (body.get("status") or {}).get("availableReplicas")]
    if not running:
        namespace, _, name = places[0].partition("/")
        fix = f"kubectl -n {namespace} describe pods; kubectl -n {namespace} logs deployment/{name}"
        return Finding(what, "failed", f"{places[0]} has no available replica", fix)
    return Finding(what, "ok", f"{', '.join(places)} runs")


def _pool(seen: Evidence) -> Finding:
    what = "pool"
    if isinstance(seen.crd, Unread) and seen.crd.absent:
        return Finding(what, "unknown", "without the CRD there are no pools")
    if isinstance(seen.stored, Unread):
        if seen.stored.absent:
            fix = f"kubectl get {protocol.SHORT_NAME} --all-namespaces; then give --namespace"
            return Finding(what, "failed", f"there is no pool {seen.name} in this namespace", fix)
        return Finding(what, "unknown", seen.stored.why)
    metadata, found = seen.stored["metadata"], seen.stored.get("status") or {}
    if found.get("observedGeneration", 0) < metadata.get("generation", 0):
        detail = "the operator has not seen its newest spec; it looks at a change within seconds when it runs"
        fix = "kubectl logs of the operator: does it serve this namespace?"
        return Finding(what, "failed", detail, fix)
    return Finding(what, "ok", f"{seen.name} is seen by the operator")


def secret_names(pool: Mapping[str, Any]) -> list[str]:
    """Return the Secrets that a stored pool names, each once."""
    spec = pool["spec"]
    engine, routing, model = (spec.get(key) or {} for key in ("engine", "routing", "model"))
    blocks = (model, routing.get("auth") or {}, routing.get("tls") or {})
    found = {entry["name"] for entry in engine.get("imagePullSecrets") or ()}
    return sorted(found | {block["secretRef"]["name"] for block in blocks if block.get("secretRef")})


def _secrets(seen: Evidence) -> Iterator[Finding]:
    for name, there in seen.secrets.items():
        if there is None:
            yield Finding("secret", "unknown", f"whether {name} exists cannot be read")
        elif there:
            yield Finding("secret", "ok", f"{name} exists")
        else:
            fix = f"kubectl create secret generic {name} ..., with what the description of the pool's field asks for"
            yield Finding("secret", "failed", f"the pool names Secret {name}, which does not exist", fix)


def _conditions(stored: Body) -> Iterator[Finding]:
    found = problems(stored)
    for item in found:
        # The operator's messages end with the next step.
        yield Finding(f"condition {item['condition']}", "failed", f"{item['reason']}: {item['message']}")
    if not found:
        yield Finding("conditions", "ok", "the operator has nothing to complain about")


def _pods(role: str, pods: Sequence[PodView]) -> Finding:
    what = f"{role} pods"
    if not pods:
        return Finding(what, "failed", "there are none", "the conditions above say why; is replicas 0?")
    bad = [pod for pod in pods if not pod.ready and pod.deadline is None]
    if not bad:
        return Finding(what, "ok", f"{len(pods)} of {len(pods)} are ready")
    first = bad[0]
    told = next((text for container in first.containers if (text := _last_words(container))), "")
    words = told or first.scheduler_message or first.message
    detail = f"{len(pods) - len(bad)} of {len(pods)} are ready; {first.name}: {state([first])}"
    return Finding(what, "failed", f"{detail}{f' ({words})' if words else ''}", _pod_fix(first))


def _answer(answer: Answer | str) -> Finding:
    what = "a token"
    if isinstance(answer, str):
        return Finding(what, "unknown", answer)
    if answer.status == 200:
        return Finding(what, "ok", f"{answer.pod} answered one")
    if not answer.status:
        fix = f"twinpool top POOL --once shows where requests wait; kubectl logs {answer.pod}"
        return Finding(what, "failed", f"{answer.pod} did not answer in time", fix)
    words = " ".join(answer.text.split())[:_MOST_WORDS]
    fix = f"the router says why; kubectl logs {answer.pod} says more"
    return Finding(what, "failed", f"{answer.pod} answered {answer.status}: {words}", fix)


def _last_words(container: ContainerView) -> str:
    ended = container.terminated or container.last_terminated
    if ended and ended.exit_code:
        lines = ended.message.strip().splitlines()
        return f"{container.name} ended with {ended.exit_code}{': ' + lines[-1] if lines else ''}"
    return container.waiting_message


def _pod_fix(pod: PodView) -> str:
    if pod.scheduled is False:
        return f"kubectl describe pod {pod.name}; twinpool explain POOL --placement says who holds the GPUs"
    if any(container.waiting_reason in ("ErrImagePull", "ImagePullBackOff") for container in pod.containers):
        return "check engine.image and engine.imagePullSecrets; kubectl describe pod shows the registry's answer"
    return f"kubectl logs {pod.name} --all-containers --tail=50"
