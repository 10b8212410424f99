import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.core.units import parse_bytes, parse_cpu, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("800ms", 0.8), ("5s", 5.0), ("20m", 1200.0), ("1h", 3600.0), ("999999999s", 999999999.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["800", "", "0s", "-5s", "5 s", "5s ", "1.5s", "5S", "5sec", "1h30m", "1000000000s"])
def test_a_wrong_duration_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_duration(text)
    assert repr(text) in caught.value.problem
    assert "800ms" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "count"),
    [("16", 16), ("500Mi", 500 * 2**20), ("25Gi", 25 * 2**30), ("1Ti", 2**40), ("2k", 2000), ("3G", 3 * 10**9)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["25GB", "25GB ", "25Gi ", "", "0", "-1Gi", "1.5Gi", "Gi", "25gi", "25 Gi"])
def test_a_wrong_size_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.problem
    assert "25Gi" in caught.value.remedy


@given(st.integers(1, 10**8), st.sampled_from(["ms", "s", "m", "h"]))
def test_every_duration_is_positive(count: int, unit: str) -> None:
    assert parse_duration(f"{count}{unit}") > 0


def test_an_error_reads_problem_then_remedy() -> None:
    assert str(TwinpoolError("the disk is full", "free 3 GB")) == "the disk is full - free 3 GB"
    assert str(TwinpoolError("the disk is full")) == "the disk is full"


@pytest.mark.parametrize(
    ("text", "cores"), [("4", 4.0), ("0.5", 0.5), ("500m", 0.5), ("1500m", 1.5), ("12.125", 12.125)]
)
def test_cores(text: str, cores: float) -> None:
    assert parse_cpu(text) == cores


@pytest.mark.parametrize("text", ["", "0", "m", "1.5m", "-1", "4 ", "1e3"])
def test_what_are_no_cores(text: str) -> None:
    with pytest.raises(InvalidValue, match="CPU cores"):
        parse_cpu(text)
