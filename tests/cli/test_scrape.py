"""What two pages of metrics say about the time between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.cli.scrape import Scrape, added, parse, quantile, since

PAGE = """# TYPE requests_total counter
requests_total{route="a",code="200"} 7
requests_total{route="b",code="500"} 2
# TYPE wait_seconds histogram
wait_seconds_bucket{le="1.0"} 2
wait_seconds_bucket{le="2.0"} 4
wait_seconds_bucket{le="+Inf"} 5
wait_seconds_sum 9
wait_seconds_count 5
"""


def histogram(*counts: tuple[str, float]) -> Scrape:
    return Scrape({"h_bucket": {(("le", bound),): count for bound, count in counts}})


def test_a_page_is_read() -> None:
    page = parse(PAGE)
    assert page.total("requests_total") == 9
    assert page.total("requests_total", code="500") == 2
    assert page.total("other") == 0
    with pytest.raises(ValueError, match=r"\S"):
        parse("<html>")


def test_what_was_counted_since() -> None:
    before, after = parse(PAGE), parse(PAGE.replace(" 7", " 10"))
    assert since(before, after).total("requests_total") == 3
    assert since(Scrape(), after).total("requests_total") == 12, "a process that is new has counted all since"
    assert since(after, before).total("requests_total", route="a") == 7, "a smaller counter began anew"
    assert added([before, after]).total("requests_total", route="a") == 17


@pytest.mark.parametrize(("share", "seconds"), [(0.2, 0.5), (0.4, 1.0), (0.6, 1.5), (0.8, 2.0), (1.0, 2.0)])
def test_quantiles_lie_within_their_bucket(share: float, seconds: float) -> None:
    assert quantile(parse(PAGE), "wait_seconds", share) == pytest.approx(seconds)


def test_without_values_there_is_no_quantile() -> None:
    assert quantile(Scrape(), "h", 0.5) is None
    assert quantile(histogram(("1", 0.0), ("+Inf", 0.0)), "h", 0.5) is None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any), st.floats(0.01, 1), st.floats(0.01, 1))
def test_quantiles_grow_with_their_share(counts: list[int], one: float, other: float) -> None:
    ends = [float(sum(counts[: n + 1])) for n in range(len(counts))]
    bounds = [str(float(n + 1)) for n in range(len(counts) - 1)] + ["+Inf"]
    counted = histogram(*zip(bounds, ends, strict=True))
    low, high = (quantile(counted, "h", share) for share in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert 0 <= low <= high <= len(counts) - 1
