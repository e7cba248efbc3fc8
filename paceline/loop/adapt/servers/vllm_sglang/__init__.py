"""vLLM and SGLang: converts drafters to their formats, starts these engines, checks their acceptance length, and
replaces drafters on their servers."""
