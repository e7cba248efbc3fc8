"""Reads command lines as SGLang does; runs in SGLang's Python: `python sglang_parser.py`, JSON lists of words on stdin.

Each line is answered by what SGLang would start with: its parser's values, then those of its resolution, which checks
combinations and reads the folders. Both need no GPU, but modules that are not installed here (compiled kernels,
torchvision, gguf): empty ones stand for them. No model is loaded.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

from transformers import AutoConfig, AutoImageProcessor, AutoProcessor  # noqa: F401 (before torchvision is replaced)

MISSING = ("torchvision", "sgl_kernel", "flashinfer", "gguf")
FIELDS = (
    *("model_path", "served_model_name", "host", "port", "api_key", "dtype", "tp_size", "context_length"),
    *("kv_cache_dtype", "max_running_requests", "enable_metrics"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens"),
    *("speculative_num_steps", "speculative_eagle_topk"),
)


class Empty:
    """Finds the modules of MISSING, whose attributes are all there."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def main() -> None:
    sys.meta_path.append(Empty())  # type: ignore[arg-type]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]

    for line in sys.stdin:
        try:
            parsed = prepare_server_args(json.loads(line))
            parsed.resolve_once()
            values = parsed.resolved_dict()
            answer = {name: values[name] for name in FIELDS}
        except SystemExit:
            answer = {"refused": "by the parser: see stderr"}
        except Exception as error:  # noqa: BLE001 (whatever it is, the test shows it)
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
