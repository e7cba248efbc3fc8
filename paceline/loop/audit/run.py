"""Library call of `paceline audit`: requests answers, scores them under the model, judges, writes the run folder.

    done = audit("http://127.0.0.1:8000", EngineConfig(model="smollm2-135m"), AuditConfig())
    done.verdict, done.findings
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.data.prompts import Prompt, read_prompts
from paceline.engine.llm import LLM
from paceline.errors import TOKEN_PROMPTS, PromptError, way_out
from paceline.loop.audit import checks
from paceline.loop.audit.answers import AnswerReader, Told
from paceline.loop.audit.checks import Finding, Stop, Usage, Verdict
from paceline.loop.audit.config import AuditConfig
from paceline.loop.audit.endpoint import AuditPrompt, Endpoint, Request, sendable, served_name
from paceline.loop.audit.evidence import Draw, Group, Trial, judged
from paceline.loop.audit.report import write_report
from paceline.loop.audit.scores import Reader, scores_of
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import RunFolder

PROMPTS = Path(__file__).parents[2] / "bench" / "prompts.jsonl"
SEEDED, REPEATED, STOPPED, COMPARED = 48, 8, 4, 8
"""Numbers of answers with a seed, repeated with it, with a stop string, and for log-probabilities alone."""
STOP_CHARACTERS = 5


@dataclass(frozen=True, slots=True)
class Audited:
    """Result of an audit."""

    verdict: Verdict
    findings: list[Finding]
    tests: list[Trial]
    run: RunFolder

    def as_line(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "findings": [asdict(each) for each in self.findings], "run": self.run.path}


@dataclass(slots=True)
class Auditor:
    """An audit in progress."""

    llm: LLM
    endpoint: Endpoint
    config: AuditConfig
    progress: Progress
    usage: list[Usage] = field(default_factory=list)
    logprobs: list[tuple[float, float]] = field(default_factory=list)
    """(log-probability from the server, from the local model) per token."""

    def sampled(self, name: str, temperature: float, top_p: float = 1.0, seeds: Sequence[int] = ()) -> Group:
        """Sample answers with these settings and score them. With `seeds`, one answer per seed."""
        many = range(len(seeds) or self.config.answers)
        with_logprobs = self.endpoint.has_logprobs and not self.endpoint.gives_ids
        requests = [
            Request(
                index % len(self.endpoint.prompts),
                temperature,
                self.config.max_tokens,
                top_p,
                seeds[index] if seeds else None,
                logprobs=with_logprobs,
            )
            for index in many
        ]
        group = Group(name, temperature, top_p)
        told = self.ask(name, requests)
        group.draws, group.num_lost = self.scored(told, temperature, top_p), sum(not _is_known(each) for _, each in told)
        return group

    def ask(self, what: str, requests: Sequence[Request]) -> list[tuple[Request, Told | None]]:
        """Request answers; records their token counts."""
        told: list[tuple[Request, Told | None]] = []
        with self.progress.bar(what, len(requests)) as advance:
            for request, answer in self.endpoint.ask(requests, self.config.concurrency):
                told.append((request, answer))
                if answer is not None and request.stop is None:
                    self.usage.append(self._counted(request, answer))
                advance(what)
        return told

    def _counted(self, request: Request, told: Told) -> Usage:
        prompt = self.endpoint.prompt_ids(request.prompt)
        is_other = told.prompt_ids is not None and told.prompt_ids != list(prompt)
        prompt_told = len(told.prompt_ids or ()) if is_other else told.prompt_tokens
        num_tokens = None if told.token_ids is None else len(told.token_ids)
        return Usage(len(prompt), prompt_told, num_tokens, told.completion_tokens, request.max_tokens, told.finish_reason)

    def scored(self, told: Sequence[tuple[Request, Told | None]], temperature: float, top_p: float = 1.0) -> list[Draw]:
        """Score the answers with known tokens under the model."""
        by_prompt: dict[int, list[Told]] = defaultdict(list)
        for request, answer in told:
            if answer is not None and answer.token_ids:
                by_prompt[request.prompt].append(answer)
        draws, reader, tie = list[Draw](), Reader(self.llm), self.config.tolerance.tie
        with self.progress.bar("scoring", len(by_prompt)) as advance:
            for prompt, answers in sorted(by_prompt.items()):
                known = [answer.token_ids or [] for answer in answers]
                logits = reader.read(self.endpoint.prompt_ids(prompt), known)
                for answer, tokens, logits_TV in zip(answers, known, logits, strict=True):
                    scores = scores_of(logits_TV, tokens, temperature, top_p, tie)
                    draws.append(Draw(prompt, tuple(tokens), scores))
                    if temperature == 1 and top_p == 1 and answer.logprobs:
                        self.logprobs += [
                            pair for pair in zip(answer.logprobs, scores.logprob_T.tolist(), strict=False) if pair[0] > -100
                        ]
                advance("scoring")
        return draws

    def greedy(self) -> tuple[Finding, Finding]:
        """Check greedy answers, then stop strings taken from them."""
        count = len(self.endpoint.prompts)
        requests = [Request(index, 0.0, self.config.greedy_tokens) for index in range(count)]
        told = self.ask("greedy", requests)
        lost = [place for place, (_, answer) in enumerate(told) if not _is_known(answer)]
        if lost and self.endpoint.has_logprobs:
            again = self.ask("greedy, with their tokens", [replace(requests[place], logprobs=True) for place in lost])
            for place, each in zip(lost, again, strict=True):
                told[place] = each
        num_lost = sum(not _is_known(answer) for _, answer in told)
        found = checks.greedy(self.scored(told, 0.0), self.config.tolerance.tie, num_lost)
        return found, self._stops(told)

    def _stops(self, told: Sequence[tuple[Request, Told | None]]) -> Finding:
        wholes = {(request, stop): answer.text for request, answer in told if answer and (stop := stop_in(answer.text))}
        chosen = list(wholes.items())[:STOPPED]
        asked = self.ask("stop strings", [replace(request, stop=stop, logprobs=False) for (request, stop), _ in chosen])
        return checks.stops(
            [
                Stop(stop, whole, answer.text, answer.finish_reason)
                for ((_, stop), whole), (_, answer) in zip(chosen, asked, strict=True)
                if answer is not None
            ]
        )

    def seeded(self) -> tuple[Group | None, Finding]:
        """Request answers with seeds, and repeat some of them."""
        if not self.endpoint.has_seeds:
            return None, checks.seeds([])
        many = range(min(SEEDED, self.config.answers))
        group = self.sampled("temperature 1, with seeds", 1.0, seeds=[1000 + index for index in many])
        count = len(self.endpoint.prompts)
        twice = [
            Request(index % count, 1.0, self.config.max_tokens, seed=1000 + index) for index in many[:REPEATED] for _ in "12"
        ]
        texts = [answer.text if answer else None for _, answer in self.ask("seeds", twice)]
        pairs = [(one, two) for one, two in zip(texts[::2], texts[1::2], strict=True) if one is not None and two is not None]
        return group, checks.seeds(pairs)

    def compare_logprobs(self) -> Finding:
        if self.endpoint.has_logprobs and not self.logprobs:
            count = min(COMPARED, len(self.endpoint.prompts))
            requests = [Request(index, 1.0, self.config.max_tokens, logprobs=True) for index in range(count)]
            self.scored(self.ask("log-probabilities", requests), 1.0)
        return checks.logprobs(self.logprobs, self.config.tolerance.logprob)


def audit(
    url: str,
    engine: EngineConfig,
    config: AuditConfig | None = None,
    *,
    prompts: str | Path | None = None,
    limit: int | None = None,
    key: str | None = None,
    out: str | Path | None = None,
    progress: Progress = SILENT,
) -> Audited:
    """Audits whether the server at `url` answers as the model `engine.model` would.

    Raises DownloadError, ConfigError or ModelNotFoundError if the server cannot be queried, and what loading the model raises.
    """
    config = config or AuditConfig()
    with contextlib.closing(Client(url, key, config.timeout_s, "URL")) as client:
        name = served_name(client, config.served_name)
        llm = LLM.of(replace(engine, drafter="none", max_batch=1))
        progress.loaded(llm)
        longest = llm.target.cache.max_len - max(config.max_tokens, config.greedy_tokens)
        asked = sendable((audit_prompt(llm, each) for each in read_prompts(prompts or PROMPTS, limit)), longest)
        if not asked:
            raise PromptError(f"no prompt leaves room for an answer within {llm.target.cache.max_len} tokens: raise max_len")
        endpoint = Endpoint(client, name, asked, AnswerReader(llm.tokenizer))
        endpoint.settle()
        progress.say(f"{client.url} answers as {name}; prompts are sent as {endpoint.kind}")
        findings, groups, tests = _examine(Auditor(llm, endpoint, config, progress))
    verdict = checks.verdict_of(findings)
    about = {"url": client.url, "model": engine.model, "served_name": name, "sent_as": endpoint.kind}
    about |= {"prompts": len(asked), "failed_requests": len(endpoint.failures), "failures": endpoint.failures[:5]}
    settings = {**about, "engine": asdict(llm.config), "audit": asdict(config)}
    run = write_report(verdict, findings, groups, tests, settings, key, out, progress)
    return Audited(verdict, findings, tests, run)


def _examine(auditor: Auditor) -> tuple[list[Finding], list[Group], list[Trial]]:
    config, endpoint = auditor.config, auditor.endpoint
    findings: list[Finding] = []
    if config.greedy_tokens:
        findings += auditor.greedy()
    counts = checks.usage(auditor.usage, endpoint.kind != "ids")
    if counts.outcome == "not judged":
        return [counts], [], []
    ways: list[Callable[[], Group]] = [
        lambda heat=heat: auditor.sampled(f"temperature {heat:g}", heat) for heat in config.temperatures
    ]
    if config.top_p < 1:
        ways.append(lambda: auditor.sampled(f"temperature 1, top-p {config.top_p:g}", 1.0, config.top_p))
    groups = [way() for way in ways]
    seeded, seeds = auditor.seeded()
    groups += [seeded] if seeded else []
    tests = judged(groups, config.tolerance.nats, config.false_alarms)
    findings = [
        *checks.sampled(groups, tests, config.false_alarms, config.tolerance.nats),
        *checks.nucleus(groups, config.tolerance),
        *findings,
        seeds,
        auditor.compare_logprobs(),
        checks.usage(auditor.usage, endpoint.kind != "ids"),
        *checks.own_words(endpoint.num_lossy),
    ]
    return findings, groups, tests


def audit_prompt(llm: LLM, prompt: Prompt) -> AuditPrompt:
    """Builds the prompt from a conversation's first question, or from the text without a chat template."""
    messages = prompt.messages or None
    if prompt.token_ids:
        ids = list(prompt.token_ids)
    elif llm.tokenizer.chat_template is None:
        ids, messages = llm.tokenizer.encode(prompt.turns[0]), None
    else:
        with way_out(TOKEN_PROMPTS):
            ids = llm.encode_chat(prompt.messages, prompt.tools, dict(prompt.variables))
        messages = None if prompt.tools or prompt.variables else prompt.messages
    text = _text_of(llm.tokenizer, ids)
    return AuditPrompt(tuple(ids), text, tuple(llm.tokenizer.encode(text)), messages)


def _text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of the prompt; without its first token if the tokenizer adds that itself."""
    whole = tokenizer.decode(ids, skip_special=False)
    rest = whole.removeprefix(tokenizer.special_tokens.get("bos_token", ""))
    return rest if tokenizer.encode(rest) == ids else whole


def stop_in(text: str) -> str | None:
    """A few characters from the middle of an answer that do not occur at its beginning; None if unsuitable."""
    middle = text[len(text) // 2 :][:STOP_CHARACTERS].strip()
    return middle if len(middle) > 1 and "\ufffd" not in middle and text.index(middle) > 0 else None


def _is_known(told: Told | None) -> bool:
    return told is not None and bool(told.token_ids)
