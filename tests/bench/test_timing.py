"""Token times: recorded in the real engine, written and read back, and drawn as a picture that stays well-formed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from small_llm import fake_llm, tiny_model
from timings import HOSTILE, story
from typer.testing import CliRunner

from paceline.bench.pages.timing import (
    CELLS,
    HOLD_S,
    MOST_LINES,
    NAME,
    TimedAnswer,
    TimedToken,
    Timing,
    read_timing,
    record,
    runs,
    svg,
    timed,
)
from paceline.cli import app
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.runs.folder import RunFolder
from paceline.types import SamplingParams

SVG = "{http://www.w3.org/2000/svg}"


def recorded(temperature: float = 0.0, max_tokens: int = 24, accuracy: float = 0.7) -> Timing:
    target = FakeTarget(vocab_size=258, max_len=128)
    llm = fake_llm(target)
    llm.config = replace(llm.config, speculate="full")
    drafter = ScriptedDrafter(target, accuracy=accuracy)
    llm.use_drafter(drafter)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=4, ignore_eos=True)
    timing = record(llm, list(b"What is the time?"), params, prompt="What is the time?", repeat=3)
    assert llm.drafter is drafter, "the drafter is left as it was"
    return timing


def test_both_ways_are_recorded_and_say_the_same() -> None:
    timing = recorded()
    assert timing.first_difference is None and "the same 24 tokens" in timing.verdict
    assert timing.off.text == timing.on.text
    for answer in (timing.off, timing.on):
        times = [token.at_s for token in answer.tokens]
        assert len(times) == 24 and times == sorted(times) and times[0] > 0
    assert [token.round for token in timing.off.tokens] == list(range(24))
    assert not any(token.is_drafted for token in timing.off.tokens)
    assert timing.on.drafter == "scripted" and timing.off.drafter == "none"


@pytest.mark.slow
def test_the_tokens_of_a_round_come_together_drafts_first() -> None:
    rounds: dict[int, list[TimedToken]] = {}
    for token in recorded().on.tokens:
        rounds.setdefault(token.round, []).append(token)
    assert len(rounds) < 20 and max(map(len, rounds.values())) > 2
    for number, tokens in rounds.items():
        assert len({token.at_s for token in tokens}) == 1
        assert [token.is_drafted for token in tokens] == [True] * (len(tokens) - 1) + [False]
        assert number or len(tokens) == 1, "prefill gives one token"
    stamps = [tokens[0].at_s for tokens in rounds.values()]
    assert len(set(stamps)) == len(stamps)


def test_a_headline_says_no_speedup_that_cannot_be() -> None:
    def answer(last_s: float, num_rounds: int, count: int) -> TimedAnswer:
        tokens = [
            TimedToken("x", last_s * (at + 1) / count, at * num_rounds // (count - 1), False) for at in range(count)
        ]
        return TimedAnswer("d", tuple(tokens))

    busy = replace(story(), off=answer(9.0, 119, 120), on=answer(1.0, 60, 120))
    assert busy.speedup is None and busy.verdict.startswith("the machine was busy: repeat, the same 120 tokens")
    few = replace(story(), off=answer(1.8, 12, 13), on=answer(1.0, 6, 13))
    assert few.verdict.startswith("13 tokens are too few for a verdict") and few.speedup == pytest.approx(1.8)
    enough = replace(story(), off=answer(1.8, 119, 120), on=answer(1.0, 60, 120))
    assert enough.verdict.startswith("1.80x as fast")


def test_an_interrupted_recording_leaves_the_drafter() -> None:
    llm = fake_llm(FakeTarget(vocab_size=258, max_len=128))
    llm.config = replace(llm.config, speculate="full")
    drafter = ScriptedDrafter(llm.target)  # type: ignore[arg-type]
    llm.use_drafter(drafter)

    def stop(what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(llm, list(b"hi"), SamplingParams(max_tokens=4), prompt="hi", on_answer=stop)
    assert llm.drafter is drafter


def test_figures() -> None:
    tokens = tuple(
        TimedToken("x", at, number, drafted)
        for at, number, drafted in ((0.5, 0, False), (1.0, 1, True), (1.0, 1, False))
    )
    answer = TimedAnswer("ngram", tokens)
    assert (answer.total_s, answer.tokens_per_s, answer.tokens_per_round) == (1.0, 3.0, 2.0)
    assert TimedAnswer("none", tokens[:1]).tokens_per_round == 1.0


@pytest.mark.parametrize(("end_s", "speed"), [(8.0, 1.0), (3.0, 1.0), (2.9, 0.5), (0.8, 0.25), (0.3, 0.1), (0.01, 0.1)])
def test_a_replay_is_slow_enough_to_be_seen(end_s: float, speed: float) -> None:
    last = TimedAnswer("none", (TimedToken("x", end_s, 0, False),))
    assert replace(story(), off=last, on=last).usual_speed == speed


def test_sampled_answers_may_differ_and_it_says_so() -> None:
    timing = story()
    other = replace(timing, temperature=1.0, first_difference=3)
    assert "sampled: another text of the same distribution" in other.verdict
    near_tie = replace(timing, first_difference=3)
    assert "the same first 3 tokens, then bfloat16 is rounded elsewhere" in near_tie.verdict
    mocked = replace(timing, on=TimedAnswer("x", timing.on.tokens, lossless=False))
    assert "NOT LOSSLESS" in mocked.verdict


def test_half_characters_come_whole_and_the_end_token_has_no_text() -> None:
    llm = fake_llm(FakeTarget(vocab_size=258, max_len=64))
    sequence = None
    for chunk in llm.stream(list(b"hi"), SamplingParams(max_tokens=4, ignore_eos=True)):
        sequence = chunk.sequence
    assert sequence is not None
    sequence.tokens = [*b"hi", *"aé".encode(), ByteTokenizer.eos_token_id]
    sequence.finish_reason = "stop"
    tokens = timed(sequence, ByteTokenizer().stream(), "none").tokens
    assert [token.text for token in tokens] == ["a", "", "é", ""]
    times = sequence.timings
    assert [token.at_s for token in tokens] == [stamp - times.arrival_s for stamp in times.token_s]


def test_written_and_read_back(tmp_path: Path) -> None:
    timing, run = story(), RunFolder.create("compare", {}, tmp_path / "run")
    run.write_json(NAME, timing)
    assert read_timing(run.path) == read_timing(run.path / NAME) == timing


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.pop("off"),
        lambda read: read.update(version=99),
        lambda read: read["on"].update(tokens=[]),
        lambda read: read["on"]["tokens"][0].update(at_s=float("nan")),
        lambda read: read["on"]["tokens"][0].update(at_s="soon"),
        lambda read: read["on"]["tokens"][-1].update(at_s=0.001),
        lambda read: read["on"]["tokens"].append(7),
        lambda read: read.update(off=[1, 2]),
    ],
)
def test_times_that_cannot_be_shown(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    run = RunFolder(tmp_path)
    file = run.write_json(NAME, story())
    read = json.loads(file.read_text())
    change(read)
    file.write_text(json.dumps(read))
    with pytest.raises(ConfigError, match="holds no token times"):
        read_timing(tmp_path)


def test_no_times_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from wants a folder of paceline compare"):
        read_timing(tmp_path)
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_timing(tmp_path)


# The picture


def test_the_picture_is_well_formed_and_complete() -> None:
    timing = story()
    picture = ElementTree.fromstring(svg(timing))
    pieces = [each.text or "" for each in picture.iter(f"{SVG}text") if "mono" in each.get("class", "")]
    text = re.sub(r"\s", "", timing.off.text)
    assert re.sub(r"\s", "", "".join(pieces)) == text * 2
    groups = [each.get("class", "") for each in picture.iter(f"{SVG}g") if each.get("class", "").startswith("r ")]
    style = next(picture.iter(f"{SVG}style")).text or ""
    assert len(groups) == len({(token.round) for token in timing.off.tokens}) + len(
        {token.round for token in timing.on.tokens}
    )
    for group in groups:
        assert f"@keyframes {group.split()[1]}{{" in style
    assert "prefers-reduced-motion" in style


def test_rounds_appear_in_the_pictures_time() -> None:
    timing = story()
    end_s = max(timing.off.total_s, timing.on.total_s)
    for speed in (1.0, 0.5):
        loop_s = end_s / speed + HOLD_S
        begins = dict(re.findall(r"@keyframes (\w+)\{0%\{opacity:0\}([\d.]+)%", svg(timing, speed)))
        for prefix, answer in (("a", timing.off), ("b", timing.on)):
            for token in answer.tokens:
                assert float(begins[f"{prefix}{token.round}"]) / 100 * loop_s == pytest.approx(
                    token.at_s / speed, abs=0.001
                )
        assert f"shown at {speed:g}x speed" in svg(timing, speed) or speed == 1


def test_what_a_model_said_stays_text() -> None:
    picture = svg(story(HOSTILE))
    root = ElementTree.fromstring(picture)
    assert {each.tag.removeprefix(SVG) for each in root.iter()} == {
        "svg", "style", "rect", "text", "tspan", "g", "clipPath"
    }  # fmt: skip
    assert not any(name.lower().startswith("on") or "href" in name for each in root.iter() for name in each.attrib)
    assert "<script" not in picture and "&lt;scri" in picture


def test_lines_break_between_words_and_fit() -> None:
    pieces = ["word" * 3 + " "] * 20 + ["\n\n", "x" * (2 * CELLS + 5), "\t字" * 30]
    answer = TimedAnswer("none", tuple(TimedToken(text, 0.1, number, False) for number, text in enumerate(pieces)))
    text_runs = list(runs(answer))
    assert all(run.cell + run.width <= CELLS for run in text_runs)
    assert {run.text for run in text_runs if run.text.startswith("word")} == {"wordwordword"}
    assert [run.width for run in text_runs if "x" in run.text][:2] == [CELLS, CELLS]
    gaps = {run.line for run in text_runs}
    assert len(gaps) == max(gaps), "one empty line"
    assert re.sub(r"\s", "", "".join(run.text for run in text_runs)) == re.sub(r"\s", "", answer.text)


def test_long_answers_are_cut_and_it_says_so() -> None:
    long = TimedAnswer("none", tuple(TimedToken("line\n", 0.1 * number, number, False) for number in range(1, 100)))
    picture = svg(replace(story(), off=long))
    assert "and so on" in picture and picture.count(">line<") == MOST_LINES
    assert "and so on" not in svg(story())


# The command


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["compare", *words])
    if done.exception:
        raise done.exception
    return done.stdout


def test_a_run_leaves_page_times_and_picture(tmp_path: Path) -> None:
    model, out, picture = tiny_model(tmp_path / "model"), tmp_path / "run", tmp_path / "demo.svg"
    words = [
        "Say a a a a a a a a a",
        "--model",
        str(model),
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-tokens",
        "12",
    ]
    line = json.loads(run(*words, "--repeat", "1", "--out", str(out), "--svg", str(picture), "--json").splitlines()[-1])
    assert line["first_difference"] is None and line["lossless"] is True
    assert line["on"]["num_tokens"] == line["off"]["num_tokens"]
    assert {file.name for file in out.iterdir()} == {"config.json", "command.txt", NAME, "compare.html"}
    assert read_timing(out).on.text == line["text"]
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    (out / "compare.html").unlink()
    again = json.loads(run("--from", str(out), "--json").splitlines()[-1])
    assert again["speedup"] == line["speedup"] and (out / "compare.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no prompt"),
        ((" ",), "the prompt is empty"),
        (("hi", "--from", "x"), "leave the prompt out"),
        (("--from", "x", "--raw", "--repeat", "2"), "--from answers nothing: leave --raw, --repeat out"),
        (("--from", "x", "--model", "y", "--max-tokens", "9"), "leave --model, --max-tokens out"),
        (("--from", "/no/such/run"), "there is no /no/such/run"),
        (("hi", "--drafter", "none"), "nothing to compare without drafts"),
        (("hi", "--repeat", "0"), "--repeat must be at least 1"),
        (("hi", "--svg-speed", "0"), "--svg-speed must be between"),
        (("hi", "--raw", "--system", "be brief"), "leave --raw out"),
    ],
)
def test_bad_words(words: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, PromptError), match=re.escape(message)) as raised:
        run(*words)
    assert isinstance(raised.value, PacelineError)
