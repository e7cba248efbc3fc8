"""experiments/decode_vs_peers*.py: turns, their log that goes on after a break, peers that are not there, and the
ratios."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import decode_vs_peers as script
import decode_vs_peers_pipe as pipe
import pytest

from paceline.hardware import Machine

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
MACHINE = Machine("a machine", 1e9, {"float32": 1e9}, 1, 2**30)
ECHO = """
import os
from decode_vs_peers_pipe import arguments, own_output, serve

class Echo:
    pid = os.getpid()
    def load(self, way):
        return {"way": way}
    def run(self, way, prompts, num_tokens, until_end=False):
        if way == "cut":
            os._exit(3)
        print("for the log", flush=True)
        return {"token_ids": [[7] * 1000 for _ in prompts], "wall_s": 1.0, "until_end": until_end} if prompts else 1 / 0
    def close(self):
        pass

serve(Echo(), own_output())
"""


@pytest.mark.slow
def test_a_worker_answers_refuses_and_may_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    worker = pipe.Worker(sys.executable, script, [], os.environ | {"PYTHONPATH": str(EXPERIMENTS)})
    assert worker.ask(load="none") == {"about": {"way": "none"}}
    answer = worker.ask(run="none", prompts=[[1]], num_tokens=[2], until_end=True)
    assert answer["until_end"] is True and answer["token_ids"] == [[7] * 1000]
    assert not Path("/proc/self/status").exists() or answer["peak_bytes"] > 10**6
    with pytest.raises(pipe.WorkerError, match="ZeroDivisionError"):
        worker.ask(run="none", prompts=[], num_tokens=[])
    with pytest.raises(pipe.WorkerError, match="ended by itself: for the log"):
        worker.ask(run="cut", prompts=[[1]], num_tokens=[1])
    worker.close()


class FakeWorker:
    """Answers with as many tokens as are asked for; plain decoding ends after 12 with the end token, 0."""

    played: list[str]
    breaks_at = 1000

    def __init__(self, python: str, script: Path, options: list[str], environment: dict[str, str]) -> None:
        self.script = script.name

    def ask(self, **request: Any) -> dict[str, Any]:
        if "load" in request:
            return {"about": {"weight_bytes": 10**6}}
        if request.pop("until_end", False):
            return {"token_ids": [[5] * 11 + [0] for _ in request["prompts"]]}
        FakeWorker.played.append(f"{self.script} {request['run']}")
        if len(FakeWorker.played) == FakeWorker.breaks_at:
            raise sys.modules["decode_vs_peers_pipe"].WorkerError("broken")
        wall_s = {"none": 3.0, "ngram": 2.0, "lookup": 6.0}[request["run"]]
        answer = {"token_ids": [[5] * number for number in request["num_tokens"]], "peak_bytes": 1}
        return {**answer, "wall_s": wall_s, "prefill_s": 1.0, "tokens_per_round": 1.0}

    def close(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`decode_vs_peers.py` with workers that only count, asked for two turns of paceline, Transformers and vLLM."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(3)))
    tokenizer = SimpleNamespace(
        eos_token_ids=(0,), encode_chat=lambda messages: list(range(len(messages[0]["content"])))
    )
    monkeypatch.setattr(script, "Tokenizer", SimpleNamespace(from_path=lambda path: tokenizer))
    monkeypatch.setattr(script, "resolve", Path)
    monkeypatch.setattr(script, "Worker", FakeWorker)
    monkeypatch.setattr(script, "PAUSE_S", 0.0)
    monkeypatch.setattr(script, "this_machine", lambda device: MACHINE)
    monkeypatch.setattr(FakeWorker, "played", [], raising=False)
    monkeypatch.chdir(tmp_path)
    words = ["--models", "a-model", "--prompts", str(prompts), "--turns", "2", "--streams", "1"]
    words += ["--save-results", "out.json", "--peers-home", "nowhere"]
    words += ["--contenders", "paceline/ngram", "transformers/*", "vllm/none"]
    monkeypatch.setattr(sys, "argv", ["decode_vs_peers.py", *words])
    return script


def test_every_contender_plays_every_turn(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    driver.main()
    first, second = FakeWorker.played[4:8], FakeWorker.played[8:]  # the first four warm up
    assert first == [f"decode_vs_peers_{each}" for each in ("paceline.py none", "paceline.py ngram")] + [
        f"decode_vs_peers_transformers.py {way}" for way in ("none", "lookup")
    ]
    assert second == first[1:] + first[:1]
    record = json.loads(Path("out.json").read_text())
    assert record["versions"]["python"] and record["processor"] and "commit" in record
    (result,) = record["results"]
    assert result["num_tokens"] == [[11], [11]]
    rows = {row["name"]: row for row in result["contenders"]}
    assert rows["paceline/ngram"]["decode_over_plain"]["median"] == pytest.approx(2.0)
    assert rows["paceline/ngram"]["whole_over_plain"]["max"] == pytest.approx(1.5)
    assert rows["transformers/lookup"]["same_text"] == {"same": 2, "of": 2, "share_of_tokens": 1.0}
    verdicts = [(each["ours"], each["theirs"], each["rate"]) for each in result["verdicts"]]
    assert verdicts[0] == ("paceline/none", "transformers/none", "decode")
    assert verdicts[1] == ("paceline/ngram", "transformers/none", "decode")
    assert (
        record["missing"][0]["name"] == "vllm/none"
        and "decode_vs_peers.sh installs it" in record["missing"][0]["missing"]
    )
    assert "left out: a-model, 1 streams: vllm/none" in capsys.readouterr().out


def test_a_broken_run_goes_on_where_it_was(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "breaks_at", 10)  # within the second turn
    with pytest.raises(SystemExit, match="run the same command again"):
        driver.main()
    assert not Path("out.json").exists()
    FakeWorker.played.clear()
    driver.main()
    assert len(FakeWorker.played) == 4 + 4
    assert len(json.loads(Path("out.json").read_text())["results"][0]["num_tokens"]) == 2
    FakeWorker.played.clear()
    driver.main()
    assert not FakeWorker.played
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--max-tokens", "9"])
    with pytest.raises(SystemExit, match="other settings"):
        driver.main()
