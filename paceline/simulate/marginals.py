"""Reads marginals: acceptance chances by draft position and candidate rank.

    read_marginals("greedy")               # or sampled: `marginals.json`, measured with smollm2-135m's shipped drafter
    read_marginals("runs/bench-decode-1")  # the setting with the most rounds; runs/bench-decode-1:default: one drafter
    read_marginals("mine.json")            # {"marginals": {"tried": [...], "stood": [[...], ...]}} or [[0.7, 0.1], ...]

They are built in, or counted by `paceline bench decode --speculate tree:32`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.plan.marginals import Marginals, Tally
from paceline.simulate.files import is_amount, read_json, with_name

BUILT_IN = Path(__file__).with_name("marginals.json")
REMEDY = (
    "give greedy, sampled, a run of paceline bench decode --speculate tree:32, "
    'or a JSON file with its counts under "marginals" '
    "or with chances by slot and rank"
)


def built_in() -> dict[str, dict[str, Any]]:
    """Returns name -> record, for the records built into paceline. A record has counts of how often the candidates of a
    drafter were the target's token:

    - "about": description of the record;
    - "tried": by draft position, number of rounds in which the top candidate of every earlier position was the target's
      token;
    - "stood": by draft position and candidate rank, number of the "tried" rounds in which this candidate was the
      target's token."""
    return read_json(BUILT_IN, "install paceline again")


def read_marginals(text: str) -> Marginals:
    """Returns marginals: chances that a drafter's candidate is the target's token, by draft position and candidate
    rank. `text`: a built-in name, a run folder, RUN:DRAFTER (one of the drafters in a run), or a JSON file. Raises
    ConfigError for any other text, or a file without marginals."""
    if text in (known := built_in()):
        return Marginals.of(Tally.of(known[text]))
    path, drafter = with_name(text)
    file = Path(os.path.expanduser(path))
    if not path or not os.path.exists(file):
        raise ConfigError(f"--marginals {text!r} is not known: {REMEDY}")
    return marginals_in(read_json(file / "results.json" if file.is_dir() else file, REMEDY), text, drafter)


def marginals_in(content: Any, name: str, drafter: str = "") -> Marginals:
    """Returns the marginals (acceptance chances by draft position and candidate rank) in `content`, the content of a
    JSON file. `name`: the file's name, for errors. `drafter`: drafter to use if the file has several; "" selects the
    one with the most rounds. Raises ConfigError if there are no marginals."""
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        return Marginals.of(Tally.of(_of_run(content["results"], name, drafter)))
    marginals = content.get("marginals") if isinstance(content, dict) else content
    if isinstance(marginals, dict):
        return Marginals.of(Tally.of(marginals))
    if not isinstance(marginals, list) or not all(
        isinstance(own, list) and all(map(is_amount, own)) for own in marginals
    ):
        raise ConfigError(f"{name} holds no marginals: {REMEDY}")
    return Marginals(tuple(tuple(map(float, own)) for own in marginals))


def _of_run(results: list[dict[str, Any]], name: str, drafter: str) -> dict[str, Any]:
    known = [each for each in results if each.get("marginals")]
    chosen = [each for each in known if not drafter or drafter in (each.get("drafter"), each.get("drafter_name"))]
    if not chosen:
        names = (
            ", ".join(dict.fromkeys(str(each.get("drafter")) for each in known)) or "none that was asked for candidates"
        )
        raise ConfigError(f"{name} has no marginals{f' of {drafter!r}' if drafter else ''}: it holds {names}; {REMEDY}")
    return max(chosen, key=lambda each: each["marginals"]["tried"][0])["marginals"]
