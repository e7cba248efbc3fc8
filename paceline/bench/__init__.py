"""Benchmarks in the real engine: the ceiling first, then plain decoding, then each drafter, in one process."""
