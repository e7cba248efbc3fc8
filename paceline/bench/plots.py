"""Figures of a benchmark, drawn when matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from paceline.bench.decode import Result, name_of
from paceline.errors import CacheError


def draw(folder: Path, results: list[Result]) -> str | None:
    """survival.png and tokens_per_s.png; returns a notice instead when matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return "no figures: pip install matplotlib to have them drawn"
    matplotlib.use("Agg")
    try:
        _survival(folder / "survival.png", results)
        _speed(folder / "tokens_per_s.png", results)
    except OSError as error:
        raise CacheError(f"cannot write the figures into {folder} ({error.strerror or error}): choose another --out") from error
    return None


def _survival(path: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        if result.survival:
            axes.plot(range(1, len(result.survival) + 1), result.survival, marker="o", label=name_of(result))
    axes.set(xlabel="i", ylabel="share of rounds whose first i drafts stood", ylim=(0, 1))
    if axes.lines:
        axes.legend()
    figure.savefig(path)


def _speed(path: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.5 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots()
    rates = [result.tokens_per_s for result in results]
    below = [result.tokens_per_s - result.tokens_per_s_range[0] for result in results]
    above = [result.tokens_per_s_range[1] - result.tokens_per_s for result in results]
    axes.barh([name_of(result) for result in results], rates, xerr=[below, above], capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second (bars: median, whiskers: slowest and fastest repetition)")
    figure.savefig(path)
