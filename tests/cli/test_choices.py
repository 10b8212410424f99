"""``twinpool explain --routing``: what the pages of routers say, in words and for machines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from twinpool.cli import choices
from twinpool.cli.__main__ import main
from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

LAG = {"lastMs": 0.1, "worstMs": 12.5}
PROCESS: dict[str, Any] = {
    "process": {"pid": 7, "lag": LAG},
    "clients": 3,
    "running": 2,
    "waiting": 1,
    "breaker": {"d-0": {"avoidedSeconds": 1.5}, "d-1": {"share": 0.3}},
}
DEBUG = {
    "pool": "llama",
    "config": "0123456789ab",
    "policy": "price",
    "versions": {"twinpool": "1.2.3", "python": "3.12"},
    "control": {"process": {"lag": LAG}, "endpoints": 4, "admitted": 3},
    "processes": [PROCESS, None],
}


def option(worker: str, price: float | None, held: int = 0) -> dict[str, Any]:
    return {"worker": worker, "price": price, "held": held}


def choice(name: str, chosen: str, *options: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": 0.0, "choice": name, "promptTokens": 500, "outputTokens": 9, "chosen": chosen, "saved": 0.25,
        "options": list(options),
    }  # fmt: skip


KEPT = [
    choice("prefill", "p-1", option("p-0", 1.5), option("p-1", 0.5, 400)),
    choice("handoff", "remote"),
    choice("decode", "d-1", option("d-1", None)),
]
DECISIONS = {"processes": [{"recording": True, "decisions": KEPT}, None]}

Pages = dict[tuple[str, str], Any]


class FakeForwards:
    """Answers from ``pages`` in place of pods."""

    pages: ClassVar[Pages] = {}
    seen: ClassVar[list[tuple[str, int, str]]] = []

    def __init__(self, kubectl: object) -> None: ...

    def __enter__(self) -> FakeForwards:
        return self

    def __exit__(self, *_: object) -> None: ...

    def page(self, pod: str, port: int, path: str) -> str | None:
        self.seen.append((pod, port, path))
        found = self.pages.get((pod, path))
        return found if found is None or isinstance(found, str) else json.dumps(found)


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pages, tuple[PodView, ...]], None]:
    def give(pages: Pages, pods: tuple[PodView, ...]) -> None:
        spec = {"model": {"name": "m"}, "engine": {"kind": "simulated"}, "decode": {}}
        pool = InferencePool.model_validate({"metadata": {"name": "llama", "namespace": "t"}, "spec": spec})
        monkeypatch.setattr(choices, "observe", lambda *_: (Observed(pool, (), pods), {}))
        monkeypatch.setattr(choices, "Forwards", FakeForwards)
        monkeypatch.setattr(choices.time, "sleep", lambda _: None)
        FakeForwards.pages, FakeForwards.seen = pages, []

    return give


RUNNING = (
    PodView("r-0", "router", phase="Running"),
    PodView("r-1", "router", phase="Running"),
    PodView("r-2", "router", phase="Pending"),
    PodView("d-0", "decode", phase="Running"),
)
PAGES: Pages = {("r-0", "/debug"): DEBUG, ("r-0", "/debug/decisions"): DECISIONS, ("r-1", "/debug"): "no JSON"}


def test_routers_are_told_in_words(routers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    routers(PAGES, RUNNING)
    assert main(["explain", "llama", "--routing"]) == 0
    out = capsys.readouterr().out
    for words in (
        "r-0: Twinpool 1.2.3, settings 0123456789ab, policy price; 3 of 4 workers admitted; its loop was late by",
        "process 0: 3 clients, 2 requests at workers, 1 waiting",
        "d-0: avoided for 1.5 s",
        "d-1: share 0.3",
        "00:00:00 prefill, 500 prompt tokens: p-1 of p-0 1.5, p-1* 0.5 (400 cached)\n",
        "handoff, 500 prompt tokens: remote (saves 0.25 s)\n",
        "decode, 500 prompt tokens: d-1\n",
        "process 1 does not answer",
        "r-1: its admin port does not answer; see `kubectl logs r-1`",
    ):
        assert words in out
    asked = [(pod, path) for pod, port, path in FakeForwards.seen if port == protocol.ROUTER_ADMIN_PORT]
    assert asked[:2] == [("r-0", "/debug/decisions"), ("r-1", "/debug/decisions")], "choices are kept from a look on"
    assert asked.count(("r-0", "/debug/decisions")) == 2


def test_routers_for_machines(routers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    routers(PAGES, RUNNING)
    assert main(["explain", "llama", "--routing", "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "r-0": {"debug": DEBUG, "decisions": DECISIONS},
        "r-1": {"debug": None, "decisions": None},
    }


def test_a_router_without_choices_or_with_an_older_page_is_told_too(
    routers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    routers({("r-0", "/debug"): DEBUG, ("r-0", "/debug/decisions"): {"error": "unknown path"}}, RUNNING[:1])
    assert main(["explain", "llama", "--routing"]) == 0
    assert "last choices" not in capsys.readouterr().out


def test_a_pool_without_routers_is_an_error(routers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    routers({}, RUNNING[2:])
    assert main(["explain", "llama", "--routing"]) == 1
    assert "no router of llama runs" in capsys.readouterr().err
    assert main(["explain", "llama", "--routing", "--scaling"]) == 1
    assert "different answers" in capsys.readouterr().err
