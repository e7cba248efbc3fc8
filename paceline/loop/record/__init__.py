"""Records other servers' answers as traces for `paceline train`, by a proxy or from their logs.

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


def proxy(
    config: RecordConfig, serving: ServeConfig, tracing: TraceConfig, *, progress: Progress | None = None
) -> Recorded:
    """Runs a proxy that forwards requests to the server `config.upstream` and records them with their answers as traces
    (token ids). Returns when a signal (SIGINT, SIGTERM) stops it. `serving`: address and limits of the proxy;
    `tracing`: folder of the traces, and limits on their size and age.

    Raises ConfigError if the port is taken or no trace folder is set. If the model's tokenizer cannot be loaded, raises
    ModelNotFoundError, ModelFileError, UnsupportedModelError or DownloadError."""
    from paceline.loop.record.run import run

    return run(config, serving, tracing, progress or Progress())


def read(config: RecordConfig, tracing: TraceConfig, *, progress: Progress | None = None) -> Recorded:
    """Converts the log files in `config.imports` to traces (token ids of requests and answers) in `tracing.folder`.
    Requests that an earlier import has already written to this folder are skipped.

    Raises PromptError if a file is damaged, of an unknown format or without usable requests; the error names the file.
    No trace of this file is written then; traces of earlier files are kept."""
    from paceline.loop.record.run import run_imports

    return run_imports(config, tracing, progress or Progress())
