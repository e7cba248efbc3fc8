"""Searches settings of a drafter's training by trials, as a library call; `paceline search` calls it.

from paceline.loop.search.config import SearchConfig
from paceline.loop.search.run import search
result = search(SearchConfig(out=Path("runs/search"), answers=(Path("runs/answers/answers"),), minutes=60))
llm = LLM("smollm2-135m", drafter=str(result.drafter))
"""
