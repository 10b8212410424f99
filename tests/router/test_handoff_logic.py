"""The handoff state machine: named paths, and properties over every order of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.router.logic import handoff
from twinpool.router.logic.handoff import CONTINUATIONS, DECODE_TRIES, PREFILL_LIMIT, USABLE_SECONDS, Do, Phase

if TYPE_CHECKING:
    from twinpool.core.protocol import OnPrefillFailure


class Shell:
    """Carries out actions on paper and checks every one of them."""

    def __init__(self, split: bool, policy: OnPrefillFailure = "retry-then-local") -> None:
        self.now = 100.0
        self.prefill_lives = True
        self.client = True
        #: None, prefill, connecting, sent or relaying.
        self.leg: str | None = None
        self.params: tuple[int, float] | None = None
        self.made = 0
        self.sent: list[int] = []
        self.outcomes: list[Do] = []
        self.released: list[bool] = []
        #: The client has a part of the answer; and the worker that wrote it was lost, but another may go on.
        self.relayed = self.resuming = False
        self.starts = {Do.START_PREFILL: 0, Do.START_DECODE: 0}
        self.state = handoff.State(Phase.DONE)
        self.policy = policy if split else None
        self.refused = False
        self.take(handoff.begin(split, policy))

    def take(self, step: handoff.Step) -> None:
        self.state, actions = step
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Do) -> None:
        if action in (Do.START_PREFILL, Do.START_DECODE):
            assert self.leg is None, "two legs at once"
            assert not self.relayed or self.resuming, "nothing is tried again once the answer has begun"
            assert self.client
            self.starts[action] += 1
            self.leg = "prefill" if action is Do.START_PREFILL else "connecting"
        elif action is Do.SEND_WITH_PARAMS:
            assert self.leg == "connecting"
            assert self.params is not None
            number, made = self.params
            assert number not in self.sent, "parameters are used once"
            assert self.now < made + handoff.KV_LEASE_SECONDS
            assert self.prefill_lives
            self.sent.append(number)
            self.params, self.leg = None, "sent"
        elif action is Do.SEND_WHOLE:
            assert self.leg == "connecting"
            assert self.params is None, "held KV is either used or given up first"
            assert self.policy != "fail" or self.refused, "the decode worker never reads a prompt in place of prefill"
            self.leg = "sent"
        elif action is Do.RELAY:
            assert self.leg == "sent"
            assert not self.relayed, "a head is sent once"
            self.leg, self.relayed = "relaying", True
        elif action is Do.RESUME:
            assert self.leg == "sent"
            assert self.resuming
            self.leg, self.resuming = "relaying", False
        elif action is Do.DROP_LEG:
            self.leg = None
        elif action is Do.RELEASE_LEG:
            assert not self.client
            self.released.append(True)
            self.leg = None
        elif action is Do.FORGET_PARAMS:
            self.params = None
        else:
            assert self.client, "nothing is said to a client that is gone"
            assert (action in (Do.FINISH, Do.BREAK)) == self.relayed
            assert self.leg is None or action is Do.ANSWER_AS_ENGINE
            self.outcomes.append(action)

    # Events.

    def prefill_answers(self) -> None:
        self.leg, self.made, self.prefill_lives = None, self.made + 1, True
        self.params = (self.made, self.now)
        self.take(handoff.prefill_answered(self.state, self.now))

    def prefill_fails(self) -> None:
        self.leg = None
        self.take(handoff.prefill_failed(self.state, "status"))

    def prefill_refuses(self) -> None:
        self.leg, self.refused = None, True
        self.take(handoff.prefill_refused(self.state))

    def no_prefill(self) -> None:
        self.leg = None
        self.starts[Do.START_PREFILL] -= 1
        self.take(handoff.no_prefill(self.state))

    def no_decode(self) -> None:
        self.leg = None
        self.take(handoff.no_decode(self.state))

    def decode_connects(self) -> None:
        self.take(handoff.decode_connected(self.state, self.now, self.prefill_lives))

    def decode_fails(self) -> None:
        self.leg = None
        self.take(handoff.decode_failed(self.state))

    def decode_begins(self, status: int, others: bool = True) -> None:
        self.take(handoff.decode_head(self.state, status, others))

    def decode_hides(self, status: int, others: bool = True) -> None:
        self.take(handoff.decode_hid_error(self.state, status, others))

    def decode_ends(self) -> None:
        self.leg = None
        self.take(handoff.decode_ended(self.state))

    def decode_dies(self, continuable: bool = False) -> None:
        self.leg, self.resuming, self.refused = None, continuable, False
        self.take(handoff.decode_died(self.state, continuable))

    def client_goes(self) -> None:
        self.client = False
        self.take(handoff.client_gone(self.state))

    def events(self) -> list[str]:
        events = {
            "prefill": ["prefill_answers", "prefill_fails", "prefill_refuses", "no_prefill"],
            "connecting": ["decode_connects", "decode_fails", "no_decode"],
            "sent": ["decode_begins", "decode_hides", "decode_fails"],
            "relaying": ["decode_ends", "decode_dies"],
            None: [],
        }[self.leg]
        return events + (["client_goes"] if self.client else [])

    def done(self) -> bool:
        return self.state.phase is Phase.DONE


@settings(max_examples=600, deadline=None)
@given(st.booleans(), st.sampled_from(["retry-then-local", "local", "fail"]), st.data())
def test_every_order_of_events_ends_well(split: bool, policy: OnPrefillFailure, data: st.DataObject) -> None:
    shell = Shell(split, policy)
    held_when_client_left: int | None = None
    for _ in range(40 * (CONTINUATIONS + 1)):
        if shell.done():
            break
        event = data.draw(st.sampled_from(shell.events()))
        shell.now += data.draw(st.sampled_from([0.0, 0.1, USABLE_SECONDS, 40.0]))
        shell.prefill_lives = shell.prefill_lives and data.draw(st.integers(0, 9)) > 0
        if event in ("decode_begins", "decode_hides"):
            statuses = [400, 429, 500, 502, 503] + [200] * (event == "decode_begins")
            getattr(shell, event)(data.draw(st.sampled_from(statuses)), data.draw(st.booleans()))
        elif event == "decode_dies":
            shell.starts = dict.fromkeys(shell.starts, 0)
            shell.decode_dies(data.draw(st.booleans()))
        elif event == "client_goes":
            held_when_client_left = shell.params[0] if shell.params else None
            shell.client_goes()
        else:
            getattr(shell, event)()
    assert shell.done(), "every path ends"
    assert shell.leg is None, "every leg is closed"
    assert shell.params is None or not shell.client
    assert len(shell.outcomes) == (1 if shell.client else 0), "exactly one outcome for a client that waits"
    assert shell.starts[Do.START_PREFILL] <= PREFILL_LIMIT
    assert shell.starts[Do.START_DECODE] <= DECODE_TRIES + PREFILL_LIMIT
    if held_when_client_left in shell.sent:
        assert shell.released, "KV that waits is released through decode"


def test_an_answer_goes_on_so_often_and_is_then_broken() -> None:
    shell = path()
    for number in range(CONTINUATIONS + 1):
        shell.prefill_answers()
        shell.decode_connects()
        shell.decode_begins(200)
        assert shell.state.continuations == number
        shell.decode_dies(continuable=True)
    assert (shell.outcomes, shell.sent) == ([Do.BREAK], [1, 2, 3, 4])


def test_an_answer_that_nobody_can_go_on_with_is_broken_and_gets_no_other_error() -> None:
    for policy, ends in (
        ("retry-then-local", [Shell.no_decode]),
        ("retry-then-local", [Shell.prefill_answers, lambda s: s.decode_connects(), lambda s: s.decode_begins(400)]),
        ("retry-then-local", [Shell.prefill_answers, lambda s: s.decode_connects(), lambda s: s.decode_hides(400)]),
        ("fail", [Shell.prefill_fails, Shell.no_prefill]),
    ):
        shell = Shell(policy == "fail" or len(ends) > 1, policy)  # type: ignore[arg-type]
        if shell.leg == "prefill":
            shell.prefill_answers()
        shell.decode_connects()
        shell.decode_begins(200)
        shell.decode_dies(continuable=True)
        for end in ends:
            end(shell)
        assert (shell.outcomes, shell.state.phase) == ([Do.BREAK], Phase.DONE)


def path(split: bool = True) -> Shell:
    return Shell(split)


def test_the_good_path() -> None:
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_begins(200)
    shell.decode_ends()
    assert (shell.outcomes, shell.sent) == ([Do.FINISH], [1])
    assert shell.state.handed_off


def test_a_failed_prefill_is_tried_once_more_and_then_done_by_decode() -> None:
    shell = path()
    shell.prefill_fails()
    assert shell.leg == "prefill"
    shell.prefill_fails()
    shell.decode_connects()
    assert (shell.leg, shell.sent, shell.state.reason) == ("sent", [], "status")


def test_without_another_prefill_worker_the_first_failure_is_the_reason() -> None:
    shell = path()
    shell.prefill_fails()
    shell.no_prefill()
    shell.decode_connects()
    assert shell.state.reason == "status"
    shell = path()
    shell.no_prefill()
    assert shell.state.reason == "no_prefill"


def test_a_request_that_prefill_refuses_is_decodes_to_judge() -> None:
    shell = path()
    shell.prefill_refuses()
    shell.decode_connects()
    shell.decode_begins(400)
    assert (shell.leg, shell.state.reason) == ("relaying", "refused")


def test_unsent_parameters_serve_another_decode_worker() -> None:
    shell = path()
    shell.prefill_answers()
    shell.decode_fails()
    shell.decode_connects()
    assert shell.sent == [1]


def test_sent_parameters_are_never_sent_again() -> None:
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_fails()
    assert shell.leg == "prefill"
    shell.prefill_answers()
    shell.decode_connects()
    assert shell.sent == [1, 2]
    shell.decode_fails()
    assert shell.outcomes == [Do.ANSWER_FAILED]


def test_an_expired_lease_means_prefill_again() -> None:
    shell = path()
    shell.prefill_answers()
    for _ in range(PREFILL_LIMIT - 1):
        shell.now += USABLE_SECONDS
        shell.decode_connects()
        assert shell.leg == "prefill"
        shell.prefill_answers()
    shell.now += USABLE_SECONDS
    shell.decode_connects()
    assert (shell.leg, shell.sent, shell.state.reason) == ("sent", [], "lease")


def test_parameters_die_with_their_prefill_worker() -> None:
    shell = path()
    shell.prefill_answers()
    shell.prefill_lives = False
    shell.decode_connects()
    assert (shell.leg, shell.state.reason) == ("prefill", "prefill_gone")


def test_a_500_to_a_handoff_is_tried_whole_and_to_a_whole_request_passed_on() -> None:
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_begins(500)
    shell.decode_connects()
    shell.decode_begins(500)
    assert (shell.leg, shell.state.reason) == ("relaying", "decode_error")


def test_a_503_goes_elsewhere_if_there_is_an_elsewhere() -> None:
    for others, leg in ((True, "connecting"), (False, "relaying")):
        shell = path(split=False)
        shell.decode_connects()
        shell.decode_begins(503, others)
        assert shell.leg == leg


def test_after_the_last_prefill_a_failed_handoff_is_served_whole() -> None:
    shell = path()
    shell.prefill_fails()
    shell.prefill_answers()
    shell.now += USABLE_SECONDS
    shell.decode_connects()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_fails()
    assert (shell.leg, shell.state.reason) == ("connecting", "decode_failed")


def test_a_third_prefill_that_fails_is_the_last() -> None:
    shell = path()
    shell.prefill_answers()
    shell.now += USABLE_SECONDS
    shell.decode_connects()
    shell.prefill_answers()
    shell.now += USABLE_SECONDS
    shell.decode_connects()
    shell.prefill_fails()
    assert shell.leg == "connecting"


def test_a_revision_that_lost_its_last_decode_worker_between_the_hops_fails_nobody() -> None:
    shell = path()
    shell.prefill_answers()
    shell.no_decode()
    assert (shell.leg, shell.params, shell.state.reason) == ("prefill", None, "revision_gone")
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_begins(200)
    assert shell.state.phase is Phase.RELAY


def test_a_revision_that_goes_again_and_again_leaves_the_request_to_one_worker() -> None:
    shell = path()
    for _ in range(PREFILL_LIMIT):
        assert shell.leg == "prefill"
        shell.prefill_answers()
        shell.no_decode()
    assert (shell.leg, shell.params, shell.state.reason) == ("connecting", None, "revision_gone")


def test_no_decode_worker() -> None:
    shell = path()
    shell.prefill_answers()
    shell.no_decode()
    shell.no_prefill()
    shell.no_decode()
    assert shell.outcomes == [Do.ANSWER_UNAVAILABLE]
    shell = path(split=False)
    shell.no_decode()
    assert shell.outcomes == [Do.ANSWER_UNAVAILABLE]


def test_a_client_that_leaves_between_the_hops_frees_the_kv_through_decode() -> None:
    shell = path()
    shell.prefill_answers()
    shell.client_goes()
    assert shell.state.phase is Phase.RELEASE
    shell.decode_connects()
    assert (shell.sent, shell.released) == ([1], [True])


def test_a_release_that_cannot_be_sent_leaves_the_kv_to_the_lease() -> None:
    for spoil in ("late", "fails", "none"):
        shell = path()
        shell.prefill_answers()
        shell.client_goes()
        if spoil == "late":
            shell.now += 60
            shell.decode_connects()
        elif spoil == "fails":
            shell.decode_fails()
        else:
            shell.no_decode()
        assert shell.done()
        assert (shell.sent, shell.params) == ([], None)


def test_a_client_that_leaves_elsewhere() -> None:
    shell = path()
    shell.client_goes()
    assert (shell.leg, shell.released) == (None, [])
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.client_goes()
    assert shell.released
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_begins(200)
    shell.client_goes()
    assert (shell.leg, shell.released) == (None, [])
    shell = path(split=False)
    shell.client_goes()
    assert shell.done()


def test_a_worker_that_dies_in_its_answer() -> None:
    shell = path(split=False)
    shell.decode_connects()
    shell.decode_begins(200)
    shell.decode_dies()
    assert shell.outcomes == [Do.BREAK]


def test_whole_requests_are_tried_twice() -> None:
    shell = path(split=False)
    shell.decode_fails()
    shell.decode_connects()
    shell.decode_fails()
    assert shell.outcomes == [Do.ANSWER_FAILED]


def test_a_hidden_error_is_tried_whole_and_then_shown() -> None:
    shell = path()
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_hides(500)
    shell.decode_connects()
    assert (shell.leg, shell.state.reason) == ("sent", "decode_error")
    shell.decode_hides(500)
    assert (shell.outcomes, shell.leg) == ([Do.ANSWER_AS_ENGINE], None)


def test_local_asks_no_second_prefill_worker() -> None:
    shell = Shell(True, "local")
    shell.prefill_fails()
    assert (shell.leg, shell.state.reason) == ("connecting", "status")


def test_fail_asks_a_second_prefill_worker_and_then_nobody() -> None:
    shell = Shell(True, "fail")
    shell.prefill_fails()
    shell.prefill_fails()
    assert (shell.outcomes, shell.state.reason) == ([Do.ANSWER_NO_PREFILL], "status")


def test_fail_shows_what_decode_says_of_its_kv() -> None:
    shell = Shell(True, "fail")
    shell.prefill_answers()
    shell.decode_connects()
    shell.decode_begins(500)
    assert shell.leg == "relaying"


def test_fail_ends_when_leases_run_out_again_and_again() -> None:
    shell = Shell(True, "fail")
    for _ in range(PREFILL_LIMIT):
        shell.prefill_answers()
        shell.now += USABLE_SECONDS
        shell.decode_connects()
    assert (shell.outcomes, shell.leg) == ([Do.ANSWER_NO_PREFILL], None)
