"""What other servers answer, as the traces that `paceline train` learns from: seen by a proxy, or read from what they logged.

from paceline.loop.record import read
read(RecordConfig("smollm2-135m", imports=(Path("vllm.log"),)), TraceConfig(Path("traces")))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.loop.record.config import RecordConfig
from paceline.report.tables import Progress
from paceline.serve.settings import ServeConfig, TraceConfig

if TYPE_CHECKING:
    from paceline.loop.record.run import Recorded


def proxy(config: RecordConfig, serving: ServeConfig, tracing: TraceConfig, *, progress: Progress | None = None) -> Recorded:
    """Pass on what clients ask of `config.upstream`, and keep traces of it, until a signal comes.

    Raises ConfigError when the address is taken or nothing can be kept, and what keeps the tokenizer from being read.
    """
    from paceline.loop.record.run import run

    return run(config, serving, tracing, progress or Progress())


def read(config: RecordConfig, tracing: TraceConfig, *, progress: Progress | None = None) -> Recorded:
    """Keep traces of what the files `config.imports` say was asked and answered.

    Raises PromptError naming file and line when one is damaged, of another kind, or says nothing of use: then nothing of that
    file is kept.
    """
    from paceline.loop.record.run import run_imports

    return run_imports(config, tracing, progress or Progress())
