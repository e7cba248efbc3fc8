"""The page that reports stand on: one file that needs no network, on a phone as on a desk, in light as in dark.

Whatever a model or a user wrote is escaped, and a content security policy forbids scripts and loading anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tables import escaped

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas; margin: 0 auto; padding: 1rem;
  max-width: 75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; border-bottom: 1px solid GrayText; padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
.plots { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  align-items: start; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; max-width: 32rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid color-mix(in srgb, CanvasText 15%, Canvas);
  vertical-align: top; }
.figures th, .figures td { white-space: nowrap; }
.figures .number { text-align: right; }
pre { white-space: pre-wrap; margin: .25rem 0 0; padding: .75rem; font: .85rem/1.45 ui-monospace, monospace;
  background: color-mix(in srgb, CanvasText 6%, Canvas); border-radius: .375rem; }
p.note { font-size: .9rem; margin: .25rem 0; }
strong.bad { color: #d55e00; }
""".strip()
HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    f"<title>{{title}}</title>\n<style>\n{STYLE.replace('{', '{{').replace('}', '}}')}\n</style>\n</head>\n<body>\n"
)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it, as HTML; an empty body is left out."""

    title: str
    body: str


def document(title: str, sections: Iterable[Section]) -> str:
    """The whole page."""
    parts = [f"<section>\n<h2>{escaped(each.title)}</h2>\n{each.body}\n</section>" for each in sections if each.body]
    body = f"<h1>{escaped(title)}</h1>\n" + "\n".join(parts)
    return HEAD.format(title=escaped(title)) + body + "\n</body>\n</html>\n"


def plot_grid(plots: Iterable[tuple[str, str]]) -> str:
    """Titles and SVG elements side by side; "" when nothing was drawn."""
    drawn = [f"<figure><figcaption>{escaped(title)}</figcaption>\n{svg}\n</figure>" for title, svg in plots if svg]
    return '<div class="plots">\n' + "\n".join(drawn) + "\n</div>" if drawn else ""


def pair_table(pairs: Sequence[tuple[str, Any]]) -> str:
    """Names and values; "" without any."""
    lines = [f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>' for name, value in pairs]
    return "<table>\n" + "\n".join(lines) + "\n</table>" if lines else ""
