"""Prompts of general text for the default drafter: translations, summaries, and questions about passages.

    python recipes/general_prompts.py --sentences German=/usr/share/games/fortunes/de --out runs/default/general
    python recipes/general_prompts.py --out runs/default/general --articles runs/default/articles/answers \\
        --paragraphs runs/default/paragraphs/answers

The first command writes translations.jsonl (sentences of Debian's packages fortunes-de, -es, -it and -br; one option
for each language), articles.jsonl and paragraphs.jsonl (texts for the target to write), and openers.txt (beginnings of
questions about facts, for prompts that the target writes itself). The second makes summaries.jsonl and passages.jsonl
of the texts that the target wrote. Seeded: the same files each time. Nothing of a test set is read.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from default_prompts import TOPICS, entries, write_lines

from paceline.data.answers import AnswerShards

ARTICLES = entries("""
Write a detailed news article about {a}.
Write a long newspaper report about an event that has to do with {a}. Give names, places and numbers.
Write a feature for a magazine about {a}, with quotes from three people.
Report in detail on a dispute in a small town over {a}.
""")
PARAGRAPHS = entries("""
Write an encyclopedia paragraph about {a}.|Write an encyclopedia paragraph about the history of {a}.
Write an encyclopedia paragraph about people and places that are known for {a}.
Write an encyclopedia paragraph about numbers and facts concerning {a}.
""")
OPENERS = entries("""
Who wrote|Who was the first|Who played|When did|When was|Where is|Where did|What year|What is the name of
What is the largest|What is the capital|How many|How old|How long|Which country|Which river|What does|Why did
What was the|Who is the|How much|Where do|When is
""")
TRANSLATIONS = (
    "Translate this {language} sentence into English: {sentence}",
    "Translate from {language} to English.\n\n{sentence}",
    "What does this mean in English? {sentence}",
    "{sentence}\n\nGive an English translation of the {language} text above.",
    "Please translate: {sentence}",
    "English version of the following {language} text: {sentence}",
)
SENTENCES = 125
"""Number of sentences drawn from each language."""
SUMMARIES = (
    "Summarize this article: {text}",
    "Give a short summary of the following text.\n\n{text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "What are the main points of this report?\n\n{text}",
    "Write a summary.\n\nText: {text}\n\nSummary:",
)
LEAST_CHARACTERS = 400
"""Shortest article that gets a summary, in characters."""
QUESTIONS = entries("""
What is special about {a}?|What is known about the history of {a}?|Who is named in connection with {a}?
Why is {a} important?|Where would one find {a}?|How many examples of {a} are given, and which?
When did people first take an interest in {a}?|What are the main facts about {a}?
""")
PASSAGES = (
    "{passages}\n\nAnswer the question from the passages above: {question}",
    "Use the following documents to answer.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{question}\n\nContext:\n{passages}",
    "Read these passages and answer the question in full sentences.\n\n{passages}\n\n{question}",
)
NUM_PASSAGES = 260
"""Number of questions about passages."""


def sentences(path: Path) -> list[str]:
    """Returns the sentences of 40 to 220 characters in a fortune file or a folder of them; its entries stand between
    lines of a percent sign."""
    kept = set[str]()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if not file.is_file() or file.suffix in (".dat", ".u8"):
            continue
        raw = file.read_bytes()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = raw.decode("latin-1")
        for entry in re.split(r"\n%\n?", text):
            quote = re.sub(r"\s+", " ", entry.split("\n\t")[0].split(" -- ")[0]).strip()
            kept.update(
                each
                for each in re.split(r"(?<=[.!?]) ", quote)
                if 40 <= len(each) <= 220 and each[0].isupper() and each[-1] in ".!?"
            )
    return sorted(kept)


def translations(paths: dict[str, Path], generator: random.Random) -> list[str]:
    prompts = list[str]()
    for language, path in paths.items():
        known = sentences(path)
        for each in generator.sample(known, min(SENTENCES, len(known))):
            prompts.append(generator.choice(TRANSLATIONS).format(language=language, sentence=each))
    generator.shuffle(prompts)
    return prompts


def written(folder: Path) -> Iterator[tuple[int, str]]:
    """Yields (number of the prompt, text of the answer)."""
    for answer in AnswerShards(folder):
        match = re.search(r"-(\d+)#", answer.key)
        assert match is not None, answer.key
        yield int(match[1]), answer.text.strip()


def passages(paragraphs: Path, generator: random.Random) -> list[str]:
    """Returns questions about three to five paragraphs, of which at least one is about the question's topic."""
    by_topic = defaultdict[str, list[str]](list)
    for number, text in written(paragraphs):
        by_topic[TOPICS[number // len(PARAGRAPHS)]].append(re.sub(r"\s+", " ", text))
    names, prompts = sorted(by_topic), list[str]()
    for _ in range(NUM_PASSAGES):
        topic = generator.choice(names)
        own = by_topic[topic]
        chosen = generator.sample(own, min(len(own), generator.randint(1, 3)))
        wanted = generator.randint(3, 5)
        while len(chosen) < wanted:
            chosen.append(generator.choice(by_topic[generator.choice(names)]))
        generator.shuffle(chosen)
        form = generator.choice(("{text}", "[{number}] {text}", "Document {number}: {text}"))
        listed = "\n\n".join(form.format(number=number, text=text) for number, text in enumerate(chosen, 1))
        question = generator.choice(QUESTIONS).format(a=topic)
        prompts.append(generator.choice(PASSAGES).format(passages=listed, question=question))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", action="append", default=[], metavar="LANGUAGE=PATH", help="may be repeated")
    parser.add_argument("--articles", type=Path, help="answers to articles.jsonl")
    parser.add_argument("--paragraphs", type=Path, help="answers to paragraphs.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, prompts: list[str]) -> None:
        rows = [{"id": f"{name}-{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]
        write_lines(args.out / f"{name}.jsonl", rows)

    generator = random.Random(31)
    if args.articles and args.paragraphs:
        texts = [text for _, text in written(args.articles) if len(text) > LEAST_CHARACTERS]
        write("summaries", [generator.choice(SUMMARIES).format(text=text) for text in texts])
        write("passages", passages(args.paragraphs, generator))
        return
    paths = {language: Path(path) for language, _, path in (each.partition("=") for each in args.sentences)}
    write("translations", translations(paths, generator))
    write("articles", [form.format(a=topic) for form in ARTICLES for topic in TOPICS])
    write("paragraphs", [form.format(a=topic) for topic in TOPICS for form in PARAGRAPHS])
    (args.out / "openers.txt").write_text("\n".join(OPENERS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
