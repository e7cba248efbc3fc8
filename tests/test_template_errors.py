"""A chat template that is missing or fails: every front end names a way out that it has."""

from __future__ import annotations

from typing import Any

import pytest
from doubles import ByteTokenizer
from small_llm import fake_llm

from paceline.bench.passes import make_requests
from paceline.commands import chat
from paceline.commands.generate import encode
from paceline.data.prompts import Prompt
from paceline.errors import PacelineError
from paceline.loop.audit.run import audit_prompt
from paceline.loop.evals.answerers import LLMAnswerer
from paceline.loop.evals.config import EvalSampling
from paceline.loop.evals.suite import Case
from paceline.train.answers.prompt_tokens import PromptEncoder
from paceline.train.config import AnswerConfig
from paceline.types import SamplingParams

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PROMPT = Prompt("a", MESSAGES, ("hi",), "s")
CASES = [Case("a", {"kind": "exact", "answer": "x"}, tuple(MESSAGES))]
IDS = "give the prompts as token ids (prompt_ids)"
FRONT_ENDS: dict[str, tuple[Any, str]] = {
    "LLM.chat": (lambda llm: llm.chat([MESSAGES]), "pass the text itself to generate()"),
    "LLM.stream": (lambda llm: list(llm.stream(MESSAGES)), "pass the text itself to generate()"),
    "generate, compare": (lambda llm: encode(llm, "hi", None, raw=False), "use --raw to send the text as it is"),
    "train, regenerate": (
        lambda llm: PromptEncoder(llm, AnswerConfig()).first_ids(PROMPT),
        "use --raw to ask prompts as they stand",
    ),
    "bench decode, evaluate": (lambda llm: make_requests(llm, [PROMPT], 4), IDS),
    "evals": (lambda llm: LLMAnswerer(llm, EvalSampling(max_tokens=4)).answers(CASES, 1, print), IDS),
    "audit": (lambda llm: audit_prompt(llm, PROMPT), IDS),
}


@pytest.mark.parametrize("name", list(FRONT_ENDS))
@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no user') }}", "x" * 200_001], ids=["none", "refuses", "long"]
)
def test_each_front_end_names_its_own_way_out(name: str, template: str | None) -> None:
    work, way = FRONT_ENDS[name]
    llm = fake_llm(tokenizer=ByteTokenizer())
    llm.tokenizer.chat_template = template
    if name == "audit" and template is None:
        assert work(llm).messages is None  # it audits with the text itself
        return
    with pytest.raises(PacelineError) as caught:
        work(llm)
    assert str(caught.value).endswith(f" or {way}")
    assert "chat template" in str(caught.value) and ("--raw" in str(caught.value)) == ("--raw" in way)


def test_chat_names_the_command_that_continues_texts(capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake_llm(tokenizer=ByteTokenizer())
    llm.tokenizer.chat_template = None
    assert chat._answered(llm, [], "hi", SamplingParams(max_tokens=2)) == []
    message = "no chat template: choose a model that has one or continue texts with paceline generate --raw"
    assert message in capsys.readouterr().err
