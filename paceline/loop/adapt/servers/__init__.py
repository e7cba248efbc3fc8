"""Deploys drafters on running servers (paceline, vLLM, SGLang), and reads their counters."""
