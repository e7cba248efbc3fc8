"""Does `paceline audit` tell faulty servers from honest ones? The real model behind proxies that plant a fault each.

    python experiments/audit_faults.py --seeds 20
    python experiments/audit_faults.py --seeds 2 --answers 64 --only honest,flattened

Starts `paceline serve` (speculation on, lossy rules allowed) and one more server with another model, puts a proxy before them,
and audits that:

    honest      nothing is changed
    flattened   temperature times 1.15
    lossy       a lossy rule, which the answers do not tell of
    top-p       0.9 in place of what was asked
    slipped     every hundredth token is another model's
    another     greedy answers come from another model

An honest server may be called faulty once in all seeds, a faulty one never honest: else the exit status is 1. Writes
results.json into `--out`. Seeds number the runs: the servers draw by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gguf_to_folder import write_folder
from safetensors.torch import load_file, save_file
from server_process import HOST, server

from paceline.audit.answers import AnswerReader
from paceline.audit.config import AuditConfig
from paceline.audit.run import audit
from paceline.bench.client import Client
from paceline.config import EngineConfig
from paceline.hub import resolve
from paceline.model.tokenizer import Tokenizer
from paceline.runlog import write_results

HEAT, TOP_P, SLIP_EVERY = 1.15, 0.9, 100
LOSSY = "typical:eps=0.09,delta=0.3"
JSON = dict[str, Any]
Ask = Callable[[JSON], JSON]
"""A request of /v1/completions to its answer."""


class Refused(Exception):
    """The server behind the proxy refused the request."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def asking(client: Client) -> Ask:
    """Pass a request on."""

    def ask(body: JSON) -> JSON:
        stream = client.post("/v1/completions", json.dumps(body).encode())
        if stream.status != 200:
            raise Refused(stream.status, stream.body)
        return json.loads(stream.body)

    return ask


def flattened(ask: Ask) -> Ask:
    return lambda body: ask(body | {"temperature": min(HEAT * body["temperature"], 2.0)})


def wrong_top_p(ask: Ask) -> Ask:
    return lambda body: ask(body | ({"top_p": TOP_P} if body.get("top_p", 1.0) < 1 else {}))


def lossy(ask: Ask, rule: str) -> Ask:
    def asked(body: JSON) -> JSON:
        told = ask(body | ({"lossy": rule} if body["temperature"] else {}))
        return {name: value for name, value in told.items() if name not in ("lossy", "lossless")}

    return asked


def another(ask: Ask, other: Ask) -> Ask:
    return lambda body: ask(body) if body["temperature"] else other({**body, "model": None})


class Slipping:
    """Every hundredth token is the likeliest of another model. Gives token ids, as vLLM does."""

    def __init__(self, ask: Ask, other: Ask, tokenizer: Tokenizer, every: int = SLIP_EVERY) -> None:
        self._ask, self._other, self._tokenizer, self._every = ask, other, tokenizer, every
        self._reader, self._numbers, self._lock = AnswerReader(tokenizer), itertools.count(1), threading.Lock()

    def __call__(self, body: JSON) -> JSON:
        prompt, said, reason = list(body["prompt"]), list[int](), "length"
        with self._lock:
            slips = [next(self._numbers) % self._every == 0 for _ in range(body["max_tokens"])]
        while len(said) < len(slips) and reason == "length":
            left = slips[len(said) :]
            if left[0]:
                more, _ = self._told(self._other, {"temperature": 0.0, "max_tokens": 1}, prompt + said)
            else:
                until = left.index(True) if True in left else len(left)
                more, reason = self._told(self._ask, body | {"max_tokens": until}, prompt + said)
            said += more
        if reason == "length" and len(said) < len(slips):
            reason = "stop"
        text = self._tokenizer.decode(said)
        choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": said, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _told(self, ask: Ask, body: JSON, prompt: list[int]) -> tuple[list[int], str]:
        told = self._reader.read(ask(body | {"prompt": prompt, "return_token_ids": True}), "stop" in body)
        assert told is not None and told.token_ids
        return told.token_ids, told.finish_reason


