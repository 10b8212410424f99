"""Closed forms against their textbook cases and against each other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.queueing import erlang_c, mean_wait, wait_exceeds


@given(load=st.floats(0.01, 0.99))
def test_one_server_with_poisson_arrivals_is_pollaczek_and_khinchine(load):
    # M/M/1: rho/(1-rho) x S. M/D/1: half of it, as in DistServe (OSDI'24), section 3: R D^2 / (2 (1 - R D)).
    assert erlang_c(1, load) == pytest.approx(load)
    assert mean_wait(1, load, 1.0) == pytest.approx(load / (1 - load))
    rate, service = load / 2.0, 2.0
    assert mean_wait(1, rate, service, services=0.0) == pytest.approx(rate * service**2 / (2 * (1 - rate * service)))


def test_published_values_of_erlang_c():
    # Tables of Erlang C: 10 servers at 8 erlangs wait with probability 0.409, two at 1 erlang with 1/3.
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=0.001)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_the_mean_waits_of_a_link_with_the_lengths_of_the_mooncake_conversations():
    # Squared coefficient of variation 1.72: in units of the mean transfer at a use of 0.5, 0.6, 0.7, 0.8.
    waits = [mean_wait(1, use, 1.0, services=1.72) for use in (0.5, 0.6, 0.7, 0.8)]
    assert waits == pytest.approx([1.36, 2.04, 3.18, 5.45], abs=0.015)


@given(servers=st.integers(1, 50), load=st.floats(0.0, 60), more=st.floats(0.01, 5))
def test_more_work_waits_longer_and_more_servers_shorten_it(servers, load, more):
    assert mean_wait(servers, load, 1.0) <= mean_wait(servers, load + more, 1.0)
    assert mean_wait(servers + 1, load, 1.0) <= mean_wait(servers, load, 1.0)
    assert 0 <= wait_exceeds(1.0, servers, load, 1.0) <= 1


@given(servers=st.integers(1, 20), use=st.floats(0.05, 0.95))
def test_the_tail_integrates_to_the_mean(servers, use):
    rate = servers * use
    mean = mean_wait(servers, rate, 1.0)
    waits, width = erlang_c(servers, rate), mean / erlang_c(servers, rate) / 200
    area = sum(wait_exceeds((step + 0.5) * width, servers, rate, 1.0) * width for step in range(200 * 15))
    assert area == pytest.approx(mean, rel=0.001)
    assert wait_exceeds(0.0, servers, rate, 1.0) == pytest.approx(waits)


def test_the_edges():
    assert erlang_c(3, 3.0) == 1.0
    assert erlang_c(3, 0.0) == mean_wait(3, 0.0, 1.0) == 0.0
    assert wait_exceeds(1.0, 3, 0.0, 1.0) == 0.0
    assert mean_wait(2, 2.0, 1.0) == math.inf
    assert wait_exceeds(9.0, 2, 2.0, 1.0) == wait_exceeds(-0.1, 2, 1.0, 1.0) == 1.0
