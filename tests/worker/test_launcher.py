"""The launcher as a process, with an engine that only looks like vLLM: signals, exits, reaping, HTTP."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import count
from pathlib import Path

import pytest

from twinpool.core.protocol import Leader, WorkerConfig
from twinpool.localengine.hub import Hub, Repository

FAKE = Path(__file__).with_name("fake_engine.py")
_addresses = count(1)


def wait_for(condition, what, seconds=30.0):
    """Poll until ``condition`` returns something true, and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"not within {seconds} s: {what}")


def alive(pid):
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Worker:
    """One launcher process and what it leaves behind."""

    def __init__(self, folder, mode="serve", args=(), extra=None, **config):
        self.folder = folder
        self.ip = f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{next(_addresses)}"
        python = folder / "python"
        ours = f'case "$*" in *preflight-rank*|*" weights "*) exec "{sys.executable}" "$@";; esac'
        python.write_text(f'#!/bin/sh\n{ours}\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        settings = WorkerConfig(
            **{
                "pool": "p",
                "namespace": "n",
                "role": "decode",
                "revision": "r",
                "engine": "vllm",
                "model": "m",
                "model_path": "/",
                "python": str(python),
                "args": args,
                "startup_timeout": 60.0,
                **config,
            }
        )
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("COV")},
            "POD_IP": self.ip,
            "TWINPOOL_WORKER": settings.to_json(),
            "FAKE_DIR": str(folder),
            "FAKE_MODE": mode,
            "TWINPOOL_TERMINATION_LOG": str(folder / "termination"),
            **(extra or {}),
        }
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twinpool.worker", "run"], env=environment, stdout=self.output, stderr=self.output
        )

    def get(self, path):
        """Return the launcher's answer, or status 0 while it does not listen."""
        try:
            with urllib.request.urlopen(f"http://{self.ip}:8090{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self):
        return self.get("/readyz")[0] == 200

    def status(self):
        return json.loads(self.get("/status")[1])

    def starts(self):
        if not (self.folder / "starts").exists():
            return []
        return [int(line) for line in (self.folder / "starts").read_text().split()]

    def children(self):
        """Return the launcher's own children, each the first of a group: its engine, whichever that is."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return [int(pid) for pid in children]
        return []

    def steer(self, name, *, on=True):
        (self.folder / name).touch() if on else (self.folder / name).unlink()

    def end(self, seconds=30):
        return self.process.wait(timeout=seconds)

    def said(self):
        return Path(self.output.name).read_text()

    def termination(self):
        return (self.folder / "termination").read_text()


@pytest.fixture
def worker(tmp_path):
    """Start launchers; whatever a test leaves is ended."""
    started = []

    def start(*args, **kwargs):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Worker(folder, *args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        engines = {*each.starts(), *each.children()}
        each.process.kill()
        each.process.wait()
        each.output.close()
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def test_ready_after_a_token_then_drains_and_leaves(worker):
    one = worker()
    one.steer("no-token")
    wait_for(lambda: "without a token" in one.get("/readyz")[1], "the failed probe is told")
    assert one.get("/readyz")[0] == 503
    assert one.get("/healthz") == (200, "ok\n")
    one.steer("no-token", on=False)
    wait_for(one.ready, "ready")
    status = one.status()
    assert (status["phase"], status["epoch"], status["engine"]["pid"]) == ("ready", 1, one.starts()[0])
    assert "the engine speaks" in status["lastLines"]
    assert "twinpool_worker_ready 1" in one.get("/metrics")[1]
    assert one.get("/other")[0] == 404
    one.steer("busy")
    one.process.send_signal(signal.SIGTERM)
    wait_for(lambda: one.get("/readyz")[0] == 503, "unready at once")
    assert json.loads(one.get("/readyz")[1])["reason"] == "draining"
    assert alive(one.starts()[0]), "a busy engine goes on"
    one.steer("busy", on=False)
    assert one.end() == 0
    assert not alive(one.starts()[0])
    assert not (one.folder / "termination").exists()
    assert "the engine speaks\n" in one.said(), "the engine's output is passed on unchanged"
    assert "NO GPU IS USED" in one.said()


def test_an_engine_that_cannot_start_ends_the_pod_with_its_last_lines(worker):
    one = worker("crash")
    assert one.end() == 1
    assert len(one.starts()) == 1, "the kubelet's back-off restarts it, not the launcher"
    message = one.termination()
    assert message.startswith("ValueError: no such weights (the engine ended with exit code 1)")
    assert "the engine speaks" in message
    assert 'raise ValueError("no such weights")' not in message


def test_a_killed_engine_comes_back_in_place(worker):
    one = worker()
    wait_for(one.ready, "ready")
    os.kill(one.starts()[0], signal.SIGKILL)
    wait_for(lambda: len(one.starts()) == 2 and one.ready(), "ready again")
    assert one.status()["restarts"] == 1
    assert one.status()["epoch"] == 2
    assert one.process.poll() is None


@pytest.mark.parametrize(
    ("fault", "cause", "reason"),
    [
        ("busy", "Stuck", "requests run and no counter has moved for 1 s"),
        ("wedged", "Wedged", "one token did not come within 1 s"),
        ("unhealthy", "EngineDead", "says that its engine is dead"),
        ("abort", "Aborting", "finish_reason 'abort'"),
        ("no-token", "Failing", "3 requests for one token failed in a row"),
    ],
)
def test_an_engine_that_serves_no_more_is_started_again_and_the_cause_is_named(worker, fault, cause, reason):
    one = worker(stall_timeout=1.0)
    wait_for(one.ready, "ready")
    one.steer(fault)
    wait_for(lambda: json.loads(one.get("/readyz")[1] or "{}").get("cause") == cause, f"unready for {cause}")
    assert reason in one.get("/readyz")[1]
    one.steer(fault, on=False)
    wait_for(lambda: len(one.starts()) == 2 and one.ready(), "ready again")
    assert f'twinpool_worker_engine_losses_total{{cause="{cause}"}} 1' in one.get("/metrics")[1]
    assert json.loads(one.get("/readyz")[1])["cause"] == ""


def test_an_engine_that_stands_still_in_the_middle_of_a_stream_is_found_by_its_counters(worker):
    """The simulated engine's HTTP server lives on, as vLLM's does when its core hangs in a collective."""
    one = worker(engine="simulated", stall_timeout=1.5)
    wait_for(one.ready, "ready")
    first = one.status()["engine"]["pid"]
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "x-twinpool-fault": "stall-mid-stream=3"}
    asked = urllib.request.Request(f"http://{one.ip}:8000/v1/completions", body, headers)
    with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=20) as stream:  # noqa: S310 - http above
        assert stream.status == 200
        wait_for(lambda: '"Stuck"' in one.get("/readyz")[1], "unready")
    wait_for(lambda: one.ready() and one.status()["engine"]["pid"] != first, "ready again")
    assert 'losses_total{cause="Stuck"} 1' in one.get("/metrics")[1]


def test_what_tiers_and_experts_do_is_told(worker):
    """Prompts in turn that the accelerator cannot keep come back from the host; experts are skewed until they move."""
    one = worker(
        engine="simulated",
        role="aggregated",
        stall_timeout=1.5,
        data=2,
        expert=True,
        expert_balancing=True,
        host_kv_bytes=4 * 2**30,
        args=("--kv-blocks=512", "--time-scale=0.01", "--expert-skew=1"),
    )
    wait_for(one.ready, "ready")
    assert one.status()["kvTiers"]["expected"].startswith("host (4 GiB, 32768 tokens)")
    for number in (*range(6), *range(6)):
        prompt = list(range(number * 100, number * 100 + 2000))
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": "0"}
        asked = urllib.request.Request(f"http://{one.ip}:8000/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=20) as answer:  # noqa: S310 - http above
            found = json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == 1984, "all but the last block, which holds the last token"
    wait_for(lambda: one.status()["kvTiers"].get("tiers", [{}])[0].get("loadedTokens"), "the launcher looked")
    state = one.status()
    assert state["kvTiers"]["tiers"][0]["loadedTokens"] >= 1984
    assert state["kvTiers"]["computeSecondsPerToken"] > 0
    assert state["experts"]["significant"]
    page = one.get("/metrics")[1]
    assert 'twinpool_worker_kv_tier_size_bytes{tier="host"} 4294967296' in page
    assert 'twinpool_worker_kv_tier_token_load_seconds{tier="host"}' in page
    assert "twinpool_worker_expert_load_significant 1" in page


def test_a_preflight_that_cannot_be_made_is_told_and_holds_nothing_up(worker):
    """The test's own Python has no torch, as an image might have none."""
    one = worker(tensor=2)
    wait_for(one.ready, "ready")
    code, body = one.get("/preflight")
    assert (code, json.loads(body)["outcome"]) == (200, "skipped")
    assert "no torch.distributed" in json.loads(body)["problem"]
    assert 'twinpool_worker_preflight_outcome{outcome="skipped"} 1' in one.get("/metrics")[1]
    assert one.status()["engine"]["pid"] == one.starts()[0], "the launcher's child became the engine"
    os.kill(one.starts()[0], signal.SIGKILL)
    wait_for(lambda: len(one.starts()) == 2 and one.ready(), "ready again")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 0


def test_one_rank_alone_has_no_preflight(worker):
    one = worker()
    wait_for(one.ready, "ready")
    assert one.get("/preflight")[0] == 404


def test_load_never_makes_a_pod_unready(worker):
    """An engine that works for others, and whose every probe would hang, goes on for many stall timeouts."""
    one = worker(stall_timeout=0.5)
    wait_for(one.ready, "ready")
    for name in ("working", "busy", "wedged"):
        one.steer(name)
    before = time.monotonic()
    while time.monotonic() < before + 2.5:
        assert one.ready()
    assert len(one.starts()) == 1


def test_orphans_of_a_dead_engine_are_ended_and_reaped(worker):
    one = worker("orphan")
    wait_for(one.ready, "ready")
    orphan = int((one.folder / "orphan").read_text())
    assert alive(orphan)
    os.kill(one.starts()[0], signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is gone, not a zombie")
    wait_for(lambda: len(one.starts()) == 2 and one.ready(), "ready again")


def test_a_zombie_is_reaped_while_the_engine_runs(worker):
    one = worker("orphan")
    wait_for(one.ready, "ready")
    orphan = int((one.folder / "orphan").read_text())
    os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), "reaped")
    assert one.ready()
    assert len(one.starts()) == 1


