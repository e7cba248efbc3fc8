"""The stages of experiments/gpu_day.py; docs/how-to/gpu.md says what each of them measures and when it passes."""
