"""Pages and pictures of benchmarks."""
