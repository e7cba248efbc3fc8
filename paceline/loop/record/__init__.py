"""Records other servers' answers as traces for `paceline train`, by a proxy or from their logs.

from paceline.loop.record.run import read
read(RecordConfig("smollm2-135m", imports=(Path("vllm.log"),)), TraceConfig(Path("traces")))
"""
