"""The servers that a drafter is put on: ours, vLLM and SGLang."""
