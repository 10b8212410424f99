"""Which pods are endpoints, and which prefill and decode endpoints may work together.

Always true: an endpoint's identity changes when its engine restarts, so nothing learnt about the old process (its KV
references above all) is ever used with the new one; and a handoff stays within one revision, because two revisions
need not agree on model, dtype or KV layout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from twinpool.core import protocol
from twinpool.core.distance import Place
from twinpool.core.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine process that answers HTTP, or a renderer."""

    #: Pod uid, restart count of the engine's container, and how often it stopped answering since.
    id: str
    role: protocol.EndpointRole
    host: str
    port: int
    revision: str = ""
    group: str = ""
    pod: str = ""
    #: Its containers are ready and nobody asked its group to go. Not the pod's Ready, which waits for the routers.
    wanted: bool = True
    #: Wanted, and the router's own probe got an answer.
    admitted: bool = False
    #: A pod of its group is marked as draining or being deleted: what runs is served, nothing new comes.
    draining: bool = False
    #: The pod's uid, empty outside Kubernetes.
    uid: str = ""
    #: Ports of its KV events and of their replay; 0: it publishes none.
    events: int = 0
    replay: int = 0
    #: Tokens whose KV it can hold, over all ranks; 0: not known.
    kv_tokens: int = 0
    #: Where it is in the network; None: nobody said.
    place: Place | None = None
    #: Its data-parallel ranks, and the addresses of their pods in order: none where all are at ``host``, an empty one
    #: where it is not known.
    ranks: int = 1
    rank_hosts: tuple[str, ...] = ()
    #: The rank that legs are sent to, and what books and index call it (:mod:`twinpool.router.logic.seats`); without a
    #: seat no leg names a rank.
    rank: int = 0
    seat: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One pod of a serving group: of any rank, because every rank's end is the group's."""

    group: str
    leaving: bool
    #: Only leaders answer HTTP.
    endpoint: Endpoint | None
    #: Its place among the pods of the group, and its address; empty: none yet.
    index: str = "0"
    host: str = ""
    #: Pods of the group, over which its ranks are spread evenly.
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Directory:
    """The endpoints of a pool, ordered for choosing. ``known`` has every endpoint that exists, admitted or not."""

    known: Mapping[str, Endpoint]
    #: Admitted prefill endpoints that have at least one admitted decode endpoint of their revision.
    prefill: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    decode_by_revision: Mapping[str, tuple[Endpoint, ...]]
    #: Admitted renderers, while every admitted worker is of their revision: two need not agree on a tokenizer.
    renderers: tuple[Endpoint, ...] = ()


_ROLES = (*protocol.ROLES, protocol.RENDERER_ROLE)
#: Most data-parallel ranks of one endpoint in a static list, as in a pool (``parallelism.data``).
MOST_RANKS = 64

_ENGINE_PORTS = (protocol.ENGINE_PORT_NAME, protocol.KV_EVENTS_PORT_NAME, protocol.KV_REPLAY_PORT_NAME)

EMPTY = Directory({}, (), (), {})


def directory(endpoints: Iterable[Endpoint]) -> Directory:
    """Sort endpoints into a :class:`Directory`."""
    known = {endpoint.id: endpoint for endpoint in endpoints}
    admitted = sorted((e for e in known.values() if e.admitted), key=lambda e: (e.pod, e.id))
    decode = tuple(e for e in admitted if e.role == "decode")
    by_revision: dict[str, tuple[Endpoint, ...]] = {}
    for endpoint in decode:
        by_revision[endpoint.revision] = (*by_revision.get(endpoint.revision, ()), endpoint)
    prefill = tuple(e for e in admitted if e.role == "prefill" and e.revision in by_revision)
    revisions = {e.revision for e in admitted if e.role in protocol.ROLES}
    renderers = tuple(e for e in admitted if e.role == protocol.RENDERER_ROLE and revisions == {e.revision})
    return Directory(known, prefill, decode, by_revision, renderers)


def worker_of_pod(pod: Mapping[str, Any]) -> WorkerPod | None:
    """Return what a pod (as JSON) says about its group, or None when it is no worker's nor renderer's.

    A pod whose containers have ended for good counts as leaving: its StatefulSet will replace it.
    """
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels = metadata.get("labels") or {}
    if labels.get(protocol.LABEL_ROLE) not in _ROLES:
        return None
    leaving = (
        bool(metadata.get("deletionTimestamp"))
        or protocol.ANNOTATION_DRAINING in (metadata.get("annotations") or {})
        or status.get("phase") in ("Succeeded", "Failed")
    )
    config = protocol.launcher_settings(pod)
    return WorkerPod(
        labels.get(protocol.LABEL_GROUP, ""),
        leaving,
        _endpoint(pod, config.data if config else 1),
        labels.get(protocol.LABEL_POD_INDEX, "0"),
        status.get("podIP") or "",
        config.nodes if config else 1,
    )


def endpoints_of_workers(workers: Iterable[WorkerPod]) -> tuple[Endpoint, ...]:
    """Return the endpoints of all groups; one with a pod that leaves, of whatever rank, is draining."""
    workers = tuple(workers)
    going = {worker.group for worker in workers if worker.leaving and worker.group}
    hosts = {(worker.group, worker.index): worker.host for worker in workers if worker.nodes > 1}
    found = []
    for worker in workers:
        endpoint = worker.endpoint
        if endpoint is not None and (worker.leaving or endpoint.group in going):
            endpoint = replace(endpoint, wanted=False, draining=True)
        if endpoint is not None and worker.nodes > 1 and endpoint.ranks > 1:
            local = max(1, endpoint.ranks // worker.nodes)
            pods = ((endpoint.group, str(rank // local)) for rank in range(endpoint.ranks))
            endpoint = replace(endpoint, rank_hosts=tuple(hosts.get(pod, "") for pod in pods))
        if endpoint is not None:
            found.append(endpoint)
    return tuple(found)


def _endpoint(pod: Mapping[str, Any], ranks: int) -> Endpoint | None:
    """Return the endpoint of a leader of ``ranks`` that has an address and an engine port, else None."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata["labels"]
    ports = _engine_ports(pod)
    port = ports.get(protocol.ENGINE_PORT_NAME)
    address = status.get("podIP")
    if port is None or not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    if labels.get(protocol.LABEL_POD_INDEX, "0") != "0":
        return None
    conditions = status.get("conditions") or ()
    return Endpoint(
        id=f"{metadata.get('uid', '')}/{_restarts(status)}",
        role=cast(protocol.EndpointRole, labels[protocol.LABEL_ROLE]),
        host=address,
        port=port,
        revision=labels.get(protocol.LABEL_REVISION, ""),
        group=labels.get(protocol.LABEL_GROUP, ""),
        pod=metadata.get("name", ""),
        wanted=any(c.get("type") == "ContainersReady" and c.get("status") == "True" for c in conditions),
        uid=metadata.get("uid", ""),
        events=ports.get(protocol.KV_EVENTS_PORT_NAME, 0),
        replay=ports.get(protocol.KV_REPLAY_PORT_NAME, 0),
        place=Place.from_json((metadata.get("annotations") or {}).get(protocol.ANNOTATION_PLACE, "")),
        ranks=ranks,
    )


