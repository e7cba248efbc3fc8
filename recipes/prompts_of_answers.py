"""The prompts behind stored answers, as text, so that another model may answer them: of targets that speak ChatML.

    python recipes/prompts_of_answers.py --target qwen2.5-coder-0.5b --answers recipes/answers/qwen2.5-coder-0.5b \
        --out runs/prompts/code.jsonl

Answers keep their prompts as token ids. The last message of the user is taken, each once, in the order of the answers'
keys.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from paceline.data.answers import AnswerShards
from paceline.hub import resolve
from paceline.model.text.tokenizer import Tokenizer

USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def last_user_message(rendered: str) -> str | None:
    """Returns the last user message of a conversation in ChatML, or None without one."""
    messages = USER.findall(rendered)
    return messages[-1] if messages else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model that wrote the answers")
    parser.add_argument(
        "--answers", type=Path, required=True, help="a folder of folders of answers, as recipes/answers/NAME"
    )
    parser.add_argument("--leave-out", nargs="*", default=[], help="names of folders that are not wanted")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve(args.target))
    texts: dict[str, str] = {}
    for folder in sorted(args.answers.iterdir()):
        if folder.name in args.leave_out or not folder.is_dir():
            continue
        for answer in sorted(AnswerShards(folder), key=lambda answer: answer.key):
            text = last_user_message(tokenizer.decode(answer.prompt_ids, skip_special=False))
            if text is not None:
                texts.setdefault(text, f"{folder.name}-{len(texts)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for text, name in texts.items():
            file.write(json.dumps({"id": name, "prompt": text}) + "\n")
    print(f"{len(texts)} prompts in {args.out}")


if __name__ == "__main__":
    main()
