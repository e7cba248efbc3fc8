"""Classes that other engines load into their own processes: vLLM's connector for hidden states.

They are imported in the engine's Python environment, where paceline's dependencies may be missing. Imported are only
the standard library, PyTorch, safetensors, `paceline.errors`, `paceline.net.loopback` and the engine itself.
"""
