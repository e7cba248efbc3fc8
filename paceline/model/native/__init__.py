"""The decoder in C++ for CPUs, and its Python interface."""
