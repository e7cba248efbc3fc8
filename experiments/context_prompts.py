"""Writes prompts that stand behind long contexts, to measure acceptance by context length.

    python experiments/context_prompts.py --model qwen2.5-coder-0.5b --prompts humaneval.jsonl --limit 16 \\
        --context /usr/lib/python3.11/textwrap.py /usr/lib/python3.11/csv.py ... --out runs/contexts
    paceline evaluate default --model qwen2.5-coder-0.5b --batch 1 --temperature 0 --max-len 7168 \\
        --prompts runs/contexts/0.jsonl --prompts runs/contexts/2000.jsonl ...

Each set has the same questions behind the first N tokens of the context files; 0 is without. The files are cut at a
token, not at a line, and put into the question's own message.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.data.prompts import read_prompts
from paceline.hub import resolve
from paceline.model.text.tokenizer import Tokenizer


def behind(context: str, question: str) -> str:
    return f"These are files of the project:\n```\n{context}\n```\n\n{question}" if context else question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokens are counted")
    parser.add_argument("--prompts", required=True, help="the questions")
    parser.add_argument("--context", nargs="+", type=Path, required=True, help="text files, in order")
    parser.add_argument("--lengths", nargs="+", type=int, default=[0, 500, 2000, 6000], help="tokens of context")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve(args.model))
    ids = tokenizer.encode("".join(file.read_text(encoding="utf-8") for file in args.context))
    if len(ids) < max(args.lengths):
        parser.error(f"the context files have {len(ids):,} tokens, fewer than {max(args.lengths):,}: name more")
    prompts = read_prompts(args.prompts, args.limit)
    args.out.mkdir(parents=True, exist_ok=True)
    for length in args.lengths:
        context = tokenizer.decode(ids[:length]) if length else ""
        rows = []
        for number, prompt in enumerate(prompts):
            *before, last = prompt.messages
            content = behind(context, str(last["content"]))
            rows.append({"id": f"{length}-{number}", "messages": [*before, {**last, "content": content}]})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{length}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
