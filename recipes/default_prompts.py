"""The prompts that the default drafter is trained on beside public ones: functions to write, and questions of many
kinds.

    python recipes/default_prompts.py --mbpp mbpp_train.jsonl --out runs/default/prompts

Writes functions.jsonl (MBPP's training tasks rewritten as a signature with a docstring, and tasks put together from
parts), kinds.jsonl (templates x topics) and openers.txt (beginnings for prompts the target writes itself). Seeded: the
same files each time. Nothing of GSM8K's test set, HumanEval or MT-Bench is read.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from pathlib import Path
from typing import Any


def entries(text: str) -> list[str]:
    """Entries stand between bars and line ends."""
    return text.replace("\n", "|").strip("|").split("|")


TOPICS = entries("""
photosynthesis|the French Revolution|compound interest|electric cars|the water cycle|learning to play the guitar
climate change|ancient Rome|black holes|healthy breakfasts|remote work|the human heart|online privacy|volcanoes|jazz music
the stock market|raising a puppy|solar power|public speaking|the Great Depression|vaccines|time management|coral reefs
machine learning|Japanese gardens|marathon training|supply and demand|the Silk Road|growing tomatoes|chess openings
plate tectonics|job interviews|the Industrial Revolution|sleep|recycling|the moon landing|poetry|budget travel in Europe
blockchain|mindfulness|bees|the Renaissance|home networking|antibiotics|urban planning|street photography|DNA|inflation
the Roman aqueducts|electric guitars|baking bread|democracy|wind turbines|teamwork|the nervous system|space telescopes
camping with children|customer loyalty|rivers|social media|renewable energy|a lost letter|an old bookshop|a robot who gardens
a storm at sea|two rival bakers|a violin teacher|the last train home|a city under glass|learning a second language
""")

TEMPLATES = entries("""
Explain {a} to a ten-year-old.|Write a short story about {a}.|What are the main advantages and disadvantages of {a}?
Give me five practical tips about {a}.|Write a poem of eight lines about {a}.|Compare {a} and {b}.
What is the connection between {a} and {b}?|Write a formal email to a colleague who asked about {a}.
Summarize what is known about {a} in three sentences.|Who should care about {a}, and why?
Write a blog post introduction about {a} that makes the reader curious.|List ten key terms about {a} with short definitions.
Imagine you are an expert on {a}. Answer a journalist who asks what most people get wrong.
Draft an outline for a lecture on {a}.|Write a dialogue between a teacher and a student about {a}.
What are three common myths about {a}?|How did {a} change over the last hundred years?
Create a quiz with four questions and answers about {a}.|Describe {a} using only simple words.
Write a persuasive paragraph about {a}.|Plan a weekend around {a}.|What would happen without {a}?
Write a product review that mentions {a}.|Write a letter to a friend about {a}.
Rewrite this sentence in a formal style: "I reckon {a} is kinda great, you know."
Turn the words "{a}" and "{b}" into one sentence and explain it.
You are a travel guide from the future. Tell your visitors about {a}.
Write a headline and a first paragraph for a news article about {a}.
Extract the nouns from this text as a JSON list: "Yesterday we talked about {a}, then about {b}, and had tea."
Is {a} more important than {b}? Argue both sides.|Make a table with two columns that compares {a} with {b}.
Give a step by step guide for a beginner who wants to know about {a}.
What questions should I ask before I decide anything about {a}?|Write a Python dictionary that describes {a}.
Explain {a} with an analogy.|Write a speech of one minute about {a}.|What skills does one need for {a}?
Tell me a joke about {a} and explain it.|Classify these as an object, an event or an idea: {a}; {b}.
Suggest a title, a slogan and a logo for a club about {a}.
""")

OPENERS = entries("""
How do I|What is the difference between|Write a Python function that|Can you help me|Write a story|Explain why
I have a list of|Solve the following problem:|Translate|What are some|Give me|You are a|Write an email|If a train|Create a
Is it true that|Calculate|Write a C++ program|Summarize the following text:|Describe|Compare|Write a SQL query|Please write
Identify the
""")

REDUCTIONS = {
    "sum": ("the sum of", "int"), "product": ("the product of", "int"), "count": ("the number of", "int"),
    "largest": ("the largest of", "int"), "smallest": ("the smallest of", "int"), "average": ("the average of", "float"),
    "list": ("a list of", "List[int]"), "sorted": ("a sorted list of", "List[int]"), "last": ("the last of", "int"),
}  # fmt: skip
CONDITIONS = {
    "even": "the even numbers", "odd": "the odd numbers", "positive": "the positive numbers",
    "negative": "the negative numbers", "prime": "the prime numbers", "unique": "the numbers that appear only once",
    "repeated": "the numbers that appear more than once", "square": "the perfect squares",
    "above_mean": "the numbers above the average", "divisible": "the numbers divisible by three",
    "between": "the numbers between low and high", "digits": "the digits of all numbers",
    "neighbours": "the numbers larger than both neighbours",
}  # fmt: skip
STRINGS = {
    "count_{0}": "Return how many {1} the string text contains.", "remove_{0}": "Return text without its {1}.",
    "first_{0}": "Return the position of the first of the {1} in text, or -1 if there are none.",
    "only_{0}": "Return True if text consists only of {1}, otherwise False.",
    "replace_{0}": "Replace all {1} in text by the character new.", "upper_{0}": "Return text with its {1} in upper case.",
    "split_at_{0}": "Split text at its {1} and return the parts as a list.",
}  # fmt: skip
TESTED_ELSEWHERE = ("remove_vowels", "triangle_area")
"""Also names of HumanEval tasks: left out, though the texts differ."""
STRING_PARTS = entries("vowels|consonants|digits|spaces|capital letters|punctuation marks|repeated characters|words")


def functions_from_mbpp(file: Path) -> list[dict[str, Any]]:
    """A signature with a docstring for each of MBPP's tasks whose code and tests can be read."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [prompt for row in rows if (prompt := function_prompt(row)) is not None]


