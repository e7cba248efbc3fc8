"""Python function behind `paceline audit`: requests answers, computes their probabilities under the model, judges the
server, writes the run folder.

done = audit("http://127.0.0.1:8000", EngineConfig(model="smollm2-135m"), AuditConfig())
done.verdict, done.findings
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BUILTIN_PROMPTS
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt, read_prompts
from paceline.engine.llm import LLM
from paceline.errors import TOKEN_PROMPTS, PromptError, way_out
from paceline.loop.audit import checks
from paceline.loop.audit.answers import AnswerReader, ServerAnswer
from paceline.loop.audit.checks import Finding, Stop, Usage, Verdict
from paceline.loop.audit.config import AuditConfig
from paceline.loop.audit.endpoint import AuditPrompt, Endpoint, Request
from paceline.loop.audit.evidence import Draw, Group, Trial, judged
from paceline.loop.audit.report import write_report
from paceline.loop.audit.scores import logits_of, scores_of
from paceline.model.teacher_forcing import ForcedReader
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client, served_name
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import RunFolder, check_own

SEEDED, REPEATED, STOPPED, COMPARED = 48, 8, 4, 8
"""Numbers of: answers with a seed, seeds with two answers, answers with a stop string, answers only to compare
log-probabilities."""
STOP_CHARACTERS = 5
Answers = list[tuple[Request, ServerAnswer | None]]


@dataclass(frozen=True, slots=True)
class Audited:
    """Result of an audit: the verdict, with the results of the checks and of the statistical tests."""

    verdict: Verdict
    findings: list[Finding]
    tests: list[Trial]
    run: RunFolder

    def as_line(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "run": self.run.path,
        }


@dataclass(slots=True)
class Auditor:
    """An audit in progress: requests answers, and computes with the local model how probable their tokens are."""

    llm: LLM
    endpoint: Endpoint
    config: AuditConfig
    progress: Progress
    usage: list[Usage] = field(default_factory=list)
    logprobs: list[tuple[float, float]] = field(default_factory=list)
    """(log-probability from the server, from the local model) per token."""

    def sampled(self, name: str, temperature: float, top_p: float = 1.0, seeds: Sequence[int] = ()) -> Group:
        """Request answers sampled with these settings, and return them as a group called `name`, with the probabilities
        of their tokens. Requests one answer per seed, or `config.answers` answers if `seeds` is empty."""
        with_logprobs = self.endpoint.has_logprobs and not self.endpoint.gives_ids
        first = Request(0, temperature, self.config.max_tokens, top_p, logprobs=with_logprobs)
        requests = [
            replace(first, prompt=index % len(self.endpoint.prompts), seed=seed)
            for index, seed in enumerate(seeds or [None] * self.config.answers)
        ]
        answers = self.ask(name, requests)
        num_lost = sum(not _is_known(answer) for _, answer in answers)
        return Group(name, temperature, top_p, self.scored(answers, temperature, top_p), num_lost)

    def ask(self, what: str, requests: Sequence[Request]) -> Answers:
        """Send the requests to the server. Returns (request, answer) pairs in order; the answer is None if its request
        failed. Adds the answers' token counts to `usage`, except for requests with a stop string. `what`: text in the
        progress bar."""
        answers: Answers = []
        with self.progress.bar(what, len(requests)) as advance:
            for request, answer in self.endpoint.ask(requests, self.config.concurrency):
                answers.append((request, answer))
                if answer is not None and request.stop is None:
                    self.usage.append(self._usage(request, answer))
                advance(what)
        return answers

    def _usage(self, request: Request, answer: ServerAnswer) -> Usage:
        prompt = self.endpoint.prompt_ids(request.prompt)
        is_other = answer.prompt_ids is not None and answer.prompt_ids != list(prompt)
        num_prompt = len(answer.prompt_ids or ()) if is_other else answer.prompt_tokens
        is_counted = answer.has_ids or bool(answer.logprobs) or answer.completion_tokens is not None
        num_tokens = len(answer.token_ids) if answer.token_ids is not None and is_counted else None
        return Usage(
            len(prompt), num_prompt, num_tokens, answer.completion_tokens, request.max_tokens, answer.finish_reason
        )

    def scored(self, answers: Answers, temperature: float, top_p: float = 1.0) -> list[Draw]:
        """Compute how probable the tokens of these answers are under the local model, given their sampling settings.
        Returns one `Draw` per answer with known tokens, sorted by prompt. At temperature 1 without top-p, also adds the
        log-probabilities that the server reported to `logprobs`."""
        by_prompt: dict[int, list[ServerAnswer]] = defaultdict(list)
        for request, answer in answers:
            if answer is not None and answer.token_ids:
                by_prompt[request.prompt].append(answer)
        draws, tie = list[Draw](), self.config.tolerance.tie
        bar, reading = self.progress.bar("scoring", len(by_prompt)), contextlib.closing(ForcedReader(self.llm.target))
        with bar as advance, reading as reader:
            for prompt, known in sorted(by_prompt.items()):
                prompt_ids = self.endpoint.prompt_ids(prompt)
                room = self.llm.target.cache.max_len - len(prompt_ids)  # a faulty server ignores max_tokens
                for answer in known:
                    tokens = (answer.token_ids or [])[:room]
                    logits_TV = logits_of(reader, prompt_ids, tokens)
                    scores = scores_of(logits_TV, tokens, temperature, top_p, tie)
                    draws.append(Draw(prompt, tuple(tokens), scores))
                    if temperature == 1 and top_p == 1 and answer.logprobs:
                        pairs = zip(answer.logprobs, scores.logprob_T.tolist(), strict=False)
                        self.logprobs += [pair for pair in pairs if pair[0] > -100]
                advance("scoring")
        return draws

    def greedy(self) -> tuple[Finding, Finding]:
        """Request one greedy answer per prompt, and some of them again with a stop string. Returns (finding on their
        tokens, finding on the stop strings)."""
        requests = [Request(index, 0.0, self.config.greedy_tokens) for index in range(len(self.endpoint.prompts))]
        answers = self.ask("greedy", requests)
        lost = [place for place, (_, answer) in enumerate(answers) if not _is_known(answer)]
        if lost and self.endpoint.has_logprobs:
            again = self.ask("greedy, with their tokens", [replace(requests[place], logprobs=True) for place in lost])
            for place, entry in zip(lost, again, strict=True):
                answers[place] = entry
        num_lost = sum(not _is_known(answer) for _, answer in answers)
        finding = checks.greedy(self.scored(answers, 0.0), self.config.tolerance.tie, num_lost)
        return finding, self._stops(answers)

    def _stops(self, answers: Answers) -> Finding:
        stoppable = [
            (stop, request, answer) for request, answer in answers if answer and (stop := stop_in(answer.text))
        ]
        chosen = stoppable[:STOPPED]
        stopped = self.ask("stop strings", [replace(request, stop=stop, logprobs=False) for stop, request, _ in chosen])
        tried = [
            Stop(stop, whole.text, answer.text, answer.finish_reason)
            for (stop, _, whole), (_, answer) in zip(chosen, stopped, strict=True)
            if answer is not None
        ]
        return checks.stops(tried)

    def seeded(self) -> tuple[Group | None, Finding]:
        """Check whether seeds make the server's answers repeatable. Requests one answer for each of several seeds, then
        two more for each of the first eight. Returns (group of the first answers, finding on whether the two more are
        equal to each other). The group is None if the server does not support seeds."""
        if not self.endpoint.has_seeds:
            return None, checks.seeds([])
        seeds = range(1000, 1000 + min(SEEDED, self.config.answers))
        group = self.sampled("temperature 1, with seeds", 1.0, seeds=seeds)
        twice = [
            Request(index % len(self.endpoint.prompts), 1.0, self.config.max_tokens, seed=seed)
            for index, seed in enumerate(seeds[:REPEATED])
            for _ in range(2)
        ]
        texts = [answer.text if answer else None for _, answer in self.ask("seeds", twice)]
        pairs = [
            (one, two) for one, two in zip(texts[::2], texts[1::2], strict=True) if one is not None and two is not None
        ]
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
    """Audits whether the server at `url` samples its answers from the model `engine.model`; writes a report.

    `prompts`: file or data set of prompts [default: built-in prompts]; `limit`: their maximum number; `key`: API key of
    the server; `out`: folder for the report [default: a new one].

    Raises DownloadError if the server does not answer, ConfigError if it rejects the requests, PromptError if all
    prompts are too long. Raises ModelNotFoundError if the server does not have the model; also ModelNotFoundError,
    ModelFileError or UnsupportedModelError if `engine.model` cannot be loaded."""
    config = config or AuditConfig()
    check_own(out, "audit")
    with contextlib.closing(Client(url, key, config.timeout_s, "URL")) as client:
        name = served_name(client, config.served_name)
        llm = LLM.of(replace(engine, drafter="none", max_batch=1))
        progress.loaded(llm)
        longest = llm.target.cache.max_len - max(config.max_tokens, config.greedy_tokens)
        candidates = [audit_prompt(llm, prompt) for prompt in read_prompts(prompts or BUILTIN_PROMPTS, limit)]
        sent = [each for each in candidates if all(1 < len(ids) <= longest for ids in (each.ids, each.text_ids))]
        if not sent:
            raise PromptError(
                f"no prompt leaves room for an answer within {llm.target.cache.max_len} tokens: raise max_len"
            )
        endpoint = Endpoint(client, name, sent, AnswerReader(llm.tokenizer))
        endpoint.determine_form()
        progress.say(f"{client.url} answers as {name}; prompts are sent as {endpoint.kind}")
        findings, groups, tests = _examine(Auditor(llm, endpoint, config, progress))
    verdict = checks.verdict_of(findings)
    about = {"url": client.url, "model": engine.model, "served_name": name, "sent_as": endpoint.kind}
    failures = [text.replace(key, "***") if key else text for text in endpoint.failures[:5]]
    about |= {"prompts": len(sent), "failed_requests": len(endpoint.failures), "failures": failures}
    settings = {**about, "engine": asdict(llm.config), "audit": asdict(config)}
    run = write_report(verdict, findings, groups, tests, settings, out, progress)
    return Audited(verdict, findings, tests, run)


def _examine(auditor: Auditor) -> tuple[list[Finding], list[Group], list[Trial]]:
    config, endpoint = auditor.config, auditor.endpoint
    findings = [*auditor.greedy()] if config.greedy_tokens else []
    groups: list[Group] = []
    for temperature in (None, *config.temperatures):
        if temperature is not None:
            groups.append(auditor.sampled(f"temperature {temperature:g}", temperature))
        counts = checks.usage(auditor.usage, endpoint.kind != "ids")
        if counts.outcome == "not judged":
            return [counts], [], []
    if config.top_p < 1:
        groups.append(auditor.sampled(f"temperature 1, top-p {config.top_p:g}", 1.0, config.top_p))
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
        *checks.declared_lossy(endpoint.num_lossy),
    ]
    return findings, groups, tests


def audit_prompt(llm: LLM, prompt: Prompt) -> AuditPrompt:
    """Converts a prompt to the forms that a server may accept: token ids, text and chat messages.

    `messages` is None without a chat template, and if the prompt needs tools or template variables. Without a chat
    template, the token ids are those of the first user message alone.
    """
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
    """Chooses a stop string for an answer, which would end the answer about in its middle: up to five characters from
    there, without surrounding white space. Returns None if these are fewer than two characters, contain an invalid one
    (U+FFFD), or are also the first characters of the answer."""
    middle = text[len(text) // 2 :][:STOP_CHARACTERS].strip()
    return middle if len(middle) > 1 and "\ufffd" not in middle and text.index(middle) > 0 else None


def _is_known(answer: ServerAnswer | None) -> bool:
    return answer is not None and bool(answer.token_ids)