def test_startup_timeout_says_what_was_waited_for(worker):
    one = worker("stubborn", startup_timeout=1.5)
    one.steer("no-token")
    assert one.end() == 1
    assert "not ready within the startup timeout of 1.5 s: no probe token" in one.termination()
    assert not alive(one.starts()[0])


def test_a_drain_that_takes_too_long_ends(worker):
    one = worker(drain_timeout=1.0)
    wait_for(one.ready, "ready")
    one.steer("busy")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 0
    assert "still running after the drain timeout of 1 s" in one.said()


def test_sigterm_while_starting_leaves_at_once(worker):
    one = worker()
    one.steer("unhealthy")
    wait_for(lambda: (one.folder / "starts").exists(), "started")
    wait_for(lambda: one.get("/healthz")[0] == 200, "listening")
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 0


def test_a_missing_interpreter_is_named(worker):
    one = worker(python="/no/such/python")
    assert one.end() == 1
    assert "cannot start '/no/such/python': No such file or directory - set engine.python" in one.termination()


def test_a_missing_model_is_named_at_once(worker):
    one = worker(model_path="/no/such/model")
    assert one.end() == 1
    assert one.termination().startswith("the model's path /no/such/model does not exist in the engine's container")
    assert not (one.folder / "starts").exists()


def test_a_colliding_flag_is_refused_by_name(worker):
    one = worker(args=("--tensor-parallel-size=2",))
    assert one.end() == 1
    assert "'--tensor-parallel-size=2' sets --tensor-parallel-size, which Twinpool sets itself" in one.termination()


