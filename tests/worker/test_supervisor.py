"""The engine's life: every path by example, and what must hold whatever happens by property."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.logic import supervisor as sv
from twinpool.worker.logic.load import Work
from twinpool.worker.logic.supervisor import (
    Begin,
    CheckHealth,
    Exited,
    HealthSeen,
    LoadSeen,
    Look,
    ProbeEnded,
    Quit,
    ReadLoad,
    Seen,
    SendProbe,
    StartEngine,
    State,
    StopEngine,
    Terminate,
    Tick,
)

TIMING = sv.Timing(startup_timeout=100.0, drain_timeout=50.0)


def run(state, *steps):
    """Apply (event, time) pairs; return the last state and the last actions."""
    actions = ()
    for event, now in steps:
        state, actions = sv.step(state, event, now, TIMING)
    return state, actions


def ready(now=10.0):
    state, _ = run(State(), (Begin(), 0.0), (HealthSeen(1, True), now - 1), (ProbeEnded(1, True), now))
    assert state.ready
    return state


def test_a_start_asks_for_health_then_for_one_token():
    state, actions = run(State(), (Begin(), 0.0))
    assert actions == (StartEngine(1),)
    assert sv.next_wakeup(state) == sv.CHECK_INTERVAL
    state, actions = run(state, (Tick(), 0.5))
    assert actions == (CheckHealth(1),)
    assert sv.next_wakeup(state) == 100.0, "an answer is outstanding: only the deadline remains"
    state, actions = run(state, (HealthSeen(1, False), 0.6))
    assert (state.phase, actions) == ("starting", ())
    state, actions = run(state, (Tick(), 1.2), (HealthSeen(1, True), 20.0))
    assert (state.phase, actions) == ("probing", (SendProbe(1, 80.0),))
    state, actions = run(state, (ProbeEnded(1, False, "HTTP 503"), 21.0))
    assert (state.phase, state.ready, state.reason) == ("probing", False, "no probe token: HTTP 503")
    state, actions = run(state, (Tick(), 22.0))
    assert actions == (SendProbe(1, 78.0),)
    state, actions = run(state, (ProbeEnded(1, True), 25.0))
    assert (state.ready, state.start_seconds, actions) == (True, 25.0, ())
    state, actions = run(state, (Tick(), 30.0))
    assert (actions, sv.next_wakeup(state)) == ((Look(1),), None)


def test_begin_counts_once():
    state = ready()
    assert run(state, (Begin(), 11.0)) == (state, ())


def test_a_tick_before_its_time_changes_nothing():
    state, _ = run(State(), (Begin(), 0.0))
    assert run(state, (Tick(), 0.1)) == (state, ())


def test_an_engine_that_never_was_ready_ends_the_launcher_with_its_reason():
    state, _ = run(State(), (Begin(), 0.0))
    state, actions = run(state, (Exited(1, "model path missing"), 3.0))
    assert (state.phase, actions) == ("stopped", (Quit(1, "model path missing"),))


def test_startup_timeout_kills_and_says_what_it_waited_for():
    state, _ = run(State(), (Begin(), 0.0), (HealthSeen(1, True), 9.0), (ProbeEnded(1, False, "HTTP 500"), 10.0))
    state, actions = run(state, (Tick(), 100.0))
    assert actions == (StopEngine(force=True),)
    _, actions = run(state, (Exited(1, "killed by SIGKILL"), 100.1))
    assert actions == (
        Quit(1, "the engine was not ready within the startup timeout of 100 s: no probe token: HTTP 500"),
    )


def test_an_engine_that_survives_sigkill_does_not_hold_the_launcher():
    state, _ = run(State(), (Begin(), 0.0), (Tick(), 100.0))
    _, actions = run(state, (Tick(), 110.0))
    assert isinstance(actions[0], Quit)
    assert actions[0].code == 1


def test_an_engine_that_was_ready_is_restarted_in_place_with_growing_delays():
    state, now, delays = ready(), 20.0, []
    for epoch in range(1, 6):
        state, actions = run(state, (Exited(epoch, "crash"), now))
        assert (state.phase, state.ready, actions) == ("backoff", False, ())
        delays.append(state.deadline - now)
        now = state.deadline
        state, actions = run(state, (Tick(), now))
        assert actions == (StartEngine(epoch + 1),)
        assert "crash" in state.reason
        state, _ = run(state, (HealthSeen(epoch + 1, True), now), (ProbeEnded(epoch + 1, True), now))
        assert state.ready
    assert delays == [1, 2, 4, 8, 16]
    assert state.total_restarts == 5
    _, actions = run(state, (Exited(6, "crash"), now))
    assert actions == (Quit(1, "the engine ended 6 times within 10 minutes, the last time: crash"),)


def test_old_restarts_are_forgiven():
    state = dataclasses.replace(ready(), restarts=(0.0, 1.0, 2.0, 3.0, 4.0), total_restarts=5)
    state, _ = run(state, (Exited(1, "crash"), 700.0))
    assert (state.cause, state.losses) == ("Crashed", (("Crashed", 1),))
    assert (state.phase, state.restarts, state.deadline, state.total_restarts) == ("backoff", (700.0,), 701.0, 6)


def test_a_restart_that_hangs_is_killed_and_counted():
    state, _ = run(ready(), (Exited(1, "crash"), 20.0), (Tick(), 21.0), (Tick(), 121.0))
    assert (state.phase, state.forced) == ("stopping", True)
    state, actions = run(state, (Exited(2, "killed by SIGKILL"), 122.0))
    assert (state.phase, state.forced, state.total_restarts, actions) == ("backoff", False, 2, ())
    assert "startup timeout" in state.reason


def test_draining_waits_for_quiet_then_stops():
    state, actions = run(ready(), (Terminate(), 20.0))
    assert (state.phase, state.ready, state.reason, actions) == ("draining", False, "draining", ())
    state, actions = run(state, (Tick(), 20.0))
    assert actions == (ReadLoad(1),)
    state, actions = run(state, (LoadSeen(1, True), 20.1), (LoadSeen(1, None), 20.6), (LoadSeen(1, False), 21.0))
    assert (state.phase, state.idle_since) == ("draining", 21.0)
    state, _ = run(state, (LoadSeen(1, True), 22.0))
    assert state.idle_since is None, "a request came after all"
    state, actions = run(state, (LoadSeen(1, False), 23.0), (LoadSeen(1, False), 25.0))
    assert (state.phase, actions) == ("stopping", (StopEngine(force=False),))
    state, actions = run(state, (Exited(1, "SIGTERM"), 26.0))
    assert actions == (Quit(0, "drained: the engine is idle"),)
    assert run(state, (Exited(1, "again"), 27.0)) == (state, ())
    assert run(state, (Terminate(), 27.0)) == (state, ())


def test_draining_waits_for_kv_that_decode_has_not_pulled_but_no_longer_than_the_lease():
    state, _ = run(ready(), (Terminate(), 20.0), (LoadSeen(1, False, True), 20.0))
    state, actions = run(state, (LoadSeen(1, False, True), 49.9))
    assert (state.phase, actions) == ("draining", ())
    assert run(state, (LoadSeen(1, False, True), 50.0))[1] == (StopEngine(force=False),)
    assert run(state, (LoadSeen(1, False, False), 49.95))[1] == (StopEngine(force=False),)


def test_draining_ends_with_its_timeout_and_insists():
    state, _ = run(ready(), (Terminate(), 20.0), (Tick(), 20.0))
    state, actions = run(state, (Tick(), 70.0))
    assert (state.phase, actions) == ("stopping", (StopEngine(force=False),))
    assert "still running" in state.reason
    killed = 70.0 + sv.STOP_SECONDS
    state, actions = run(state, (Tick(), killed))
    assert actions == (StopEngine(force=True),)
    assert run(state, (Tick(), killed + sv.KILL_SECONDS))[1][0].code == 0
    assert run(state, (Exited(1, "SIGKILL"), killed))[1][0].code == 0


def test_an_engine_that_dies_while_draining_is_told():
    state, _ = run(ready(), (Terminate(), 20.0))
    assert run(state, (Exited(1, "crash"), 21.0))[1] == (Quit(1, "crash"),)


def busy(*marks, running=1.0):
    return Seen(1, True, (Work("0", running, marks),))


def test_a_stuck_engine_is_ended_and_started_again_with_its_cause():
    state, actions = run(ready(), (busy(5), 15.0), (busy(6), 60.0), (busy(6), 104.9))
    assert (state.ready, actions) == (True, ())
    state, actions = run(state, (busy(6), 105.0), (busy(6), 150.0))
    assert (state.phase, state.cause, actions) == ("stopping", "Stuck", (StopEngine(force=True),))
    state, actions = run(state, (Exited(1, "killed by SIGKILL"), 151.0))
    assert (state.phase, state.cause, state.losses, actions) == ("backoff", "Stuck", (("Stuck", 1),), ())
    assert "1 requests run and no counter has moved for 90 s" in state.reason
    state, _ = run(state, (Tick(), 152.0), (HealthSeen(2, True), 153.0), (ProbeEnded(2, True), 154.0))
    assert (state.ready, state.cause, state.losses) == (True, None, (("Stuck", 1),))


def test_an_idle_engine_is_asked_for_a_token_once_in_a_while():
    idle = busy(5, running=0.0)
    state, actions = run(ready(), (idle, 15.0))
    assert (sv.next_wakeup(state), actions) == (20.0, ())
    state, actions = run(state, (idle, 40.0))
    assert actions == (SendProbe(1, 180.0),)
    assert run(state, (idle, 45.0))[1] == (), "one probe at a time"
    state, _ = run(state, (ProbeEnded(1, True), 46.0))
    assert run(state, (idle, 75.0))[1] == ()
    assert run(state, (idle, 76.0))[1] == (SendProbe(1, 180.0),)


def test_an_engine_that_was_told_to_stop_by_somebody_else_is_stopped_in_order():
    state, actions = run(ready(), (ProbeEnded(1, False, "finish_reason 'abort'", aborted=True), 50.0))
    assert (state.phase, state.cause, actions) == ("stopping", "Aborting", (StopEngine(force=False),))
    state, _ = run(state, (Exited(1, "SIGTERM"), 51.0))
    assert (state.phase, state.losses) == ("backoff", (("Aborting", 1),))
    assert "unasked" in state.reason


@pytest.mark.parametrize(
    ("disk", "reason", "cause"),
    [
        ("", "OSError: [Errno 28] No space left on device", "DiskFull"),
        ("/tmp has 0.0 MiB left", "RuntimeError: cannot write", "DiskFull"),
        ("", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "DeviceLost"),
    ],
)
def test_what_a_new_process_cannot_mend_ends_the_container(disk, reason, cause):
    state, _ = run(ready(), (Seen(1, True, (), disk), 15.0))
    assert (disk in state.warnings) == bool(disk)
    state, actions = run(state, (Exited(1, reason), 16.0))
    assert (state.cause, state.losses) == (cause, ((cause, 1),))
    assert actions == (Quit(1, f"{reason} - a new process in this container would not help"),)
    assert not state.warnings


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (State(), "stopped"),
        (run(State(), (Begin(), 0.0))[0], "stopping"),
        (run(State(), (Begin(), 0.0), (HealthSeen(1, True), 1.0))[0], "stopping"),
        (run(ready(), (Exited(1, "crash"), 20.0))[0], "stopped"),
        (run(State(), (Begin(), 0.0), (Tick(), 100.0))[0], "stopping"),
    ],
)
def test_terminate_in_every_other_phase(state, phase):
    after, _ = run(state, (Terminate(), 101.0))
    assert (after.phase, after.terminating) == (phase, True)
    assert run(after, (Terminate(), 102.0)) == (after, ())
    if phase == "stopping":
        assert run(after, (Exited(1, "gone"), 103.0))[1][0].code == 0


def test_answers_about_an_earlier_start_are_ignored():
    state, _ = run(ready(), (Exited(1, "crash"), 20.0), (Tick(), 21.0))
    for late in (HealthSeen(1, True), ProbeEnded(1, True), LoadSeen(1, False), Exited(1, "crash")):
        assert run(state, (late, 22.0)) == (state, ())


def test_answers_that_do_not_fit_the_phase_are_ignored():
    state = ready()
    for late in (HealthSeen(1, True), LoadSeen(1, False)):
        assert run(state, (late, 22.0)) == (state, ())
    draining, _ = run(state, (Terminate(), 22.0))
    for late in (ProbeEnded(1, False), Seen(1, False)):
        assert run(draining, (late, 23.0)) == (draining, ())


events = st.one_of(
    st.just(Begin()),
    st.just(Tick()),
    st.just(Tick()),
    st.just(Terminate()),
    st.builds(HealthSeen, st.integers(0, 3), st.booleans()),
    st.builds(ProbeEnded, st.integers(0, 3), st.booleans(), st.just("why"), st.booleans(), st.booleans()),
    st.builds(
        Seen,
        st.integers(0, 3),
        st.sampled_from([True, False, None]),
        st.sampled_from([(), (Work("0", 0, (0,)),), (Work("0", 1, (1,)),), (Work("0", 1, (2,)),)]),
        st.sampled_from(["", "/tmp has 0.0 MiB left"]),
    ),
    st.builds(LoadSeen, st.integers(0, 3), st.sampled_from([True, False, None]), st.booleans()),
    st.builds(Exited, st.integers(0, 3), st.just("crash")),
)
pauses = st.sampled_from([0.0, 0.1, 0.5, 2.0, 20.0, 60.0, 120.0])


@given(st.lists(st.tuples(events, pauses), max_size=60))
def test_invariants_hold_for_any_events(script):
    state, now, quits = State(), 0.0, 0
    for event, pause in script:
        now += pause
        before = state
        state, actions = sv.step(state, event, now, TIMING)
        quits += sum(isinstance(action, Quit) for action in actions)
        starts = [action.epoch for action in actions if isinstance(action, StartEngine)]
        assert starts in ([], [before.epoch + 1]), "epochs are never reused"
        if state.ready and not before.ready:
            assert isinstance(event, ProbeEnded), "only a probe token of this start makes ready"
            assert event.epoch == state.epoch
        if before.ready and not state.ready:
            assert isinstance(event, Terminate | Exited | Seen | ProbeEnded), "time alone never makes unready"
            if isinstance(event, Seen | ProbeEnded):
                assert state.cause is not None
                assert state.reason
        if before.terminating:
            assert state.terminating
            assert not state.ready
            assert not starts
        if before.phase == "stopped":
            assert (state, actions) == (before, ())
        assert len(state.restarts) <= sv.RESTART_BUDGET
        assert state.ready == (state.phase == "ready")
        if state.phase not in ("new", "ready", "stopped"):
            assert state.deadline is not None, "every other phase ends by itself"
    assert quits <= 1


@given(st.lists(st.tuples(events, pauses), max_size=30))
def test_a_pod_that_must_go_always_goes(script):
    state, now = State(), 0.0
    for event, pause in script:
        now += pause
        state, _ = sv.step(state, event, now, TIMING)
    state, _ = sv.step(state, Terminate(), now, TIMING)
    limit = now + TIMING.startup_timeout + TIMING.drain_timeout + sv.STOP_SECONDS + sv.KILL_SECONDS
    while state.phase != "stopped":
        due = sv.next_wakeup(state)
        assert due is not None
        assert due <= limit
        now = max(now, due)
        state, _ = sv.step(state, Tick(), now, TIMING)
