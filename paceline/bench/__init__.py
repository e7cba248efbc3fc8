"""Benchmarks in the real engine: plain decoding, then each drafter, in one process, next to the machine's ceiling."""
