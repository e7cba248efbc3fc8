"""Prompts of general text from published manuals, dictionaries and news, for the default drafter.

    python recipes/manual_prompts.py --root unpacked --news gensim/test/test_data --clues nlp/package/builds --out runs/default/manuals

`--root` holds unpacked Debian packages, each in a folder of its name (`apt-get download NAME`, `dpkg-deb -x`): the
installation guide, debian-handbook, debian-reference-{de,fr,it}, debian-faq-de, developers-reference-de, dict-foldoc,
dict-gcide, dict-jargon and wordnet-base. `--news` is the folder of gensim's test data (news of the Lee corpus), `--clues`
that of npm's nlp-corpus (sentences with "this city" or "these animals" become quiz clues).

Writes translations.jsonl, summaries.jsonl, passages.jsonl (questions about dictionary entries), facts.jsonl, and openers.txt
(beginnings of prompts for the target to write). Seeded: the same files each time. Nothing of a test set is read.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from general_prompts import PASSAGES, SUMMARIES, TRANSLATIONS

GUIDE = "installation-guide-amd64/usr/share/doc/installation-guide-amd64/{}/*.html*"
HANDBOOK = "debian-handbook/usr/share/doc/debian-handbook/html/{}/*.html"
REFERENCE = "debian-reference-{0}/usr/share/debian-reference/*.{0}.html"
OTHERS = ("debian-faq-{}/usr/share/doc/**/*.html", "developers-reference-{}/usr/share/**/*.html")
LANGUAGES = (
    ("German", "de", "de-DE", 1500),
    ("French", "fr", "fr-FR", 400),
    ("Spanish", "es", "es-ES", 250),
    ("Italian", "it", "it-IT", 150),
    ("Portuguese", "pt", "pt-BR", 100),
)
"""Language, its code, its region's code, most sentences."""
NO_TEXT = re.compile(r"<(script|style|pre|head|table)\b.*?</\1>", re.S | re.I)
QUESTIONS = (
    "What is {t}?",
    "What does {t} mean?",
    "Where does the name {t} come from?",
    "What is {t} used for?",
    "Explain {t} from the passages.",
    "How is {t} described?",
    "What is the difference between {t} and {u}?",
    "Who or what is {t}?",
)
PERSON = ("Who was {t}?", "When did {t} live?", "What is {t} known for?", "Where was {t} born?", "Tell me about {t}.")
PLACE = (
    "Where is {t}?",
    "What is {t} famous for?",
    "Which country is {t} in?",
    "How large is {t}?",
    "When was {t} founded?",
)
OTHER = (
    "What is {t}?",
    "When did {t} take place?",
    "Why is {t} important?",
    "What do people mean by {t}?",
    "How did {t} come about?",
)
PEOPLE, PLACES = "18", ("15", "17")
NAMED = (PEOPLE, *PLACES, "11", "14", "06", "10", "04")
"""WordNet's lexicographer files whose capitalised nouns are asked about."""
QUIZ = (
    "Answer this quiz clue: {s}",
    "{s} What is meant?",
    "Which one is it? {s}",
    "Quiz: {s}\nGive the answer and say one more thing about it.",
)
OPENERS = """
Write a short email to
Explain how
Describe the
Give me three reasons why
List five
What are the advantages of
Compare
How can I
Suggest a
Write a story about
Summarize the
Create a plan for
Rewrite the following sentence
Imagine you are
Give an example of
What would happen if
Help me
Define
Outline the steps
Classify
Why is it that
Can you recommend
Draft a
Tell me about
"""
"""Beginnings of prompts that the target writes itself."""
CLUE = re.compile(
    r"\b(this|these)\b (\w+ ){0,2}(country|state|man|city|author|river|film|word|king|president|company|animal|island"
    r"|poet|play|novel|capital|war|bird|planet|sport|game|group|actor|singer|nation|team|instrument)"
)


