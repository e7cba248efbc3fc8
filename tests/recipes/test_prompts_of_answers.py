"""Prompts as text from answers that keep them as token ids."""

from __future__ import annotations

import runpy
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_last_message_of_the_user() -> None:
    last_user_message = runpy.run_path(str(RECIPES / "prompts_of_answers.py"))["last_user_message"]
    first = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nadd(\n1)<|im_end|>\n<|im_start|>assistant\n"
    assert last_user_message(first) == "add(\n1)"
    assert (
        last_user_message(first + "2<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n") == "again"
    )
    assert last_user_message("plain text") is None
