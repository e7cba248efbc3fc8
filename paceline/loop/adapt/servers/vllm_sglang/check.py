"""Checks whether vLLM or SGLang runs a drafter correctly: compares its acceptance length on twenty prompts with
paceline's.

    prompts = prompt_ids(model)
    expected = brings(model, given.folder, given.num_drafted, prompts)  # in a separate process, which frees its memory
    Comparison(expected, served("vllm", client, name, prompts)).is_low

The prompts are those of `paceline inspect`, greedy, one after the other. Paceline measures the same folder with the
same number of drafts per round. An engine that reads a layer, mask token or position differently raises no error: its
drafts are rejected, which shows here.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, DownloadError, reraised
from paceline.loop.adapt.servers.counters import Meters, ask, tokens_per_round
from paceline.loop.adapt.servers.mismatch import PROMPTS, encode, measure
from paceline.loop.adapt.servers.mismatch import ask as ask_target
from paceline.model.remote_embedding import light_folder
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client

NUM_PROMPTS, MAX_TOKENS = 20, 48
MOST_OTHERS = 1.1
"""Tokens that a server may generate during the check, as a multiple of those of the check."""
LEAST_SHARE, LEAST_LOSS = 0.85, 0.15
"""An engine's acceptance length is clearly lower if it is below this share of paceline's, and lower by at least this
difference."""


@dataclass(frozen=True, slots=True)
class Comparison:
    expected: float
    measured: float

    @property
    def is_low(self) -> bool:
        return self.measured < min(self.expected * LEAST_SHARE, self.expected - LEAST_LOSS)

    @property
    def text(self) -> str:
        verdict = "clearly less" if self.is_low else "as it should be"
        return f"{self.measured:.2f} tokens a round on {NUM_PROMPTS} prompts, {self.expected:.2f} expected: {verdict}"


def prompt_ids(model: str) -> list[list[int]]:
    """Returns the twenty test prompts as token ids, encoded for the target `model`. Loads only its tokenizer."""
    tokenizer = Tokenizer.from_path(light_folder(model))
    return [encode(tokenizer, prompt) for prompt in PROMPTS[:NUM_PROMPTS]]


def brings(
    model: str, folder: Path, num_drafted: int, prompts: list[list[int]], dtype: str = "auto", device: str = "auto"
) -> float:
    """Measures the acceptance length that the drafter in `folder` has in paceline with the target `model`, on answers
    to these prompts. Runs in another process. `num_drafted`: drafts per round; `prompts`: token ids of each prompt;
    `dtype`, `device`: of the target.

    Raises ConfigError if the process is killed or all answers are too short, DrafterMismatchError if drafter and target
    do not fit, and ModelNotFoundError, DownloadError or ModelFileError if one of them cannot be loaded."""
    with (
        reraised(ConfigError, "measuring here was killed", "give --expected, or --no-check", BrokenProcessPool),
        ProcessPoolExecutor(1, get_context("spawn")) as other,
    ):
        return other.submit(_measured, model, str(folder), num_drafted, prompts, dtype, device).result()


def _measured(
    model: str, folder: str, num_drafted: int, prompts: list[list[int]], dtype: str, device: str = "auto"
) -> float:
    llm = LLM.of(EngineConfig(model=model, drafter="none", dtype=dtype, device=device))
    requests = ask_target(llm, prompts, MAX_TOKENS)
    if not requests:
        raise ConfigError("the target's answers are empty, so nothing can be compared: give --no-check")
    return measure(llm, llm.make_drafter(folder, num_drafted=num_drafted), requests)


def served(engine: str, client: Client, name: str, prompts: list[list[int]]) -> float:
    """Sends the prompts to a running engine ("vllm" or "sglang") and returns the acceptance length of its answers. The
    engine should get no other requests meanwhile. `name`: name of the served model.

    Raises DownloadError if the engine does not answer or reports no round with drafts. Also raises it if vLLM does not
    report the rounds of single answers and got other requests meanwhile."""
    length = _on_vllm(client, name, prompts) if engine == "vllm" else _on_sglang(client, prompts)
    if length is None:
        raise DownloadError(
            f"{client.url} counts no round with drafts: is speculation on? See what it said when it started"
        )
    return length


def _on_vllm(client: Client, name: str, prompts: list[list[int]]) -> float | None:
    """Read the rounds that vLLM reports with each answer (--per-request-spec-decode-metrics), else those of its
    counters, which include other traffic."""
    meters = Meters({client.url: {}})
    before = meters.read([client], None)
    tokens = rounds = accepted = 0
    for prompt in prompts:
        body = {"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = ask(client, "POST", "/v1/completions", body)
        tokens += (answer.get("usage") or {}).get("completion_tokens") or 0
        figures = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        rounds += figures.get("num_spec_steps") or 0
        accepted += figures.get("num_accepted_draft_tokens") or 0
    if rounds:
        return 1 + accepted / rounds
    after = meters.read([client], None)
    if tokens and after.tokens - before.tokens > MOST_OTHERS * tokens:
        raise DownloadError(
            f"{client.url} had other traffic meanwhile, and counts all together: start it with "
            "--per-request-spec-decode-metrics summary"
        )
    return tokens_per_round(before, after)


def _on_sglang(client: Client, prompts: list[list[int]]) -> float | None:
    """Sum up the rounds reported with each answer; the first token comes from the prompt's pass, not from a round."""
    tokens = rounds = 0
    for prompt in prompts:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS}}
        info = ask(client, "POST", "/generate", body).get("meta_info") or {}
        rounds += int(info.get("spec_verify_ct") or 0)
        tokens += max(int(info.get("completion_tokens") or 0) - 1, 0)
    return tokens / rounds if rounds else None
