"""Benchmarks in the real engine, in one process: plain decoding, then each drafter, with the hardware's upper bound."""
