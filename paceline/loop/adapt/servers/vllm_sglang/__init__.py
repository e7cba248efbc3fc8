"""vLLM and SGLang: the folder of a drafter that they read, their start, and whether they draft with it as it was trained."""
