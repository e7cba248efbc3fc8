"""Config dataclasses as options: names, types, defaults, help from the source, errors that name the option."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from paceline.bounds import check
from paceline.commands.options import Changed, Only, Opt, Without, options, size
from paceline.config import EngineConfig
from paceline.errors import ConfigError, ContextLengthError
from paceline.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Ovenlike:
    """Settings with a field of every kind."""

    out: Path
    """Where it goes."""
    max_heat: int | None = None
    """Hottest, in degrees; without, what `fuel` gives. `None` stays."""
    fuel: Annotated[str, ("gas", "wood")] = "gas"
    mode: Literal["slow", "fast"] = "slow"
    trays: tuple[int, ...] = (1, 2)
    """How many of each kind."""
    heats: tuple[float, ...] = (0.0, 0.5)
    layers: tuple[int, ...] | None = None
    tags: tuple[str, ...] = ()
    room: Annotated[int, "bytes"] = 4 * 2**20
    limit: Annotated[int, "bytes"] | None = None
    is_open: bool = False
    """Leave it open."""
    light: bool = True
    causal: bool | None = None
    inner: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        if self.max_heat is not None and self.max_heat < 1:
            raise ConfigError("max_heat must be at least 1 at any mode; lower max_heat or raise trays")


Oven = Annotated[Ovenlike, Without("inner")]
CHANGED = Changed(fuel=Opt("--wood-or-gas", "-f", help="Which.", default="wood"), tags=Opt(comma=True, default=("q",)))
NOT_ASKED = Without("logit_bias", "stop_token_ids", "grammar", "lossy", "prediction")


def made_of(command: Any) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(options(command))
    return app


def bake(
    word: Annotated[str, typer.Argument()], oven: Oven, loud: Annotated[bool, typer.Option("--loud")] = False
) -> Any:
    """Bake a word."""
    return word, oven, loud


def given_by(command: Any, *words: str) -> Any:
    """Value that the command returns."""
    return CliRunner().invoke(made_of(command), list(words), catch_exceptions=False, standalone_mode=False).return_value


def test_defaults_are_the_fields_own() -> None:
    assert given_by(bake, "bread", "--out", "x") == ("bread", Ovenlike(Path("x")), False)


def test_every_kind_of_field_is_read() -> None:
    words = (
        "bread --out x --max-heat 3 --fuel wood --mode fast --trays 3,4 --heats 1 --layers 7 --tags a --tags b --room "
        "1K"
    )
    _, oven, is_loud = given_by(
        bake, *words.split(), "--limit", "2", "--is-open", "--no-light", "--no-causal", "--loud"
    )
    assert oven == Ovenlike(
        Path("x"), 3, "wood", "fast", (3, 4), (1.0,), (7,), ("a", "b"), 1024, 2, is_open=True, light=False, causal=False
    )
    assert is_loud


def test_help_is_the_literal_under_the_field_with_options_names() -> None:
    shown = CliRunner().invoke(made_of(bake), ["--help"], terminal_width=200).output
    assert "Hottest, in degrees; without, what --fuel gives. None stays." in shown
    assert "gas|wood" in shown and "slow|fast" in shown
    assert "[default: 1,2]" in shown and "[default: 4M]" in shown and "[default: 0,0.5]" in shown
    assert "--out <path>" in shown and "[required]" in shown
    assert "--inner" not in shown and "--no-is-open" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-heat 0", "--max-heat must be at least 1 at any mode; lower --max-heat or raise trays"),
        ("--fuel coal", "--fuel must be one of gas, wood, not 'coal'"),
        ("--mode off", "--mode must be one of slow, fast, not 'off'"),
        ("--trays one", "--trays 'one' is no list of numbers: write it as 1,8"),
        ("--room lots", "--room lots is no size: write it as 512M"),
    ],
)
def test_errors_name_the_option_as_it_is_typed(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given_by(bake, "bread", "--out", "x", *words.split())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("too hot: lower max_heat, or raise max_heat.", "too hot: lower --max-heat, or raise --max-heat."),
        ("the oven holds 2 (max_heat=3)", "the oven holds 2 (--max-heat=3)"),
        ("fuel is damp, no_field and light", "fuel is damp, no_field and light"),
        (
            "there is no runs/max_heat/x, max_heat.json or my-max_heat",
            "there is no runs/max_heat/x, max_heat.json or my-max_heat",
        ),
    ],
)
def test_errors_of_the_library_name_the_options_of_the_command(raised: str, message: str) -> None:
    def burn(oven: Oven) -> None:
        raise ContextLengthError(raised)

    with pytest.raises(ContextLengthError) as caught:
        given_by(burn, "--out", "x")
    assert str(caught.value) == message
    with pytest.raises(ContextLengthError) as caught:
        options(burn)(oven=Ovenlike(Path("x")))
    assert str(caught.value) == raised


def test_a_command_changes_what_it_asks_for() -> None:
    def roast(oven: Annotated[Ovenlike, Only("out", "tags", "fuel"), CHANGED]) -> Any:
        return oven

    def empty(oven: Annotated[Ovenlike, Only("out", "trays"), Changed(trays=Opt(default=()))]) -> Any:
        return oven

    assert given_by(roast, "--out", "x") == Ovenlike(Path("x"), fuel="wood", tags=("q",))
    assert given_by(roast, "--out", "x", "-f", "gas", "--tags", "a, b") == Ovenlike(
        Path("x"), fuel="gas", tags=("a", "b")
    )
    assert given_by(empty, "--out", "x") == Ovenlike(Path("x"), trays=())
    shown = CliRunner().invoke(made_of(roast), ["--help"], terminal_width=200).output
    assert "Which." in shown and "--trays" not in shown
    with pytest.raises(ConfigError, match="--wood-or-gas must be one of"):
        given_by(roast, "--out", "x", "-f", "coal")


def test_called_with_dataclasses_it_is_the_plain_function() -> None:
    assert options(bake)("bread", Ovenlike(Path("y")), loud=True) == ("bread", Ovenlike(Path("y")), True)
    assert options(bake)(word="bread", oven=Ovenlike(Path("y"))) == ("bread", Ovenlike(Path("y")), False)


def test_a_field_no_option_can_be_made_of_is_a_mistake_in_the_command() -> None:
    def wrong(oven: Ovenlike) -> None: ...

    def unknown(oven: Annotated[Ovenlike, Without("inner", "colour")]) -> None: ...

    def twice(oven: Oven, other: Oven) -> None: ...

    with pytest.raises(TypeError, match="leave the field out"):
        options(wrong)
    with pytest.raises(TypeError, match="Ovenlike has no field colour"):
        options(unknown)
    with pytest.raises(ValueError, match="duplicate parameter name"):
        options(twice)


def test_the_engines_settings() -> None:
    def ask(engine: EngineConfig, sampling: Annotated[SamplingParams, NOT_ASKED]) -> Any:
        return engine, sampling

    words = ("--max-batch", "2", "--kv-memory", "123", "--stop", ".", "--temperature", "0.5")
    assert given_by(ask, *words) == (
        EngineConfig(max_batch=2, kv_memory=123),
        SamplingParams(temperature=0.5, stop=(".",)),
    )
    with pytest.raises(ConfigError, match="--max-batch must be at least 1"):
        given_by(ask, "--max-batch", "0")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512M", 512 * 2**20), ("2g", 2**31), ("1.5GB", 3 * 2**29), ("1GiB", 2**30), ("4096", 4096), (None, None)],
)
def test_sizes(text: str | None, num_bytes: int | None) -> None:
    assert size("--kv-memory", text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1G", "nan", "inf", "2X"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        size("--kv-memory", text)
