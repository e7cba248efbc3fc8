"""Servers that a drafter is deployed on: paceline, vLLM and SGLang."""
