"""The engine's state machine: nothing leaks, every order ends once, and a pair answers like a single instance."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core.blockhash import chain
from twinpool.core.timing import Accelerator
from twinpool.worker.engines.simulated.logic import language
from twinpool.worker.engines.simulated.logic.blocks import Stored
from twinpool.worker.engines.simulated.logic.drafting import Drafting
from twinpool.worker.engines.simulated.logic.engine import Engine, Limits
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.sequence import Discard, Failed, Order, Pull, RemoteKv, Token
from twinpool.worker.engines.simulated.shell.publisher import event_map

PACE = Pace()
SMALL = Limits(block_size=4, kv_blocks=16, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=12, lease_seconds=5)
prompts = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(tuple)


def run(engine, now=0.0, steps=10_000):
    """Step until nothing more can be done; return the events and the time."""
    events = []
    for _ in range(steps):
        step, begun = engine.begin(now)
        events += begun
        if step is None:
            return events, now
        now += step.seconds
        events += engine.end(now)
    raise AssertionError("the engine never came to rest")


def answer(engine, order, now=0.0):
    engine.submit(order, now)
    events, _ = run(engine, now)
    return [event.token for event in events if isinstance(event, Token) and event.id == order.id]


def remote(request_id="p", cached=0):
    return RemoteKv("engine", request_id, "127.0.0.1", 5600, cached)


def pair(prompt, max_tokens, *, told=None, **options):
    """Answer over a prefill and a decode engine; ``told`` is the prompt that decode is told instead."""
    prefill, decode = Engine(SMALL, PACE), Engine(SMALL, PACE)
    prefill.submit(Order("p", prompt, 1, ignore_eos=True, hand_over=True), 0.0)
    (token,), now = run(prefill)
    assert token.handover is not None
    assert token.handover.tokens == len(prompt)
    decode.submit(Order("d", told or prompt, max_tokens, remote=remote(), **options), now)
    (pull,), _ = run(decode, now)
    assert isinstance(pull, Pull)
    decode.pulled("d", prefill.leases.get("p").content, 0.1)
    assert prefill.release("p")
    events, _ = run(decode, now)
    return prefill, decode, [event.token for event in events]


@given(prompt=prompts, max_tokens=st.integers(1, 20))
def test_a_pair_answers_exactly_like_a_single_instance(prompt, max_tokens):
    single = answer(Engine(SMALL, PACE), Order("s", prompt, max_tokens))
    prefill, decode, tokens = pair(prompt, max_tokens)
    assert tokens == single
    assert prefill.blocks.free == decode.blocks.free == SMALL.kv_blocks
    assert decode.metrics.value("prompt_tokens_by_source", "external_kv_transfer") == len(prompt)
    assert decode.metrics.value("prompt_tokens_by_source", "local_compute") == 0
    # The proof that nothing was computed again: one token per step, the last prompt token among them.
    assert decode.metrics.value("iteration_tokens_total") == len(tokens)


@given(right=prompts, wrong=prompts)
def test_decode_with_the_kv_of_another_prompt_answers_that_prompt(right, wrong):
    options = {"ignore_eos": True}
    _, _, tokens = pair(wrong, 20, told=right, **options)
    assert tokens == answer(Engine(SMALL, PACE), Order("s", wrong, 20, **options))
    if right != wrong:
        assert tokens != answer(Engine(SMALL, PACE), Order("s", right, 20, **options))


@given(prompt=prompts, cut=st.integers(0, 19))
def test_an_answer_goes_on_where_it_was_cut(prompt, cut):
    whole = answer(Engine(SMALL, PACE), Order("s", prompt, 20))
    rest = whole[cut:]
    if rest:
        assert answer(Engine(SMALL, PACE), Order("s", (*prompt, *whole[:cut]), 20 - cut)) == rest


@given(prompt=prompts, repeat=st.integers(2, 4))
def test_a_cached_prompt_gives_the_same_answer_and_computes_less(prompt, repeat):
    engine = Engine(SMALL, PACE)
    answers = [answer(engine, Order(str(n), prompt, 8)) for n in range(repeat)]
    assert answers == [answers[0]] * repeat
    reused = (len(prompt) - 1) // SMALL.block_size * SMALL.block_size
    assert engine.metrics.value("prompt_tokens_by_source", "local_cache_hit") == reused * (repeat - 1)


@given(prompt=prompts, salt=st.none() | st.text(max_size=3))
def test_an_adapters_kv_is_its_own_and_told_with_its_name(prompt, salt):
    engine = Engine(SMALL, PACE)
    adapters = (None, ("sql", "org/sql"), ("sql", "elsewhere/sql"))
    answers = [answer(engine, Order(str(n), prompt, 1, salt=salt, adapter=one)) for n, one in enumerate(adapters)]
    assert answers == [answers[0]] * 3
    assert engine.metrics.value("prefix_cache_hits") == 0
    stored = [event for event in engine.blocks.events if isinstance(event, Stored)]
    blocks = len(prompt) // SMALL.block_size
    assert [event.adapter for event in stored] == (list(adapters) if blocks else [])
    for event in stored:
        told = event_map(event, SMALL.block_size)
        assert told["block_hashes"] == chain(prompt, SMALL.block_size, 99, salt, event.adapter)
        assert (told["lora_name"], bool(told["lora_id"])) == (("sql", True) if event.adapter else (None, False))
        keys = [*(event.adapter or ())]
        first = [*keys, *([] if salt is None else [salt])]
        assert told["extra_keys"] == [first or None, *[keys or None] * (blocks - 1)]


@given(prompt=prompts)
def test_a_salt_keeps_caches_apart_but_not_answers(prompt):
    engine = Engine(SMALL, PACE)
    assert answer(engine, Order("a", prompt, 8)) == answer(engine, Order("b", prompt, 8, salt="s"))
    assert engine.metrics.value("prefix_cache_hits") == 0


def speculating(acceptance=0.6, tokens=3, limits=SMALL, **options):
    return Engine(limits, PACE, Drafting(tokens, acceptance=acceptance, **options))


def steps_of(engine, order):
    """Return the answer and the number of steps that it took."""
    engine.submit(order, 0.0)
    tokens, steps = [], 0
    while engine.unfinished:
        step, events = engine.begin(0.0)
        steps += step is not None
        events += engine.end(0.0)
        tokens += [event.token for event in events if isinstance(event, Token)]
    return tokens, steps


@given(prompt=prompts, max_tokens=st.integers(1, 24), acceptance=st.floats(0, 1), tokens=st.integers(1, 6))
def test_drafts_change_when_tokens_come_and_never_which(prompt, max_tokens, acceptance, tokens):
    order = Order("s", prompt, max_tokens)
    engine = speculating(acceptance, tokens)
    got, steps = steps_of(engine, order)
    plain, one_by_one = steps_of(Engine(SMALL, PACE), order)
    assert got == plain
    assert steps <= one_by_one
    assert engine.blocks.free == SMALL.kv_blocks
    assert engine.metrics.value("generation_tokens") == len(plain)


def test_right_drafts_save_steps_and_are_counted_by_position():
    order = Order("s", (1, 2, 3), 17, ignore_eos=True)
    engine = speculating(acceptance=1.0, tokens=3)
    got, steps = steps_of(engine, order)
    # The prompt gives one token; then each step gives the next one and three drafts.
    assert (len(got), steps) == (17, 1 + 4)
    assert engine.metrics.value("spec_decode_num_drafts") == 4
    assert engine.metrics.value("spec_decode_num_draft_tokens") == 12
    assert engine.metrics.value("spec_decode_num_accepted_tokens") == 12
    assert [engine.metrics.value("spec_decode_num_accepted_tokens_per_pos", str(n)) for n in range(3)] == [4, 4, 4]
    assert engine.metrics.value("iteration_tokens_total") == 3 + 16
    never = speculating(acceptance=0.0)
    assert steps_of(never, order)[1] == 17
    assert never.metrics.value("spec_decode_num_accepted_tokens") == 0


def test_acceptance_is_about_what_was_asked_for():
    wide = Limits(block_size=16, kv_blocks=4096, max_model_len=4096)
    engine = speculating(acceptance=0.6, tokens=2, limits=wide)
    steps_of(engine, Order("s", (1, 2, 3), 3000, ignore_eos=True))
    drafts = engine.metrics.value("spec_decode_num_drafts")
    first, second = (engine.metrics.value("spec_decode_num_accepted_tokens_per_pos", str(n)) / drafts for n in (0, 1))
    assert abs(first - 0.6) < 0.05
    assert abs(second - 0.36) < 0.05


def test_drafts_give_way_where_blocks_or_the_schedule_leave_no_room():
    tight = Limits(block_size=4, kv_blocks=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=16)
    both = [Order(name, (1, 2, 3), 5, ignore_eos=True) for name in "ab"]
    engine = speculating(1.0, 6, tight)
    for order in both:
        engine.submit(order, 0.0)
    events, _ = run(engine)
    assert sum(isinstance(event, Token) for event in events) == 10
    assert engine.metrics.value("num_preemptions") == 0
    off = speculating(1.0, 4, schedule=((1, 8, 0),))
    assert steps_of(off, both[0])[1] == 5
    assert off.metrics.value("spec_decode_num_drafts") == 0


def test_drafts_cost_time():
    chunks = [(3, 100)] * 8
    assert PACE.drafts([], 0.5) == 0
    assert PACE.drafts(chunks, 0.0) >= 0
    step = PACE.step((1, 100) for _ in chunks)
    assert abs(PACE.drafts(chunks, 0.1) - PACE.drafts(chunks, 0.0) - 0.3 * step) < 1e-9
    assert Pace(token_seconds=1.0).drafts(chunks, 0.1) == 3 * 0.1
    many = [(3, 100)] * 4096
    assert PACE.drafts(many, 0.0) > PACE.step((1, 100) for _ in many), "a step that computes pays for every draft"
    engine = speculating(1.0, 3)
    engine.submit(Order("s", (1, 2, 3), 9, ignore_eos=True), 0.0)
    engine.begin(0.0)
    engine.end(0.0)
    assert engine.begin(0.0)[0].seconds >= PACE.step([(1, 3)])


orders = st.lists(
    st.tuples(prompts, st.integers(1, 24), st.booleans(), st.sampled_from(["none", "pull", "fail", "abort"])),
    min_size=1,
    max_size=8,
)


class World:
    """An engine with clients that may leave and prefill workers that may fail, driven by drawn choices."""

    def __init__(self, orders, draw):
        drafting = draw(st.sampled_from([None, Drafting(3, acceptance=0.7)]))
        self.engine, self.now, self.orders, self.draw = Engine(SMALL, PACE, drafting), 0.0, orders, draw
        self.ended, self.aborted, self.pulls = [], set(), []
        for index, (prompt, max_tokens, hand_over, kv) in enumerate(orders):
            source = None if kv == "none" else remote(str(index))
            self.engine.submit(Order(str(index), prompt, max_tokens, hand_over=hand_over, remote=source), 0.0)

    def take(self, events):
        for event in events:
            if isinstance(event, Pull):
                self.pulls.append(event)
            elif isinstance(event, Failed) or (isinstance(event, Token) and event.finish is not None):
                self.ended.append(event.id)

    def leave(self, order_id):
        if order_id not in self.ended and order_id not in self.aborted:
            self.aborted.add(order_id)
            self.take(self.engine.abort(order_id))

    def end_a_pull(self):
        pull = self.pulls.pop()
        prompt, _, _, kv = self.orders[int(pull.id)]
        if kv == "pull":
            self.engine.pulled(pull.id, language.Content.of(prompt), 0.01)
        elif kv == "fail":
            self.take(self.engine.pull_failed(pull.id, "gone"))
        elif pull.id not in self.aborted:
            self.aborted.add(pull.id)
            assert self.engine.abort(pull.id) == [Discard(pull.id, pull.remote)]

    def step(self):
        step, events = self.engine.begin(self.now)
        self.take(events)
        if self.draw(st.integers(0, 9)) == 0:
            self.leave(str(self.draw(st.integers(0, len(self.orders) - 1))))
        if self.pulls and self.draw(st.booleans()):
            self.end_a_pull()
        # When nothing runs, time goes on until a lease is over.
        self.now += step.seconds if step else 1.0
        self.take(self.engine.end(self.now))
        self.engine.expire(self.now)
        held = SMALL.kv_blocks - self.engine.blocks.free
        assert self.engine.metrics.value("kv_cache_usage_perc") == held / SMALL.kv_blocks


@settings(max_examples=150, deadline=None)
@given(orders=orders, data=st.data())
def test_blocks_never_leak_and_every_order_ends_once(orders, data):
    world = World(orders, data.draw)
    for _ in range(2000):
        if not world.engine.unfinished:
            break
        world.step()
    assert sorted(world.ended) == sorted({str(index) for index in range(len(orders))} - world.aborted)
    world.engine.expire(world.now + 100)
    assert world.engine.blocks.free == SMALL.kv_blocks
    assert world.engine.metrics.value("num_requests_running") == 0
    assert world.engine.metrics.value("num_requests_waiting") == 0


def test_the_demonstrations_question_gets_its_answer_also_over_a_pair():
    prompt = tuple(language.encode("What is the capital of France?"))
    _, _, tokens = pair(prompt, 20)
    assert language.decode(tokens).startswith(" Paris.")


def test_who_came_last_is_preempted_and_still_answers_the_same():
    limits = Limits(block_size=4, kv_blocks=8, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=64)
    engine = Engine(limits, PACE)
    wanted = {}
    for index in range(3):
        prompt = (index, 9, 9, 9, 9, 9)
        wanted[str(index)] = answer(Engine(limits, PACE), Order("x", prompt, 20, ignore_eos=True))
        engine.submit(Order(str(index), prompt, 20, ignore_eos=True), 0.0)
    events, _ = run(engine)
    got = {name: [e.token for e in events if e.id == name] for name in wanted}
    assert got == wanted
    assert engine.metrics.value("num_preemptions") > 0


def test_a_lease_ends_by_time_and_what_comes_later_is_counted():
    engine = Engine(SMALL, PACE)
    engine.submit(Order("p", (1, 2, 3), 1, ignore_eos=True, hand_over=True), 0.0)
    _, now = run(engine)
    assert engine.expire(now + 4) == 0
    assert engine.leases.extend("p", now + 4)
    assert engine.expire(now + 8) == 0
    assert engine.leases.next_expiry() == now + 9
    assert engine.expire(now + 9) == 1
    assert not engine.leases.extend("p", now + 9)
    assert not engine.release("p")
    assert engine.metrics.value("nixl_num_kv_expired_reqs") == 1
    assert engine.metrics.value("nixl_num_notifications_after_expiry") == 1


def test_an_answer_that_ends_by_itself_is_not_handed_over():
    prompt = tuple(language.encode(" The engine."))
    stop = answer(Engine(SMALL, PACE), Order("s", prompt, 1, ignore_eos=True))[0]
    engine = Engine(SMALL, PACE)
    engine.submit(Order("p", prompt, 4, stop_token_ids=frozenset({stop}), hand_over=True), 0.0)
    (token,), _ = run(engine)
    assert (token.finish, token.handover, len(engine.leases)) == ("stop", None, 0)


def test_a_hand_over_after_several_tokens_still_holds_the_prompt_alone():
    engine = Engine(SMALL, PACE)
    engine.submit(Order("p", (1, 2, 3, 4, 5), 6, ignore_eos=True, hand_over=True), 0.0)
    events, _ = run(engine)
    assert events[-1].handover.tokens == 5
    assert len(events[-1].handover.blocks) == 2
    assert engine.leases.get("p").content == language.Content.of((1, 2, 3, 4, 5))


def test_unknown_ids_are_ignored():
    engine = Engine(SMALL, PACE)
    assert engine.abort("x") == []
    assert engine.pull_failed("x", "gone") == []
    engine.pulled("x", language.Content.of((1,)), 0.0)
    assert len(engine.leases) == 0


def test_who_leaves_before_its_turn_needs_nothing():
    engine = Engine(SMALL, PACE)
    engine.submit(Order("a", (1, 2), 4), 0.0)
    assert engine.abort("a") == []
    assert engine.begin(0.0) == (None, [])


def test_orders_that_wait_for_kv_are_known_for_their_heartbeat():
    engine = Engine(SMALL, PACE)
    engine.submit(Order("d", (1, 2), 1, remote=remote()), 0.0)
    assert [sequence.remote for sequence in engine.awaiting_pull()] == [remote()]


def test_an_aborted_sequence_of_a_begun_step_gives_no_token():
    engine = Engine(SMALL, PACE)
    engine.submit(Order("a", (1, 2), 4), 0.0)
    engine.begin(0.0)
    assert engine.abort("a") == []
    assert engine.end(0.1) == []


def test_a_pull_takes_longer_for_more_blocks():
    assert 0 < Pace().transfer(1, 16) < Pace().transfer(2, 16)


def test_fixed_speeds_replace_the_roofline():
    slow = Pace(gpu=Accelerator("slow", 1.0, 1.0), prefill_rate=100.0, token_seconds=0.5)
    assert slow.step([(50, 0), (1, 10), (1, 20)]) == 1.0
    assert Pace(prefill_rate=100.0).step([(50, 0), (1, 10)]) > 0.5
    assert Pace().step([(1, 10)]) < Pace(token_seconds=1.0).step([(1, 10)])
