"""A group over several nodes: what its ranks say to each other, and that they live and die in runs."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.protocol import Leader
from twinpool.worker.logic import follower as fo
from twinpool.worker.logic import supervisor as sv
from twinpool.worker.logic.events import (
    Begin,
    Exited,
    HealthSeen,
    LoadSeen,
    ProbeEnded,
    Quit,
    RankHeard,
    StartEngine,
    StopEngine,
    Terminate,
    Tick,
    Timing,
)
from twinpool.worker.logic.follower import AskLeader, Ended, Heard, Silent, StartRank
from twinpool.worker.logic.ranks import SILENCE, Answer, Ranks, Report

TIMING = Timing(startup_timeout=100.0, drain_timeout=50.0, nodes=3)


def report(rank=1, run="i/1", state="waiting", reason=""):
    return Report("uid", rank, f"pod-{rank}", run, state, reason)


# What is said


def test_a_report_and_an_answer_survive_the_wire():
    said = report(reason="x" * 5000, state="failed")
    assert Report.from_json(said.to_json()) == dataclasses.replace(said, reason="x" * 2000)
    answer = Answer("i/3", "ready", True)
    assert Answer.from_json(answer.to_json()) == answer
    leader = Leader("10.0.0.1", "uid", 4)
    assert Leader.from_json(leader.to_json()) == leader


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"rank": 0}', report().to_json().replace("waiting", "odd")])
def test_other_words_are_no_report(text):
    assert Report.from_json(text) is None
    assert Answer.from_json(text) is None
    assert Leader.from_json(text) is None


def test_a_leader_is_no_follower():
    assert Report.from_json(report(rank=0).to_json()) is None


# The leader's side


def leader(*steps, state=None):
    state, actions = state or sv.State(instance="i"), ()
    for event, now in steps:
        state, actions = sv.step(state, event, now, TIMING)
    return state, actions


def heard(*args, **kwargs):
    return RankHeard(report(*args, **kwargs))


JOINED = ((Begin(), 0.0), (heard(1), 1.0), (heard(2), 1.0))


def serving():
    begun = (*JOINED, (heard(1, state="running"), 2.0), (heard(2, state="running"), 2.0))
    state, _ = leader(*begun, (HealthSeen(1, True), 3.0), (ProbeEnded(1, True), 4.0))
    assert state.ready
    return state


def test_a_run_begins_when_every_rank_waits_for_it():
    state, actions = leader((Begin(), 0.0))
    assert (state.phase, actions) == ("joining", ())
    assert "rank 1 of 3 was not heard from" in state.reason
    state, actions = leader((heard(1), 1.0), (heard(2, run=""), 1.0), state=state)
    assert (state.phase, actions) == ("joining", ())
    assert "rank 2 of 3, pod pod-2, is still waiting" in state.reason
    state, actions = leader((heard(2), 2.0), state=state)
    assert (state.phase, actions) == ("starting", (StartEngine(1),))


def test_an_engine_of_an_earlier_run_holds_the_next_one_back():
    state, _ = leader((Begin(), 0.0), (heard(1, run="old/4", state="running"), 1.0), (heard(2), 1.0))
    assert "pod pod-1, is still running" in state.reason
    state, _ = leader((heard(1, state="failed", reason="no such device"), 2.0), state=state)
    assert "rank 1 of 3, pod pod-1: no such device" in state.reason
    assert "last heard from 27 s ago" in leader((heard(1), 3.0), (Tick(), 30.0), state=state)[0].reason


def test_a_group_that_does_not_come_together_says_who_is_missing():
    state, _ = leader((Begin(), 0.0), (heard(1), 1.0), (Tick(), 2.0))
    _, actions = leader((Tick(), 100.0), state=state)
    (end,) = actions
    assert end.code == 1
    assert "100 s: waiting for rank 2 of 3 was not heard from" in end.reason


@pytest.mark.parametrize(
    ("event", "now", "words"),
    [
        (heard(2, state="failed", reason="CUDA error"), 5.0, "rank 2 of 3, pod pod-2, lost its engine: CUDA error"),
        (heard(2, state="waiting"), 5.0, "rank 2 of 3, pod pod-2, lost its engine: it started anew"),
        (heard(2, run=""), 5.0, "rank 2 of 3, pod pod-2, started anew"),
        (Tick(), 2.0 + SILENCE + 0.1, "rank 1 of 3, pod pod-1, was not heard from for 10 s"),
    ],
)
def test_a_lost_rank_ends_the_run_on_all(event, now, words):
    state, actions = leader((event, now), state=serving())
    assert (state.phase, actions) == ("stopping", (StopEngine(force=True),))
    state, _ = leader((Exited(1, "killed"), now + 1), state=state)
    assert state.phase == "backoff"
    assert words in state.reason
    state, actions = leader((Tick(), now + 2), state=state)
    assert (state.phase, state.run, actions) == ("joining", "i/2", ())
    assert leader((heard(1, run="i/2"), now + 3), (heard(2, run="i/2"), now + 3), state=state)[1] == (StartEngine(2),)


def test_a_rank_that_fails_before_the_group_served_ends_the_launcher_with_its_reason():
    state, _ = leader(*JOINED, (heard(1, state="failed", reason="no such weights"), 2.0))
    _, actions = leader((Exited(1, "killed"), 3.0), state=state)
    assert actions == (Quit(1, "rank 1 of 3, pod pod-1, lost its engine: no such weights"),)


def test_a_rank_that_must_go_makes_the_leader_drain_and_begin_anew():
    state, actions = leader((heard(1, state="leaving"), 5.0), state=serving())
    assert (state.phase, state.ready, actions) == ("draining", False, ())
    assert "rank 1 of 3, pod pod-1, must go" in state.reason
    again, _ = leader((heard(1, state="leaving"), 6.0), state=state)
    assert (again.phase, again.deadline) == ("draining", 55.0)
    state, actions = leader((LoadSeen(1, False), 7.0), (LoadSeen(1, False), 10.0), state=state)
    assert actions == (StopEngine(force=False),)
    state, _ = leader((Exited(1, "SIGTERM"), 11.0), (Tick(), 12.0), state=state)
    assert state.phase == "joining"


def test_a_rank_that_must_go_during_the_start_ends_it():
    assert leader(*JOINED, (heard(1, state="leaving"), 2.0))[1] == (StopEngine(force=True),)


def test_the_leaders_own_end_prolongs_a_drain_for_a_rank():
    state, _ = leader((heard(1, state="leaving"), 5.0), (Terminate(), 20.0), state=serving())
    assert (state.phase, state.terminating, state.deadline) == ("draining", True, 70.0)


def test_a_leader_that_must_go_while_joining_goes():
    assert leader((Begin(), 0.0), (Terminate(), 1.0))[1] == (Quit(0, "the pod must go and no engine runs"),)


def test_reports_that_do_not_matter_change_nothing():
    state, actions = leader((heard(7, state="failed"), 5.0), (heard(8, state="leaving"), 5.0), state=serving())
    assert (state.phase, actions) == ("ready", ())
    assert state.next_rank_check == 5.0 + sv.CHECK_INTERVAL
    state, _ = leader((Exited(1, "crash"), 6.0), (heard(1), 6.5), state=state)
    assert (state.phase, state.next_rank_check) == ("backoff", None)


def test_ticks_look_at_the_ranks_and_at_the_engine():
    state, _ = leader(*JOINED)
    due = sv.next_wakeup(state)
    state, first = leader((Tick(), due), state=state)
    _, second = leader((Tick(), due), state=state)
    assert [type(action).__name__ for action in (*first, *second)] == ["CheckHealth"]


def test_the_last_report_of_a_rank_counts():
    ranks = Ranks().heard(report(1, state="running"), 1.0).heard(report(1, state="running"), 2.0)
    assert len(ranks.last) == 1
    assert ranks.of(2) is None


# The other ranks' side


def rank(*steps, state=None):
    state, actions = state or fo.State(), ()
    for event, now in steps:
        state, actions = fo.step(state, event, now, TIMING)
    return state, actions


def says(phase="starting", run="i/1", ready=False):
    return Heard("10.0.0.1", Answer(run, phase, ready))


def running():
    state, actions = rank((Begin(), 0.0), (says("joining"), 1.0), (says("starting"), 2.0))
    assert actions == (StartRank("10.0.0.1"),)
    return state


def follows():
    state, _ = rank((says("ready", ready=True), 5.0), state=running())
    assert state.ready
    return state


def test_a_rank_asks_joins_starts_and_is_ready_with_its_leader():
    state, actions = rank((Begin(), 0.0))
    assert (state.phase, actions, fo.next_wakeup(state)) == ("joining", (), 0.0)
    state, actions = rank((Tick(), 0.0), state=state)
    assert actions == (AskLeader("", "waiting", ""),)
    assert fo.next_wakeup(state) == 100.0
    state, actions = rank((says("joining"), 1.0), (Tick(), 1.0), state=state)
    assert actions == (AskLeader("i/1", "waiting", ""),)
    state, actions = rank((says("joining"), 1.5), state=state)
    assert actions == (), "the leader waits for others"
    state, actions = rank((says("starting"), 2.0), (Tick(), 2.0), state=state)
    assert actions == (AskLeader("i/1", "running", ""),)
    assert "not ready" in state.reason
    state, _ = rank((says("probing"), 3.0), state=state)
    assert state.phase == "starting"
    state, _ = rank((says("ready", ready=True), 4.0), state=state)
    assert (state.ready, state.start_seconds, state.total_restarts) == (True, 2.0, 0)
    assert rank((says("ready", ready=True), 9.0), state=state)[0].start_seconds == 2.0
    assert rank((says("draining"), 9.0), state=state)[0].phase == "starting", "a leader that drains is not ready"


@pytest.mark.parametrize("answer", [says("joining", "i/2"), says("joining", "j/1"), says("backoff")])
def test_a_new_run_ends_the_engine_of_the_old_one_first(answer):
    state, actions = rank((answer, 6.0), state=follows())
    assert (state.phase, actions) == ("stopping", (StopEngine(force=True),))
    assert rank((answer, 6.1), (Silent("x"), 6.2), (Tick(), 6.3), state=state) == (state, ())
    state, _ = rank((Ended("killed"), 7.0), state=state)
    assert (state.phase, state.failed) == ("joining", False)
    state, actions = rank((says("joining", "i/2"), 8.0), (says("starting", "i/2"), 9.0), state=state)
    assert (state.total_restarts, actions) == (1, (StartRank("10.0.0.1"),))


def test_a_lost_engine_is_reported_until_the_leader_begins_anew():
    state, actions = rank((Ended("CUDA error"), 6.0), (Tick(), 6.0), state=follows())
    assert actions == (AskLeader("i/1", "failed", "CUDA error"),)
    state, actions = rank((says("ready", ready=True), 6.1), (Silent("x"), 6.2), state=state)
    assert (state.phase, state.reason, actions) == ("joining", "CUDA error", ())
    state, _ = rank((says("joining", "i/2"), 7.0), state=state)
    assert (state.failed, state.run) == (False, "i/2")


def test_a_silent_leader_ends_the_run_after_a_while():
    state, actions = rank((Silent("refused"), 5.0 + SILENCE), state=follows())
    assert (state.phase, actions) == ("ready", ())
    state, actions = rank((Silent("refused"), 5.1 + SILENCE), state=state)
    assert actions == (StopEngine(force=True),)
    assert "refused" in state.reason


def test_a_rank_whose_leader_never_comes_ends_with_a_name():
    state, _ = rank((Begin(), 0.0), (Silent("nobody has named the leader"), 1.0))
    (end,) = rank((Tick(), 100.0), state=state)[1]
    assert end.code == 1
    assert end.reason.endswith("startup timeout: nobody has named the leader")


def test_a_rank_that_must_go_waits_for_the_leader_to_drain():
    state, _ = rank((Tick(), 5.5), (says("ready", ready=True), 5.6), (Terminate(), 6.0), state=follows())
    assert (state.phase, state.deadline) == ("draining", 56.0)
    assert rank((Terminate(), 7.0), state=state) == (state, ())
    state, actions = rank((Tick(), 7.0), state=state)
    assert actions == (AskLeader("i/1", "leaving", ""),)
    state, actions = rank((says("draining"), 8.0), state=state)
    assert (state.phase, actions) == ("draining", ())
    state, actions = rank((says("stopping"), 9.0), state=state)
    assert actions == (StopEngine(force=False),)
    assert rank((Ended("SIGTERM"), 10.0), state=state)[1][0].code == 0


def test_a_rank_that_must_go_does_not_wait_for_a_leader_that_is_gone():
    state, _ = rank((Terminate(), 6.0), (Silent("refused"), 7.0), state=follows())
    assert state.phase == "draining"
    assert rank((Silent("refused"), 9.0), state=state)[1] == (StopEngine(force=False),)


def test_the_drain_timeout_holds_for_every_rank():
    state, actions = rank((Terminate(), 6.0), (Tick(), 56.0), state=follows())
    assert actions == (StopEngine(force=False),)
    state, actions = rank((Tick(), 66.0), state=state)
    assert actions == (StopEngine(force=True),)
    assert rank((Tick(), 70.0), state=state)[1][0].code == 0


def test_an_engine_that_survives_sigkill_does_not_hold_the_rank():
    state, _ = rank((says("joining", "i/2"), 6.0), state=follows())
    assert rank((Tick(), 10.0), state=state)[1][0].code == 1


def test_a_rank_without_engine_goes_at_once():
    assert rank((Begin(), 0.0), (Terminate(), 1.0))[1][0].code == 0
    assert rank((says("joining", "i/2"), 6.0), (Terminate(), 6.1), state=follows())[0].terminating
    stopped, _ = rank((Begin(), 0.0), (Terminate(), 1.0))
    assert rank((says(), 2.0), (Tick(), 3.0), state=stopped) == (stopped, ())


def test_a_rank_names_why_it_lost_its_engine():
    assert (follows().cause, follows().losses, follows().warnings) == (None, (), ())
    assert (follows().recent_restarts, follows().backoff) == (0, 0.0), "both are the leader's"
    state, _ = rank((Ended("OSError: [Errno 28] No space left on device"), 6.0), state=follows())
    assert state.cause == "DiskFull"


def test_begin_counts_once():
    assert rank((Begin(), 6.0), state=follows()) == (follows(), ())


EVENTS = st.one_of(
    st.just(Begin()),
    st.just(Tick()),
    st.just(Terminate()),
    st.builds(Silent, st.just("why")),
    st.builds(Ended, st.just("crash")),
    st.builds(says, st.sampled_from(sv.PHASES), st.sampled_from(["i/1", "i/2"]), st.booleans()),
)
PAUSES = st.sampled_from([0.0, 0.5, 2.0, 20.0, 120.0])


@given(st.lists(st.tuples(EVENTS, PAUSES), max_size=60))
def test_a_rank_never_has_two_engines_and_always_goes(script):
    state, now, engine = fo.State(), 0.0, False
    for event, pause in script:
        if isinstance(event, Ended):
            if not engine:
                continue
            engine = False
        now += pause
        before = state
        state, actions = fo.step(state, event, now, TIMING)
        if any(isinstance(action, StartRank) for action in actions):
            assert not engine
            assert not state.terminating
            engine = True
        assert state.running == engine or state.phase == "stopped"
        assert state.ready == (state.phase == "ready")
        if state.ready:
            assert engine
        if before.phase == "stopped":
            assert (state, actions) == (before, ())
    state, _ = fo.step(state, Terminate(), now, TIMING)
    for _ in range(200):
        if state.phase == "stopped":
            return
        due = fo.next_wakeup(state)
        assert due is not None or state.next_check is None
        now = max(now, due) if due is not None else now + 1
        state, actions = fo.step(state, Tick(), now, TIMING)
        if any(isinstance(action, AskLeader) for action in actions):
            state, _ = fo.step(state, Silent("gone"), now, TIMING)
    raise AssertionError(state)


LEADER_EVENTS = st.one_of(
    st.just(Begin()),
    st.just(Tick()),
    st.just(Terminate()),
    st.builds(HealthSeen, st.integers(1, 3), st.booleans()),
    st.builds(ProbeEnded, st.integers(1, 3), st.booleans()),
    st.builds(LoadSeen, st.integers(1, 3), st.sampled_from([True, False, None])),
    st.builds(Exited, st.integers(1, 3), st.just("crash")),
    st.builds(
        heard,
        st.integers(1, 3),
        st.sampled_from(["", "i/1", "i/2"]),
        st.sampled_from(["waiting", "running", "failed", "leaving"]),
    ),
)


@given(st.lists(st.tuples(LEADER_EVENTS, PAUSES), max_size=60))
def test_no_run_begins_without_every_rank(script):
    state, now = sv.State(instance="i"), 0.0
    for event, pause in script:
        now += pause
        before = state
        state, actions = sv.step(state, event, now, TIMING)
        for action in actions:
            if isinstance(action, StartEngine):
                assert not state.ranks.absent(state.run, TIMING.nodes, now)
                assert before.phase in ("new", "joining", "backoff")
        if before.terminating:
            assert not state.ready
        assert state.ready == (state.phase == "ready")
        if state.phase not in ("new", "ready", "stopped"):
            assert state.deadline is not None
