"""Settings of a lossy rule, as text or as an object."""

from __future__ import annotations

import pytest

from paceline.errors import SamplingError
from paceline.lossy import Lossy


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("lenience:0.5", {"rule": "lenience", "l": 0.5}),
        ("typical", {"rule": "typical", "eps": 0.09, "delta": 0.3}),
        (" relaxed : n=5 , delta=0.2, max_tv=0.02", {"rule": "relaxed", "n": 5, "delta": 0.2, "max_tv": 0.02}),
        ("threshold:0.4,acc=0.9", {"rule": "threshold", "single": 0.4, "acc": 0.9}),
        ("mixture:lam=0.9", {"rule": "mixture", "lam": 0.9}),
    ],
)
def test_text_and_object_ask_for_the_same(text: str, same: dict[str, float | str]) -> None:
    rule = Lossy.of(text)
    assert rule == Lossy.of(same) == Lossy.of(str(rule))
    assert rule.within(0.01).max_tv == 0.01 and rule.within(None) == rule


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("lenient:0.5", "choose from typical, relaxed"),
        ("", "choose from typical"),
        ({"eps": 0.1}, "choose from typical"),
        ("lenience:", "lenience:"),
        ("lenience:0", "l must be above 0"),
        ("lenience:1.5", "at most 1"),
        ("lenience:nan", "l must be"),
        ("typical:delta=0", "delta must be above 0"),
        ("typical:eps=0.1,epsilon=0.2", "has no value 'epsilon'"),
        ("typical:eps=0.1,eps=0.2", "twice"),
        ("typical:0.1,0.2", "cannot be read"),
        ("relaxed:n=2.5", "whole number"),
        ("relaxed:n=0", "n must be at least 1"),
        ({"rule": "lenience", "l": "0.5"}, "must be a number"),
        ({"rule": "lenience", "l": True}, "must be a number"),
        ("lenience:0.5,max_tv=2", "max_tv must be between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused(value: str | dict[str, float | str], message: str) -> None:
    if value == "lenience:":
        assert Lossy.of(value).rule == Lossy.of("lenience:1").rule
        return
    with pytest.raises(SamplingError, match=message):
        Lossy.of(value)
