"""What `make demo` shows: a small coding model changes a function, without and with drafts, and what it wrote is run.

    python experiments/demo.py                            # qwen2.5-coder-0.5b, fetched once (491 MB)
    python experiments/demo.py --model smollm2-135m       # the smallest built-in model (98 MB), which only does sums

Where disk, memory or network are short for the first, the second answers a sum instead. Exit status 1 when the answers
with and without drafts differ, or the function that was written does not do what it should.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from paceline import LLM, SamplingParams
from paceline.bench.comparison import answer_plainly, compare_with_plain, compare_with_transformers
from paceline.bench.tasks import code_of, runs
from paceline.errors import CacheError, DownloadError, PacelineError
from paceline.hardware import memory_bytes
from paceline.hub import BUILTINS, resolve

CODER, SMALLEST = "qwen2.5-coder-0.5b", "smollm2-135m"
TASK = """Here is a Python function:

```python
def to_roman(number):
    numerals = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
                (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    result = ""
    for value, numeral in numerals:
        while number >= value:
            result += numeral
            number -= value
    return result
```

Give it a second parameter, `lower=False`, that makes the result lower case when it is true. Answer with the whole function in
one block of Python code."""
CALLS = {"to_roman(1994)": "MCMXCIV", "to_roman(2026, lower=True)": "mmxxvi"}
"""Calls of the function, and what they return if it is right."""
SUM = (
    "A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs 3 dollars. How much "
    "does she "
    "earn in a day? Please reason step by step, and put your final answer within \\boxed{}."
)
PEER_TOKENS = 32
"""Tokens of Transformers' answer: enough to measure its speed, which is slow."""


def load(name: str) -> LLM:
    """The model that was asked for, or the smallest where it cannot be had."""
    needed = BUILTINS[name].memory_bytes if name in BUILTINS else 0
    try:
        if needed > memory_bytes():
            raise CacheError(f"{name} needs {needed / 1e9:.1f} GB of memory")
        resolve(name)
    except (CacheError, DownloadError) as error:
        if name != CODER:
            raise
        print(f"{error}\n{SMALLEST} answers a sum instead\n", file=sys.stderr)
        return load(SMALLEST)
    return LLM(name, max_batch=1)


def checked(code: str) -> dict[str, bool]:
    """Call -> True if the code that the model wrote returns for it what it should; it runs with little time and
    memory."""
    return {call: runs(f"{code}\nassert {call} == {value!r}") for call, value in CALLS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=CODER)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--no-transformers", action="store_true", help="leave out Transformers, which takes longest")
    args = parser.parse_args()
    llm = load(args.model)
    writes_code = llm.config.model != SMALLEST
    prompt, params = TASK if writes_code else SUM, SamplingParams(max_tokens=args.max_tokens)
    print(
        f"{llm.config.model}, drafts from {llm.drafter.name}; the prompt:\n\n{prompt}\n\nthe answer:\n", file=sys.stderr
    )
    token_ids = llm.encode_chat([{"role": "user", "content": prompt}])
    plain = answer_plainly(llm, token_ids, params)
    [answer] = llm.generate_ids([token_ids], params, lambda chunk: print(chunk.text, end="", flush=True))
    print("\n")
    beside = compare_with_plain(llm, answer, plain, params)
    print(f"{'plain decoding':<24}{plain.stats.tokens_per_s:7.1f} tokens/s")
    with_drafts = f"with {llm.drafter.name} drafts"
    faster = beside.doubt if beside.speedup is None else f"{beside.speedup:.2f} times as fast"
    print(
        f"{with_drafts:<24}{answer.stats.tokens_per_s:7.1f} tokens/s   {faster}, "
        f"{answer.stats.tokens_per_round:.2f} tokens a round, {'the same' if beside.identical else 'ANOTHER'} text"
    )
    if not args.no_transformers:
        peer = compare_with_transformers(llm, answer, replace(params, max_tokens=PEER_TOKENS))
        print(f"{'Transformers':<24}{peer.tokens_per_s:7.1f} tokens/s   paceline is {peer.speedup:.1f} times as fast")
    if not writes_code:
        return 0 if beside.identical else 1
    results = checked(code_of(answer.text))
    print("\nwhat it wrote, run:")
    for call, is_right in results.items():
        print(f"  {call} returns {CALLS[call]}" if is_right else f"  {call} does NOT return {CALLS[call]}")
    return 0 if beside.identical and all(results.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.exit(f"error: {error}")
