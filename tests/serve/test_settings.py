"""Drafters by their names, and who chooses among them."""

from __future__ import annotations

from functools import partial

import pytest

from paceline.errors import ConfigError
from paceline.loop.record.config import RecordConfig
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.serve.requests.routing import route_of
from paceline.serve.settings import ServeConfig
from paceline.types import Route


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("default",), {"": "default"}),
        (("runs/lr=1e-3/drafter",), {"": "runs/lr=1e-3/drafter"}),
        (("general=default",), {"general": "default"}),
        (("general=default", "tickets=runs/lr=1e-3"), {"general": "default", "tickets": "runs/lr=1e-3"}),
        ((), {"": "none"}),
    ],
)
def test_names_of_drafters(options: tuple[str, ...], named: dict[str, str]) -> None:
    assert ServeConfig(drafters=options).named_drafters() == named


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("default", "a=ngram"), "'default' is one of several and needs a name"),
        (("a=default", "a=ngram"), "two drafters are called 'a'"),
        (("none=default",), "cannot be called 'none'"),
        (("NONE=default",), "cannot be called 'NONE'"),
        (("ngram=default",), "cannot be called 'ngram'"),
        (("a b=default",), "cannot be called 'a b'"),
        (("=default",), "cannot be called ''"),
        (tuple(f"d{number}=ngram" for number in range(65)), "at most 64 drafters"),
    ],
)
def test_names_that_cannot_be(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig(drafters=options)


def test_an_empty_model_name_is_refused() -> None:
    for owner in (ServeConfig, partial(RecordConfig, "tiny", "http://localhost:8000")):
        with pytest.raises(ConfigError, match="served_names must be a name, not empty"):
            owner(served_names=("mine", ""))


@pytest.mark.parametrize("route", ["", "random", "header:", "header:a b", "auto "])
def test_other_routes_are_refused(route: str) -> None:
    with pytest.raises(ConfigError, match="route must be auto, tag or header:NAME"):
        ServeConfig(route=route)


def chat(text: str, **more: object) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": text}], **more})


def test_a_request_names_its_drafter_or_is_of_a_kind() -> None:
    headers = {"x-drafter": " tickets "}
    assert route_of("tag", chat("hi"), headers, "tickets") == Route("tickets")
    assert route_of("tag", chat("hi"), headers, None) is None
    assert route_of("header:x-drafter", chat("hi"), headers, None) == Route("tickets")
    assert route_of("header:other", chat("hi"), headers, "tickets") is None
    assert route_of("auto", chat("hi"), headers, "tickets") == Route(clusters=("tag:tickets",))
    kinds = [
        chat("What is it that the cat has?"),
        chat("What is it that the cat has?", response_format={"type": "json_object"}),
        chat("What is it that the cat has?", guided_regex="[a-z]+"),
        chat("What is it that the cat has?", tools=[{"type": "function", "function": {"name": "f"}}]),
        CompletionRequest.model_validate({"prompt": "x" * 100_000}),
        CompletionRequest.model_validate({"prompt": [1, 2, 3]}),
    ]
    routes = [route_of("auto", body, headers, None) for body in kinds]
    assert len({route.clusters for route in routes if route}) == len(kinds)
