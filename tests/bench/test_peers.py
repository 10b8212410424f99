"""What is installed of a program that asks for more than it needs."""

from __future__ import annotations

from bench.router.peers import needed


def test_extras_and_what_is_not_needed_are_left_out() -> None:
    asked = [
        "aiohttp<4,>=3.14",
        "Dash~=3.1",
        "dash-ui~=2",
        "uvicorn[standard]<1",
        "torch; extra == 'big'",
        "uvloop; os",
    ]
    assert needed(asked, {"dash", "uvloop"}) == ["aiohttp<4,>=3.14", "dash-ui~=2", "uvicorn[standard]<1"]
