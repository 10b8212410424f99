"""Defaults of pods are read strictly: a mistake of the administrator is named, not ignored."""

from __future__ import annotations

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.pod_defaults import PodDefaults, parse
from twinpool.core.scheduling import Toleration


def test_nothing_said_is_nothing_added() -> None:
    assert parse("") == parse("{}") == PodDefaults()


def test_all_that_can_be_said() -> None:
    found = parse(
        '{"labels": {"team": "a"}, "annotations": {"b": "c"}, "imagePullSecrets": [{"name": "mirror"}],'
        '"router": {"priorityClassName": "high"}, "worker": {"nodeSelector": {"gpu": "yes"},'
        '"tolerations": [{"key": "gpu", "operator": "Exists"}], "env": [{"name": "HTTPS_PROXY", "value": "http://p"}]}}'
    )
    assert (found.labels, found.annotations) == ({"team": "a"}, {"b": "c"})
    assert [secret.name for secret in found.image_pull_secrets] == ["mirror"]
    assert found.router.priority_class_name == "high"
    assert found.worker.tolerations == (Toleration(key="gpu", operator="Exists"),)
    assert found.worker.env[0].value == "http://p"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "the whole: Invalid JSON"),
        ('{"label": {}}', "label: Extra inputs are not permitted"),
        ('{"labels": {"a": 5}}', "labels.a: Input should be a valid string"),
        ('{"worker": {"toleration": []}}', "worker.toleration: Extra inputs"),
        ('{"imagePullSecrets": [{}]}', "imagePullSecrets.0.name: Field required"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, words: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse(text)
    assert f"defaults of pods: {words}" in str(refused.value)
    assert "see `pools` in the chart's values" in str(refused.value)