def _engine_ports(pod: Mapping[str, Any]) -> dict[str, int]:
    return {
        port["name"]: int(port["containerPort"])
        for container in (pod.get("spec") or {}).get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") in _ENGINE_PORTS
    }


def _restarts(status: Mapping[str, Any]) -> int:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == protocol.ENGINE_CONTAINER:
            return int(container.get("restartCount", 0))
    return 0


def endpoints_of_file(document: Any, name: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of a static list: ``[{"role": "decode", "host": "10.0.0.1", "port": 8000}]``.

    ``revision`` is optional, and so are ``kvEvents`` and ``kvReplay``, the ports of KV events (of the first rank), and
    ``ranks``, how many data-parallel ranks there are, with ``rankHosts``, the address of each where they are not all
    the endpoint's. Raises :class:`InvalidValue`, which names the entry, when the document has another shape.
    """
    if not isinstance(document, list):
        raise InvalidValue(f"{name} does not hold a JSON list", "write a list of objects with role, host and port")
    found: dict[str, Endpoint] = {}
    for number, entry in enumerate(document):
        if not isinstance(entry, dict):
            raise InvalidValue(f"{name}, entry {number} is not an object", "give it role, host and port")
        role, host, port = entry.get("role"), entry.get("host"), entry.get("port", protocol.ENGINE_PORT)
        revision = entry.get("revision", "")
        if role not in _ROLES:
            raise InvalidValue(f"{name}, entry {number}: role is {role!r}", "write prefill, decode or renderer")
        if not isinstance(host, str) or not host or not isinstance(revision, str):
            raise InvalidValue(
                f"{name}, entry {number}: host and revision must be strings", "write the engine's address"
            )
        events, replay = entry.get("kvEvents", 0), entry.get("kvReplay", 0)
        for field, value, least in (("port", port, 1), ("kvEvents", events, 0), ("kvReplay", replay, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 65536:
                raise InvalidValue(f"{name}, entry {number}: {field} is {value!r}", "write a number from 1 to 65535")
        ranks, hosts = _ranks_of_entry(entry, f"{name}, entry {number}")
        where = f"{host}:{port}"
        found[where] = Endpoint(
            id=where, role=role, host=host, port=port, revision=revision, pod=where, events=events, replay=replay,
            ranks=ranks, rank_hosts=hosts,
        )  # fmt: skip
    return tuple(found.values())


def _ranks_of_entry(entry: Mapping[str, Any], where: str) -> tuple[int, tuple[str, ...]]:
    ranks, hosts = entry.get("ranks", 1), entry.get("rankHosts", [])
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise InvalidValue(f"{where}: ranks is {ranks!r}", f"write a number from 1 to {MOST_RANKS}")
    strings = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    if not strings or (hosts and len(hosts) != ranks):
        raise InvalidValue(f"{where}: rankHosts is {hosts!r}", "write one address for each of the ranks, or none")
    return ranks, tuple(hosts)