def test_a_taken_port_is_named(worker):
    first = worker()
    wait_for(lambda: first.get("/healthz")[0] == 200, "listening")
    environment = {
        **os.environ,
        "POD_IP": first.ip,
        "TWINPOOL_WORKER": WorkerConfig(
            pool="p",
            namespace="n",
            role="decode",
            revision="r",
            engine="vllm",
            model="m",
            model_path="/",
        ).to_json(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "twinpool.worker", "run"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"cannot listen on {first.ip} port 8090: Address already in use" in done.stderr


@pytest.fixture
def group(worker, tmp_path):
    """Start a leader, or a rank that reads its leader from a file which the test writes."""
    file = tmp_path / "leader"

    def start(rank, **config):
        extra = {
            "POD_UID": f"uid-{rank}-{next(_addresses)}",
            "POD_NAME": f"pod-{rank}",
            "TWINPOOL_NODE_RANK": str(rank),
            "TWINPOOL_LEADER_FILE": str(file),
        }
        one = worker(extra=extra, nodes=2, **config)
        if rank == 0:
            file.write_text(Leader(one.ip, extra["POD_UID"], 1).to_json())
        return one

    return start


def test_the_ranks_of_a_group_start_together_and_are_ready_together(group):
    rank = group(1)
    wait_for(lambda: "nobody has named the leader" in rank.get("/readyz")[1], "it says what it waits for")
    assert not rank.starts()
    leader = group(0)
    wait_for(lambda: leader.ready() and rank.ready(), "both are ready")
    wait_for(rank.starts, "the rank's engine runs")
    arguments = json.loads((rank.folder / "arguments").read_text())
    assert arguments[arguments.index("--master-addr") + 1] == leader.ip
    assert "--headless" in arguments
    leader.process.send_signal(signal.SIGTERM)
    rank.process.send_signal(signal.SIGTERM)
    assert (leader.end(), rank.end()) == (0, 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_that_dies_is_restarted_in_place_on_all_ranks(group, victim):
    both = [group(0), group(1)]
    wait_for(lambda: all(one.ready() and one.starts() for one in both), "ready")
    os.kill(both[victim].starts()[0], signal.SIGKILL)
    wait_for(lambda: all(len(one.starts()) == 2 and one.ready() for one in both), "ready again, all ranks anew")
    assert [one.process.poll() for one in both] == [None, None]
    assert both[0].status()["restarts"] == 1
    if victim:
        assert "rank 1 of 2, pod pod-1, lost its engine" in both[0].said()


def test_a_lost_leader_ends_the_run_of_the_others_which_follow_the_next_one(group):
    leader, rank = group(0), group(1)
    wait_for(lambda: leader.ready() and rank.ready() and rank.starts(), "ready")
    leader.process.kill()
    leader.process.wait()
    wait_for(lambda: not rank.ready() and not alive(rank.starts()[0]), "its engine is ended")
    follower = group(0)
    wait_for(lambda: follower.ready() and rank.ready() and len(rank.starts()) == 2, "both are ready")


def test_a_rank_that_must_go_lets_the_leader_drain_first(group):
    leader, rank = group(0), group(1)
    wait_for(lambda: leader.ready() and rank.ready() and rank.starts(), "ready")
    leader.steer("busy")
    rank.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "pod-1, must go" in leader.get("/readyz")[1], "the leader drains")
    assert alive(rank.starts()[0]), "a rank of a busy group stays"
    leader.steer("busy", on=False)
    assert rank.end() == 0
    second = group(1)
    wait_for(lambda: leader.ready() and second.ready(), "the group is whole again")


def test_a_group_that_stays_incomplete_says_who_is_missing(group):
    alone = group(0, startup_timeout=2.0)
    assert alone.end() == 1
    assert "rank 1 of 2 was not heard from yet" in alone.termination()


@pytest.fixture
def fetching(worker, tmp_path):
    """Start launchers whose model is on a hub, and give the hub too."""
    hub = Hub({"org/m": Repository({"config.json": b"{}", "model.safetensors": b"x" * 2000})})
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    yield lambda **config: worker(extra=home, **{"model_path": "org/m", **config}), hub
    hub.close()


def test_weights_are_fetched_before_the_engine_starts(fetching):
    start, hub = fetching
    hub.flows.clear()
    launcher = start()
    wait_for(lambda: launcher.get("/status")[0] and launcher.status().get("weights", {}).get("total"), "progress")
    assert launcher.get("/readyz")[0] == 503
    assert launcher.get("/healthz")[0] == 200
    assert launcher.status()["reason"].startswith("weights")
    assert not launcher.starts()
    hub.flows.set()
    wait_for(launcher.ready, "ready")
    weights = launcher.status()["weights"]
    assert weights == {"stage": "done", "bytes": 2002, "total": 2002, "commit": hub.repositories["org/m"].commit}
    assert "twinpool_worker_weights_total_bytes 2002" in launcher.get("/metrics")[1]
    (engine,) = launcher.starts()
    assert b"HF_HUB_OFFLINE" not in Path(f"/proc/{engine}/environ").read_bytes()


def test_an_engine_need_not_ask_a_hub_that_is_down(fetching):
    start, hub = fetching
    first = start()
    wait_for(first.ready, "ready")
    hub.refuses = 503
    second = start()
    wait_for(second.ready, "ready")
    (engine,) = second.starts()
    assert b"\0HF_HUB_OFFLINE=1\0" in Path(f"/proc/{engine}/environ").read_bytes()


def test_a_model_that_the_hub_does_not_have_is_named(fetching):
    start, _ = fetching
    launcher = start(model_path="org/other")
    assert launcher.end() == 1
    assert "WeightsError: org/other at main is not to be had from the hub" in launcher.termination()
    assert not launcher.starts()


def test_a_download_ends_with_its_pod(fetching):
    start, hub = fetching
    hub.flows.clear()
    launcher = start()
    (child,) = wait_for(launcher.children, "the process that fetches")
    launcher.process.terminate()
    assert launcher.end() == 0
    wait_for(lambda: not alive(child), "the process that fetches ends too")


def test_weights_have_the_startup_timeout(fetching):
    start, hub = fetching
    hub.flows.clear()
    launcher = start(startup_timeout=4.0)
    assert launcher.end() == 1
    assert "not within the startup timeout of 4 s" in launcher.termination()


def render(folder, **config):
    """Run ``twinpool-worker render`` with an interpreter that only says what it was asked for."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    settings = {"pool": "p", "namespace": "n", "role": "decode", "revision": "r", "engine": "vllm", "model": "m"}
    told = WorkerConfig(**{**settings, "model_path": str(folder), "python": str(python), **config})
    environment = {**os.environ, "POD_IP": "127.0.0.1", "TWINPOOL_WORKER": told.to_json()}
    environment["TWINPOOL_TERMINATION_LOG"] = str(folder / "termination")
    ran = subprocess.run(
        [sys.executable, "-m", "twinpool.worker", "render"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_a_renderer_takes_the_place_of_the_launcher(tmp_path):
    code, out, said = render(tmp_path)
    assert code == 0
    assert out.startswith(f"-m vllm.entrypoints.cli.main launch render {tmp_path} --served-model-name m ")
    assert "starting " in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"python": "/no/such/python"}, "set engine.python"), ({"model_path": "/no"}, "does not exist")],
)
def test_a_renderer_that_cannot_start_says_why(tmp_path, changes, words):
    code, _, said = render(tmp_path, **changes)
    assert code == 1
    assert words in said
    assert words in (tmp_path / "termination").read_text()