def function_prompt(row: dict[str, Any]) -> dict[str, Any] | None:
    """One MBPP task as a function to complete, with an example from its tests."""
    try:
        definitions = [node for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
        tests = [ast.parse(test).body[0] for test in row["test_list"]]
    except SyntaxError:
        return None
    calls = [node.func for test in tests for node in ast.walk(test) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    definition = next((each for each in definitions if each.name in called), None)
    if definition is None:
        return None
    task = re.sub(r"^Write a (python )?function (to |that |which )?", "", row["text"].strip(), flags=re.IGNORECASE)
    examples = [example for test in tests if (example := doctest(test))]
    body = "\n    ".join([task[:1].upper() + task[1:], *examples[:2]])
    source = f'def {definition.name}({ast.unparse(definition.args)}):\n    """ {body}\n    """\n'
    return {"task_id": f"mbpp-{row['task_id']}", "prompt": source, "entry_point": definition.name}


def doctest(test: ast.stmt) -> str | None:
    """`assert f(1) == 2` as `>>> f(1)` and `2`."""
    compare = test.test if isinstance(test, ast.Assert) else None
    if not isinstance(compare, ast.Compare) or not isinstance(compare.left, ast.Call) or len(compare.comparators) != 1:
        return None
    return f">>> {ast.unparse(compare.left)}\n    {ast.unparse(compare.comparators[0])}"


def functions_from_parts() -> list[dict[str, Any]]:
    """Small tasks over lists and strings, put together from parts."""
    prompts = []
    for reduction, (words, kind) in REDUCTIONS.items():
        for condition, subject in CONDITIONS.items():
            name = f"{reduction}_{condition}"
            extra = ", low: int, high: int" if condition == "between" else ""
            head = f"from typing import List\n\n\ndef {name}(numbers: List[int]{extra}) -> {kind}:\n"
            prompts.append((name, f'{head}    """ Return {words} {subject} in the given list.\n    """\n'))
    for pattern, sentence in STRINGS.items():
        for part in STRING_PARTS:
            name = pattern.format(part.replace(" ", "_"))
            extra = ", new: str" if "replace" in pattern else ""
            prompts.append((name, f'\ndef {name}(text: str{extra}):\n    """{sentence.format(None, part)}"""\n'))
    return [{"task_id": f"parts-{name}", "prompt": source, "entry_point": name} for name, source in prompts]


def kinds(number: int, generator: random.Random) -> list[dict[str, Any]]:
    """Questions of many kinds: each template with topics of its own. Raises ValueError when there are not so many."""
    if number > len(TEMPLATES) * len(TOPICS):
        raise ValueError(f"there are {len(TEMPLATES) * len(TOPICS)} questions, not {number}: lower --kinds")
    prompts: dict[str, None] = {}
    while len(prompts) < number:
        first, second = generator.sample(TOPICS, 2)
        prompts[TEMPLATES[len(prompts) % len(TEMPLATES)].format(a=first, b=second)] = None
    return [{"id": f"kinds-{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbpp", type=Path, required=True, help="MBPP's training rows, JSON lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", type=int, default=1600, help="how many questions of many kinds")
    given = parser.parse_args()
    generator = random.Random(0)
    given.out.mkdir(parents=True, exist_ok=True)
    functions = functions_from_mbpp(given.mbpp) + functions_from_parts()
    functions = [prompt for prompt in functions if prompt["entry_point"] not in TESTED_ELSEWHERE]
    generator.shuffle(functions)
    write_lines(given.out / "functions.jsonl", functions)
    write_lines(given.out / "kinds.jsonl", kinds(given.kinds, generator))
    (given.out / "openers.txt").write_text("\n".join(OPENERS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