def paragraphs(path: Path) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "ignore")
    blocks = re.findall(r"<p\b[^>]*>(.*?)</p>", NO_TEXT.sub(" ", text), re.S | re.I)
    return [re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", each))).strip() for each in blocks]


def files(root: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in sorted(root.glob(pattern)) if path.is_file())


def is_plain(sentence: str) -> bool:
    """True for a sentence of prose of 45 to 230 characters."""
    is_whole = 45 <= len(sentence) <= 230 and sentence[0].isupper() and sentence[-1] in ".!?"
    return is_whole and not re.search(r"[<>{}|$\\/=]|\d\.\d", sentence) and len(sentence.split()) > 6


def translations(root: Path, draw: random.Random) -> list[str]:
    prompts = []
    for language, code, region, most in LANGUAGES:
        patterns = (
            GUIDE.format(code),
            HANDBOOK.format(region),
            REFERENCE.format(code),
            *(o.format(code) for o in OTHERS),
        )
        texts = (text for path in files(root, *patterns) for text in paragraphs(path))
        known = sorted({each for text in texts for each in re.split(r"(?<=[.!?]) ", text) if each and is_plain(each)})
        for sentence in draw.sample(known, min(most, len(known))):
            prompts.append(draw.choice(TRANSLATIONS).format(language=language, sentence=sentence))
    return prompts


def summaries(root: Path, news: Path, draw: random.Random) -> list[str]:
    names = ("lee_background.cor", "lee.cor")
    lines = [line.strip() for name in names for line in (news / name).read_text("utf-8", "ignore").splitlines()]
    articles, sections = [line for line in lines if len(line) > 400], []
    for path in files(root, HANDBOOK.format("en-US"), GUIDE.format("en")):
        section = ""
        for text in paragraphs(path):
            section = (section + "\n\n" + text).strip() if len(text) > 120 else section
            if len(section) > 900:
                sections.append(section[:3200])
                section = ""
    draw.shuffle(sections)
    return [draw.choice(SUMMARIES).format(text=text) for text in articles + sections[:650]]


def dictionary(root: Path, pattern: str) -> dict[str, str]:
    """Entries of a dictd database, term -> text of 150 to 1,400 characters."""
    text = gzip.decompress(next(root.glob(pattern)).read_bytes()).decode("utf-8", "ignore")
    entries = {}
    for block in re.split(r"\n\n(?=\S)", text):
        head, _, body = block.partition("\n")
        body = re.sub(r"\[[^\]]*\]|<[^>]*>|\(\d{4}-\d\d-\d\d\)", "", body)
        body = re.sub(r"[{}]", "", re.sub(r"\s+", " ", body)).strip()
        term = re.split(r"\s\\|\n", head)[0].strip()
        if 2 < len(term) < 40 and 150 < len(body) < 1400:
            entries[term] = body
    return entries


def passages(dictionaries: list[dict[str, str]], draw: random.Random) -> list[str]:
    prompts = []
    computing, words, jargon = dictionaries
    for _ in range(900):
        source = draw.choice((computing, words, words, jargon))
        names = draw.sample(sorted(source), draw.randint(3, 5))
        form = draw.choice(("{text}", "[{number}] {text}", "Document {number}: {text}"))
        texts = (form.format(number=k, text=f"{name}: {source[name]}"[:900]) for k, name in enumerate(names, 1))
        passage = "\n\n".join(texts)
        wording = draw.choice(PASSAGES)
        question = draw.choice(QUESTIONS).format(t=draw.choice(names), u=names[0])
        prompts.append(wording.format(passages=passage, question=question))
    return prompts


def facts(root: Path, words: dict[str, str], clues: Path, draw: random.Random) -> list[str]:
    nouns = []
    for line in (root / "wordnet-base/usr/share/wordnet/data.noun").read_text("utf-8", "ignore").splitlines():
        match = re.match(r"\d+ (\d\d) n \w\w (\S+) ", line)
        if match and match[2][0].isupper() and len(match[2]) > 3 and match[1] in NAMED:
            nouns.append((match[1], match[2].replace("_", " ")))
    prompts = []
    for kind, term in draw.sample(nouns, 700):
        prompts.append(draw.choice(PERSON if kind == PEOPLE else PLACE if kind in PLACES else OTHER).format(t=term))
    capitalised = [term for term in words if term[0].isupper() and term.isascii()]
    for term in draw.sample(capitalised, 300):
        prompts.append(draw.choice((OTHER[0], OTHER[3])).format(t=term.lower()))
    sentences = [each for path in sorted(clues.glob("*.json")) for each in json.loads(path.read_text())]
    usable = [each for each in sentences if CLUE.search(each) and 40 < len(each) < 200]
    for sentence in draw.sample(usable, min(500, len(usable))):
        prompts.append(draw.choice(QUIZ).format(s=sentence))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--root", "--news", "--clues", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args, draw = parser.parse_args(), random.Random(77)
    args.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, prompts: list[str]) -> None:
        draw.shuffle(prompts)
        rows = [{"id": f"{name}-{index}", "prompt": prompt} for index, prompt in enumerate(prompts)]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(prompts)}")

    write("translations", translations(args.root, draw))
    write("summaries", summaries(args.root, args.news, draw))
    names = ("dict-foldoc/usr/share/dictd/foldoc.dict.dz", "dict-gcide/usr/share/dictd/gcide.dict.dz")
    dictionaries = [dictionary(args.root, name) for name in (*names, "dict-jargon/usr/share/dictd/*.dict.dz")]
    write("passages", passages(dictionaries, draw))
    write("facts", facts(args.root, dictionaries[1], args.clues, draw))
    (args.out / "openers.txt").write_text(OPENERS.lstrip(), encoding="utf-8")


if __name__ == "__main__":
    main()
