"""Distillation of a teacher and its answers into a smaller student, as a library call; `paceline distill` calls it.

from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.run import distill
result = distill(DistillConfig(out=Path("runs/student"), answers=(Path("runs/answers/answers"),)))
llm = LLM(str(result.student))
"""
