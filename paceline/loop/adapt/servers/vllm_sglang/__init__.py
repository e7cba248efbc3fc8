"""vLLM and SGLang: drafter folders in their formats, start of the engine, check of its acceptance."""
