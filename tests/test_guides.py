"""The pages of docs/: links and anchors lead somewhere, commands are ones that we take, every page begins in the same
way."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import in_blocks, parse, section, words_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
BESIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
WITHOUT_COMMANDS = {"reference/glossary.md", "project/log/2026-11.md", "project/log/2026-12.md"}
GUIDES = {
    "From a vLLM on eight GPUs to a drafter for it": "how-to/vllm-sglang.md",
    "From a GGUF file to a drafter": "how-to/vllm-sglang.md",
    "From a published EAGLE-3 to one of yours": "explanation/drafters.md",
    "On a MacBook": "tutorials/first-answer.md",
}
"""Short walk-throughs: a heading, and the page that has it."""
MOST_LINES = 24


@functools.cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings by GitHub and mkdocs.yml's slugify: a repeated one is numbered."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        names.append(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return {f"{each}-{count}" if (count := names[:place].count(each)) else each for place, each in enumerate(names)}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere: no such file or heading, or, from a page of the site, a file outside docs/."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        outside = page.is_relative_to(DOCS) and not file.is_relative_to(DOCS)
        if outside or not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize(
    "page",
    [*PAGES, *BESIDE, *sorted(ROOT.glob("drafters/*/*/README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, twice\n\n## Again\n\n## Again\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-title-twice) [b](other.md#again-1) [c](none.md) [d](other.md#title) [e](#here)\n\n# Here\n"
    )
    assert broken(page) == ["none.md", "other.md#title"]


def test_every_page_is_in_the_site() -> None:
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml, whose tags name Python functions that are not installed here."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    site: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def named(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        return [name for each in values for name in named(each)]

    assert sorted(named(site["nav"])) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_the_page_of_the_python_api_is_current() -> None:
    page = runpy.run_path(str(DOCS / "make_python.py"))["render"]()
    assert page == (DOCS / "reference" / "python.md").read_text(encoding="utf-8"), "run python docs/make_python.py"


@pytest.mark.slow
def test_pages_that_are_named_elsewhere_exist() -> None:
    """In code, tests, recipes, messages: every docs/...md is a page."""
    left_out = (
        ":!docs/project/log",
        ":!experiments/decode_vs_peers_llama.py",
    )  # names of their time; llama.cpp's own docs
    search = ["git", "grep", "-IhoE", r"\bdocs/[a-zA-Z0-9/_-]+\.md", "--", *left_out]
    listed = subprocess.run(search, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in listed.stdout.split() if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_says_what_it_is_for_and_shows_three_commands(page: Path) -> None:
    title, sentence, *rest = page.read_text(encoding="utf-8").split("\n\n", 3)
    assert (
        title.startswith("# ")
        and "\n" not in title
        and sentence[0].isupper()
        and sentence.rstrip().endswith((".", ":"))
    )
    if str(page.relative_to(DOCS)) not in WITHOUT_COMMANDS:
        block = re.match(r"```(?:sh|python)\n(.*?)```", rest[0] + "\n\n" + rest[1], re.DOTALL)
        assert block and 3 <= len([line for line in block[1].splitlines() if line.strip()]) <= 6


def guide(heading: str) -> str:
    return section(DOCS / GUIDES[heading], heading)


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.name)
def test_commands_need_the_checkout_and_an_active_environment(page: Path) -> None:
    """`paceline` is on no package index, and a command that works in one terminal works in the next page's."""
    if page.parent.name != "log":
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"\.venv/bin/(?!activate)\w+|pip install [^`\n]*\bpaceline(?:\[\w+\]|\b(?!\.)).*", text) == []


@pytest.mark.parametrize("heading", GUIDES)
def test_a_guide_is_short(heading: str) -> None:
    assert len([line for line in guide(heading).splitlines() if line.strip()]) <= MOST_LINES


def lines() -> list[str]:
    """Commands of every page but the log and the commands' own: in blocks and indented; in guides also in sentences."""
    commands = [line for heading in GUIDES for line in re.findall(r"`(paceline \w[^`]* -[^`]*)`", guide(heading))]
    for page in [*PAGES, *BESIDE[:2]]:
        if page.parent.name != "log" and page.name != "cli.md":
            text = page.read_text(encoding="utf-8").replace("\\\n", " ")
            commands += [*in_blocks(page), *re.findall(r"^    (paceline .+)$", text, re.MULTILINE)]
    return sorted(set(commands))


@pytest.mark.parametrize("line", lines())
def test_a_command_line_is_taken(line: str) -> None:
    parse(words_of(" ".join(line.split())))


def test_the_tutorial_on_drift_writes_its_requests(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (block,) = re.findall(
        r"```sh\n(.*?)```", section(DOCS / "tutorials" / "keep-it-fitted.md", "1. Requests of two kinds"), re.DOTALL
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    kinds = {name: tmp_path / "runs" / "fitted" / f"{name}-requests.jsonl" for name in ("code", "train", "heldout")}
    bodies = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in kinds.items()}
    assert {name: len({str(body) for body in each}) for name, each in bodies.items()} == {
        "code": 60,
        "train": 120,
        "heldout": 60,
    }
    assert bodies["train"][0]["messages"][-1]["role"] == "user" and bodies["code"][0]["max_tokens"] == 64


def test_the_table_of_errors_has_every_code_that_the_server_sends() -> None:
    sources = [path.read_text() for path in (ROOT / "paceline" / "serve").rglob("*.py")]
    codes = {code for text in sources for code in re.findall(r'(?:code=|\bknown\()"(\w+)"', text)}
    unread = {"aborted", "stopped"}  # the client has gone; sent as draining
    page = (DOCS / "reference" / "http-api.md").read_text()
    table = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    assert len(codes) > 20 and codes - unread - set(re.findall(r"`(\w+)`", table)) == set()


def test_commands_were_found() -> None:
    assert len(lines()) > 120


def test_a_wrong_one_would_be_seen() -> None:
    wrong = {
        "paceline serve --no-such-option": "no-such-option",
        "paceline fly": "fly",
        "paceline generate --max-tokens many": "many|valid integer",
    }
    for line, message in wrong.items():
        with pytest.raises(Exception, match=message):
            parse(words_of(line))
