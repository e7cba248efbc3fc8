"""flywheel.yaml: what it says, what it may leave out, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_lines import parse, words_of

from paceline.errors import ConfigError
from paceline.loop.flywheel.config import FlywheelConfig, read_config
from paceline.loop.flywheel.state import TurnState, fixed_of

ROOT = Path(__file__).parents[3]
RECIPE, PAGE = ROOT / "recipes" / "flywheel_tickets.yaml", ROOT / "docs" / "how-to" / "smaller-model.md"
SHORT = "model: smollm2-135m\nrecord: traces\n"


def read(folder: Path, text: str) -> FlywheelConfig:
    file = folder / "flywheel.yaml"
    file.write_text(text, encoding="utf-8")
    return read_config(file)


def test_two_lines_are_enough(tmp_path: Path) -> None:
    config = read(tmp_path, SHORT)
    assert config.record == (Path("traces"),) and config.out == Path("runs/flywheel")
    assert config.student_teaching.minutes == 30 and config.drafter_minutes == 15
    assert config.evals.limit == 200 and config.sampling.at_once == 1
    assert config.student_of(1).layers is None


def test_minutes_are_shared_out_where_nothing_else_is_said(tmp_path: Path) -> None:
    config = read(tmp_path, f"{SHORT}minutes: 20\nteaching: {{max_steps: 5}}\ndrafter: {{loop: {{max_steps: 3}}}}\n")
    assert (
        config.student_teaching.minutes is None
        and config.student_teaching.max_steps == 5
        and config.drafter_minutes is None
    )
    config = read(
        tmp_path, f"{SHORT}minutes: 20\nteaching: {{lr: 2e-3}}\ndrafter: {{minutes: 3}}\nevals: {{scorer: json}}\n"
    )
    assert config.student_teaching.minutes == 10 and config.student_teaching.lr == 2e-3 and config.drafter_minutes == 3
    assert config.evals.limit == 200 and config.is_given("teaching.lr") and not config.is_given("teaching.max_len")


def test_layers_are_said_turn_by_turn(tmp_path: Path) -> None:
    config = read(tmp_path, f"{SHORT}layers: [12, 8]\n")
    assert [config.student_of(turn).layers for turn in (1, 2, 3)] == [12, 8, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SHORT}layer: 3\n", "unknown setting layer: did you mean layers"),
        (f"{SHORT}drafter: {{loop: {{max_stepz: 3}}}}\n", "unknown setting drafter.loop.max_stepz: did you mean"),
        (f"{SHORT}minute: 3\n", "did you mean minutes"),
        (f"{SHORT}num_drafted: 3\n", "did you mean engine.num_drafted"),
        (f"{SHORT}teaching: 3\n", "teaching must hold settings by name"),
        (f"{SHORT}minutes: soon\n", r"minutes cannot be 'soon': docs/how-to/smaller-model.md"),
        (f"{SHORT}minutes: 0\n", "minutes must be above 0"),
        (f"{SHORT}gates: {{most_lost: 2}}\n", "most_lost must be between 0 and 1"),
        ("record: traces\n", "needs a model"),
        ("model: m\n", "needs record"),
        (f"{SHORT}layers: 12\nstudent: {{keep_layers: [0, 1]}}\n", "layers says it turn by turn"),
        (f"{SHORT}layers: [8, 12]\n", "layers must not rise, unlike 8, 12"),
        (f"{SHORT}engine: {{model: other}}\n", "the model is named by model"),
        (f"{SHORT}engine: {{drafter: ngram}}\n", "the flywheel makes its own"),
        (f"{SHORT}evals: {{sources: [a]}}\n", "name a suite of your own by suite"),
        ("- a\n", "holds no settings by name"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_what_cannot_be_is_said_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_the_page_shows_what_is_taken(tmp_path: Path) -> None:
    """Its file, and every command of the page and of the recipe's first lines."""
    text = PAGE.read_text(encoding="utf-8")
    config = read(tmp_path, re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])
    assert config.layers == (12, 8) and config.price_per_core_hour == 0.05
    lines = re.findall(
        r"^(?:    |#   )(paceline .+)$",
        text.partition("\n## Turn after turn")[2] + RECIPE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(lines) == 8
    for line in lines:
        parse(words_of(line))


def test_the_recipe_is_one(tmp_path: Path) -> None:
    config = read_config(RECIPE)
    assert config.model == "smollm2-135m" and config.layers == (12, 8) and config.student_teaching.minutes == 18
    assert config.drafter.loop.optim.lr == 1e-3 and config.drafter_minutes == 9


def test_only_lengths_gates_and_prices_of_a_turn_under_way_may_change(tmp_path: Path) -> None:
    state = TurnState(tmp_path / "turn-1")
    state.check(read(tmp_path, SHORT))
    state.check(
        read(
            tmp_path, f"{SHORT}minutes: 5\ngates: {{most_lost: 0.1}}\nprice_per_core_hour: 1\nteaching: {{epochs: 4}}\n"
        )
    )
    with pytest.raises(
        ConfigError, match=r"turn-1 was begun with other settings \(teaching.lr: 0.001 there, 0.002 now\)"
    ):
        state.check(read(tmp_path, f"{SHORT}teaching: {{lr: 2e-3}}\n"))
    assert fixed_of(read(tmp_path, SHORT)) == state.asked
