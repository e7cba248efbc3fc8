"""Searches settings of a drafter's training by trials, as a library call; `paceline search` calls it.

    from paceline.loop.search import search
    from paceline.loop.search.config import SearchConfig
    result = search(SearchConfig(out=Path("runs/search"), answers=(Path("runs/answers/answers"),), minutes=60))
    llm = LLM("smollm2-135m", drafter=str(result.drafter))

The import is quick: PyTorch and Optuna are loaded by the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.loop.search.config import SearchConfig
from paceline.report.tables import Progress

if TYPE_CHECKING:
    from paceline.loop.search.run import SearchResult


def search(config: SearchConfig, *, progress: Progress | None = None) -> SearchResult:
    """Trains drafters with different settings, and returns the one that serves held-out prompts fastest. If none is
    clearly faster than the drafter with the settings that `paceline train` plans, returns that (the planner's choice).

    A call with the same folder resumes the search. Raises ConfigError (also if Optuna is missing), PromptError for too
    few prompts, CacheError, and the errors of loading models.
    """
    from paceline.loop.search.run import run

    return run(config, progress or Progress())
