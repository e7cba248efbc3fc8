"""Report pages and charts of benchmarks."""
