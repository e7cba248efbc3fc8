"""Reports from the Jinja templates in `templates/`: text, Markdown, HTML pages and the animated picture of `paceline compare`.

Whatever a model or a user wrote is escaped in HTML and SVG, and control characters, which no page can hold, are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.tables import printable

Plot = tuple[str, str]
"""Title and SVG element; the element is "" when there is nothing to draw."""


def render(template: str, **values: Any) -> str:
    """The text of `templates/<template>.j2`."""
    return _environment().get_template(template + ".j2").render(values)


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["number"] = number
    made.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return made


def number(value: Any, digits: int = 2) -> str:
    """With commas; a dash for what is none."""
    return "-" if not isinstance(value, int | float) else f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def write_load_report(run: RunFolder, draw: Callable[[], list[Plot]], **values: Any) -> str | None:
    """report.md and report.html of a server under load; returns a notice when the page had to be left out.

    `draw` makes its plots; `values`: title, about, note, figures, listed and settings, as `load.html.j2` shows them.
    """
    run.write("report.md", render("load.md", **values))
    try:
        drawn = draw()
    except ConfigError as error:
        return f"no report.html: {error}"
    run.write("report.html", render("load.html", drawn=drawn, **values))
    return None
