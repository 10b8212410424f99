"""Pods on the local cluster: what they see, how they start and end, and what kubectl can do with them."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twinpool.localcluster.images import Image, default_images
from twinpool.localcluster.view import View
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

WEB = """
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {config.txt: "from-configmap\\n", level: debug}
---
apiVersion: v1
kind: Secret
metadata: {name: password}
stringData: {password: s3cret}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: default}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web}
spec:
  replicas: 2
  serviceName: web
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      schedulingGates: [{name: example.com/placed}]
      readinessGates: [{conditionType: example.com/serving}]
      terminationGracePeriodSeconds: 10
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - {topologyKey: topology.kubernetes.io/zone, labelSelector: {matchLabels: {app: web}}}
      initContainers:
      - name: prepare
        image: python:test
        command: [sh, -c, 'echo hello from $HOSTNAME > /data/index.html']
        volumeMounts: [{name: data, mountPath: /data}]
      - name: helper
        image: python:test
        restartPolicy: Always
        command:
        - sh
        - -c
        - |
          trap "echo helper-term >> /shared/$HOSTNAME; exit 0" TERM
          echo helper up; touch /data/helper; while :; do sleep 0.1; done
        startupProbe: {exec: {command: [test, -f, /data/helper]}, periodSeconds: 1}
        volumeMounts: [{name: data, mountPath: /data}, {name: shared, mountPath: /shared}]
      containers:
      - name: main
        image: python:test
        command: [sh, -c]
        args:
        - |
          trap 'echo main-term >> /shared/$HOSTNAME; kill $!; exit 0' TERM
          python3 -u -m http.server --bind $(POD_IP) --directory /data 8000 &
          wait $!
        env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: LEVEL, valueFrom: {configMapKeyRef: {name: settings, key: level}}}
        ports: [{containerPort: 8000}]
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        resources:
          requests: {cpu: 100m, memory: 64Mi}
          limits: {nvidia.com/gpu: "4"}
        startupProbe: {httpGet: {path: /index.html, port: 8000}, periodSeconds: 1, failureThreshold: 30}
        readinessProbe: {httpGet: {path: /index.html, port: 8000}, periodSeconds: 1, failureThreshold: 1}
        livenessProbe: {httpGet: {path: /index.html, port: 8000}, periodSeconds: 1, failureThreshold: 3}
        lifecycle: {preStop: {exec: {command: [sh, -c, 'echo prestop >> /shared/$HOSTNAME; sleep 0.5']}}}
        volumeMounts:
        - {name: data, mountPath: /data}
        - {name: shared, mountPath: /shared}
        - {name: memory, mountPath: /dev/shm}
        - {name: settings, mountPath: /etc/app}
        - {name: settings, mountPath: /opt/one/config.txt, subPath: config.txt}
        - {name: password, mountPath: /etc/password, readOnly: true}
        - {name: info, mountPath: /etc/podinfo}
      volumes:
      - {name: data, emptyDir: {}}
      - {name: memory, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
      - {name: shared, hostPath: {path: SHARED}}
      - {name: settings, configMap: {name: settings}}
      - {name: password, secret: {secretName: password}}
      - {name: info, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
"""

ASK_API = """
import json, os, ssl, urllib.request as u
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
read = lambda name: open(folder + name).read()
server = (os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"])
url = "https://%s:%s/api/v1/namespaces/%s/pods/%s" % (*server, read("namespace"), os.uname().nodename)
request = u.Request(url, headers={"Authorization": "Bearer " + read("token")})
answer = u.urlopen(request, context=ssl.create_default_context(cafile=folder + "ca.crt"))
print(json.load(answer)["metadata"]["name"], answer.status)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine that the pods of ``web`` write into."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def web(local_cluster: LocalCluster, shared: Path) -> Iterator[View]:
    """A StatefulSet whose two pods still wait behind their scheduling gates."""
    local_cluster.add_images({"python:test": default_images()["twinpool/worker:dev"]})
    with local_cluster.fresh_namespace() as namespace:
        view = View(local_cluster, namespace)
        view.apply(WEB.replace("SHARED", str(shared)))
        yield view


@pytest.fixture(scope="module")
def opened(web: View) -> View:
    """The same with both gates of the pods open."""
    for pod in ("web-0", "web-1"):
        web.await_fields(f"pod/{pod}", '{.status.conditions[?(@.type=="PodScheduled")].reason}', "SchedulingGated", 10)
        web.kubectl("patch", "pod", pod, "--type=json", "-p", '[{"op":"remove","path":"/spec/schedulingGates"}]')
    for pod in ("web-0", "web-1"):
        web.await_fields(f"pod/{pod}", '{.status.conditions[?(@.type=="ContainersReady")].status}', "True", 30)
        assert web.read(f"pod/{pod}", '{.status.conditions[?(@.type=="Ready")].reason}') == "ReadinessGatesNotReady"
        serving = '{"status":{"conditions":[{"type":"example.com/serving","status":"True"}]}}'
        web.kubectl("patch", "pod", pod, "--subresource=status", "-p", serving)
        web.await_ready(pod)
    return web


def test_scheduling_gates_hold_pods_back(web: View) -> None:
    path = '{range .items[*]}{.status.phase}/{.status.conditions[?(@.type=="PodScheduled")].reason} {end}'
    web.await_fields("pods", path, "Pending/SchedulingGated Pending/SchedulingGated", 15)


def test_pods_are_spread_and_answer_at_their_own_addresses(opened: View, local_cluster: LocalCluster) -> None:
    nodes = opened.read("pods -l app=web", "{.items[*].spec.nodeName}").split()
    assert sorted(nodes) == sorted(local_cluster.nodes)
    for pod in ("web-0", "web-1"):
        address = opened.read(f"pod/{pod}", "{.status.podIP}")
        with urllib.request.urlopen(f"http://{address}:8000/", timeout=5) as answer:
            assert answer.read().decode() == f"hello from {pod}\n"


def test_init_containers_end_and_sidecars_run(opened: View) -> None:
    path = "{.status.initContainerStatuses[0].state.terminated.reason} {.status.initContainerStatuses[1].ready}"
    assert opened.read("pod/web-0", path) == "Completed true"


def test_volumes_hold_what_they_should(opened: View) -> None:
    files = "/etc/app/config.txt /opt/one/config.txt /etc/password/password"
    script = f"cat {files}; echo; echo $LEVEL; cat /etc/podinfo/labels; grep -c ' /dev/shm tmpfs' /proc/mounts"
    lines = opened.exec("web-0", "sh", "-c", script).stdout.split("\n")
    assert lines[:4] == ["from-configmap", "from-configmap", "s3cret", "debug"]
    assert 'app="web"' in lines
    assert lines[-2] != "0", "the memory volume is a file system of its own"
    left = [path for path in ("/etc/app", "/etc/password", "/opt/one", "/data") if Path(path).exists()]
    assert left == [], "mount points are made in the container only"


def test_read_only_mounts_refuse_writing(opened: View) -> None:
    done = opened.exec("web-0", "touch", "/etc/password/x", check=False)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr


def test_changed_configmaps_reach_their_volumes(opened: View) -> None:
    opened.kubectl("patch", "configmap", "settings", "-p", '{"data":{"config.txt":"changed"}}')
    wait_until(lambda: opened.exec("web-0", "cat", "/etc/app/config.txt").stdout == "changed", 20, "the new value")


def test_pods_reach_the_api_with_their_token(opened: View) -> None:
    assert opened.exec("web-0", "python3", "-c", ASK_API).stdout == "web-0 200\n"


def test_logs_exec_and_describe(opened: View) -> None:
    wait_until(
        lambda: "GET /index.html" in opened.kubectl("logs", "web-0", "-c", "main").stdout, 10, "lines of the log"
    )
    assert opened.kubectl("logs", "web-0", "-c", "helper").stdout == "helper up\n"
    assert opened.exec("web-0", "sh", "-c", "exit 7", check=False).returncode == 7
    piped = ("-n", opened.namespace, "exec", "-i", "web-0", "-c", "main", "--", "cat")
    assert opened.cluster.kubectl(*piped, input="abc").stdout == "abc"
    described = opened.kubectl("describe", "pod", "web-0").stdout
    assert "nvidia.com/gpu:  4" in described
    assert "Started" in described


def test_port_forward(opened: View) -> None:
    command = [opened.cluster.kubectl_path, "-n", opened.namespace, "port-forward", "web-0", ":8000"]
    with subprocess.Popen(command, env=opened.cluster.environment, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout
            address = forward.stdout.readline().split()[2]  # "Forwarding from 127.0.0.1:PORT -> 8000"
            with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
                assert answer.read() == b"hello from web-0\n"
        finally:
            forward.terminate()


def test_a_failing_liveness_probe_restarts_the_container(opened: View) -> None:
    opened.exec("web-1", "rm", "/data/index.html")
    opened.await_fields("pod/web-1", "{.status.containerStatuses[0].restartCount}", "1", 30)
    opened.exec("web-1", "sh", "-c", "echo again > /data/index.html")


def test_deletion_runs_pre_stop_then_terminates_then_the_sidecar(opened: View, shared: Path) -> None:
    uid = opened.read("pod/web-0", "{.metadata.uid}")
    opened.kubectl("delete", "pod", "web-0")
    assert (shared / "web-0").read_text().split() == ["prestop", "main-term", "helper-term"]
    path = '{.metadata.uid} {.status.conditions[?(@.type=="PodScheduled")].reason}'
    assert not opened.await_fields("pod/web-0", path, "* SchedulingGated", 10).startswith(uid)


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(local_cluster: LocalCluster, namespace: str) -> None:
    view = View(local_cluster, namespace)
    view.apply(pod("stubborn", ["sh", "-c", "trap '' TERM; while :; do sleep 0.2; done"], grace=2))
    view.await_ready("stubborn")
    start = time.monotonic()
    view.kubectl("delete", "pod", "stubborn")
    assert 2 <= time.monotonic() - start < 25, "Kubernetes' own grace would be 30 s"


def test_termination_message_and_exit_code(local_cluster: LocalCluster, namespace: str) -> None:
    view = View(local_cluster, namespace)
    view.apply(
        pod("once", ["sh", "-c", "echo last words > /dev/termination-log; exit 3"], extra="restartPolicy: Never")
    )
    ended = "{.status.containerStatuses[0].state.terminated"
    path = f"{ended}.exitCode}} {ended}.message}}"
    view.await_fields("pod/once", path, "3 last words", 20)


def test_crashes_are_counted_and_backed_off(local_cluster: LocalCluster, namespace: str) -> None:
    view = View(local_cluster, namespace)
    view.apply(pod("crash", ["sh", "-c", "echo boom; exit 9"]))
    status = "{.status.containerStatuses[0]"
    path = f"{status}.state.waiting.reason}} {status}.lastState.terminated.exitCode}} {status}.restartCount}}"
    view.await_fields("pod/crash", path, "CrashLoopBackOff 9 [12]", 30)
    assert view.kubectl("logs", "crash", "--previous").stdout == "boom\n"


def test_images_decide_how_they_start(local_cluster: LocalCluster, namespace: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}\n")
    local_cluster.add_images(
        {
            "preset:1": Image(
                ("sh", "-c"),
                ("cat /models/tiny/config.json; echo $GREETING; exec sleep 1000",),
                {"GREETING": "hello"},
                {"/models/tiny": str(model)},
            ),
            "broken:1": Image(pull_error="no such image"),
        }
    )
    view = View(local_cluster, namespace)
    view.apply(pod("preset", [], image="preset:1"))
    view.apply(pod("broken", [], image="broken:1"))
    view.apply(pod("nocommand", ["no-such-command"]))
    view.apply(pod("greedy", ["sleep", "1000"], extra_container='resources: {limits: {nvidia.com/gpu: "9"}}'))
    waiting = "{.status.containerStatuses[0].state.waiting.reason}"
    wait_until(lambda: view.kubectl("logs", "preset").stdout == "{}\nhello\n", 15, "the image's greeting")
    view.await_fields("pod/broken", waiting, "*ImagePull*", 20)
    path = "{.status.containerStatuses[0].lastState.terminated.reason}"
    view.await_fields("pod/nocommand", path, "StartError", 20)
    path = '{.status.conditions[?(@.type=="PodScheduled")].message}'
    view.await_fields("pod/greedy", path, "*Insufficient nvidia.com/gpu*", 10)


def pod(
    name: str, command: list[str], *, image: str = "tool:1", grace: int = 1, extra: str = "", extra_container: str = ""
) -> str:
    """Return the manifest of a pod with one container."""
    lines = [
        "apiVersion: v1",
        "kind: Pod",
        f"metadata: {{name: {name}}}",
        "spec:",
        f"  terminationGracePeriodSeconds: {grace}",
        *([f"  {extra}"] if extra else []),
        "  containers:",
        f"  - name: main\n    image: {image}",
        *([f"    command: {json.dumps(command)}"] if command else []),
        *([f"    {extra_container}"] if extra_container else []),
    ]
    return "\n".join(lines)