@contextlib.contextmanager
def proxy(ask: Ask, name: str = "model") -> Iterator[str]:
    """Its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": name}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.path.endswith("/v1/completions"):
                self.answer(404, b"{}")
                return
            try:
                self.answer(200, json.dumps(ask(body | {"model": None})).encode())
            except Refused as refused:
                self.answer(refused.status, refused.body)

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Handler) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://{HOST}:{made.server_address[1]}"
        finally:
            made.shutdown()


def planted(ask: Ask, other: Ask, tokenizer: Tokenizer, rule: str = LOSSY) -> dict[str, Ask]:
    """Every kind of server, by name; the first one is honest."""
    return {
        "honest": ask,
        "flattened": flattened(ask),
        "lossy": lossy(ask, rule),
        "top-p": wrong_top_p(ask),
        "slipped": Slipping(ask, other, tokenizer),
        "another": another(ask, other),
    }


def noised(model: str, folder: Path, noise: float) -> Path:
    """The same architecture and tokenizer with noise on its matrices: another model, often of the same opinion."""
    write_folder(resolve(model), folder)
    file = folder / "model.safetensors"
    weights, draw = load_file(file), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=draw)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def counted(runs: list[JSON]) -> tuple[int, int]:
    """Honest servers that were called faulty, and faulty ones that were not."""
    alarms = sum(run["server"] == "honest" and run["verdict"] == "faulty" for run in runs)
    return alarms, sum(run["server"] != "honest" and run["verdict"] != "faulty" for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="names, a comma between them")
    parser.add_argument("--lossy", default=LOSSY, help="the lossy rule")
    parser.add_argument("--noise", type=float, default=0.15, help="of the other model, in deviations of its weights")
    parser.add_argument("--answers", type=int, default=AuditConfig().answers)
    parser.add_argument("--greedy-tokens", type=int, default=AuditConfig().greedy_tokens)
    parser.add_argument("--server-precision", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("runs/audit-faults"))
    args = parser.parse_args()
    config = AuditConfig(
        answers=args.answers, greedy_tokens=args.greedy_tokens, server_precision=args.server_precision, timeout_s=600
    )
    options = ["serve", "--port", "0", "--max-len", "1024"]
    command = [sys.executable, "-m", "paceline", *options]
    runs: list[JSON] = []
    with contextlib.ExitStack() as stack:
        other_folder = noised(args.model, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "other", args.noise)
        started = [
            stack.enter_context(server([*command, *words]))
            for words in (
                ["--model", args.model, "--drafter", args.drafter, "--allow-lossy"],
                ["--model", str(other_folder), "--drafter", "none"],
            )
        ]
        ask, other = (asking(Client(f"http://{HOST}:{port}", timeout_s=600)) for _, port, _ in started)
        kinds = planted(ask, other, Tokenizer.from_path(resolve(args.model)), args.lossy)
        chosen = args.only.split(",") if args.only else list(kinds)
        for seed, name in itertools.product(range(args.seeds), chosen):
            began = time.monotonic()
            with proxy(kinds[name]) as url:
                done = audit(url, EngineConfig(model=args.model, dtype="float32"), config, out=args.out / f"{name}-{seed}")
            faults = [each.text for each in done.findings if each.outcome == "fault"]
            runs.append({"server": name, "seed": seed, "verdict": done.verdict, "faults": faults})
            print(f"{name} {seed}: {done.verdict} in {time.monotonic() - began:.0f} s; {'; '.join(faults)}", flush=True)
            alarms, missed = counted(runs)
            figures = {"alarms": alarms, "missed": missed, "seeds": args.seeds, "runs": runs, "config": asdict(config)}
            write_results(args.out / "results.json", figures | {"model": args.model, "drafter": args.drafter})
    alarms, missed = counted(runs)
    print(f"false alarms: {alarms} of {sum(run['server'] == 'honest' for run in runs)}; missed: {missed} of {len(runs)} in all")
    return int(missed > 0 or alarms > 1)


if __name__ == "__main__":
    sys.exit(main())
