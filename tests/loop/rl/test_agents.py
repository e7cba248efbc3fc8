"""Agents over the policy's endpoint: what was said is recorded token by token, in any number of turns; drafts change
none."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import idle_collector, quick_end

from paceline.engine.engine import Chunk
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, RolloutError
from paceline.loop.rl.agents import Access, AgentRollouts, Trajectory, by_code
from paceline.loop.rl.endpoint import Attempt, Endpoint, Turn, with_exact_turns
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts
from paceline.plan.planner import AdaptivePlanner
from paceline.serve.worker.worker import EngineWorker

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 4, "max_len": 400}
TASKS = [("count", 2), ("list", 3)]


@contextlib.contextmanager
def endpoint_of(model: Path, drafter: str = "ngram") -> Iterator[Endpoint]:
    with idle_collector(), quick_end():
        yield Endpoint(Rollouts(LLM(str(model), drafter=drafter, **SETTINGS), RolloutConfig(seed=2, max_tokens=10)))


@pytest.fixture(scope="module")
def endpoint(model: Path) -> Iterator[Endpoint]:
    with endpoint_of(model) as served, served:
        yield served


def two_turns(task: str, access: Access) -> list[str]:
    messages = [{"role": "user", "content": f"Please {task}."}]
    for answer in ("go on", "thanks"):
        messages.append(access.chat(messages, temperature=0.0, max_tokens=8))
        messages.append({"role": "user", "content": answer})
    return [str(each["content"]) for each in messages if each["role"] == "assistant"]


def length(task: str, attempt: Trajectory) -> float:
    return float(sum(attempt.sample.mask))


@pytest.mark.slow
def test_turns_become_one_sample(endpoint: Endpoint) -> None:
    groups = AgentRollouts(endpoint, two_turns, by_code(length)).run(TASKS)
    tokenizer = endpoint.rollouts.llm.tokenizer
    assert [len(group) for group in groups] == [2, 3] and not endpoint.attempts
    assert len({tuple(each.sample.completion_ids) for group in groups for each in group}) == 5
    for each in (each for group in groups for each in group):
        sample = each.sample
        assert len(sample.completion_ids) == len(sample.logprobs) == len(sample.mask)
        assert (each.num_turns, each.num_left_out) == (2, 0)
        assert (
            tokenizer.decode(sample.prompt_ids, False)
            == f"<|im_start|>user\nPlease {each.task}.<|im_end|>\n<|im_start|>assistant\n"
        )
        between = [
            token for token, is_sampled in zip(sample.completion_ids, sample.mask, strict=True) if not is_sampled
        ]
        assert "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(between, False)
        assert all(
            (value < 0) == bool(is_sampled) for value, is_sampled in zip(sample.logprobs, sample.mask, strict=True)
        )
        assert sum(sample.mask) == each.reward > 1
        assert each.texts == tuple(each.result)
    figures = endpoint.rollouts.figures[-1].as_json()
    assert (
        figures["num_samples"] == 5
        and figures["turns"] == 2.0
        and figures["turns_left_out"] == figures["failed"] == 0.0
    )


def test_log_probabilities_are_those_of_the_whole_conversation(endpoint: Endpoint) -> None:
    """The same tokens, gone through at once by the target."""
    from paceline.model.target import ForwardBatch

    (group,) = AgentRollouts(endpoint, two_turns, by_code(length)).run([("sing", 1)])
    sample, target = group[0].sample, endpoint.rollouts.llm.target
    tokens = sample.prompt_ids + sample.completion_ids
    row = target.cache.allocate()
    assert row is not None
    logits_TV = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens)).logits_TV
    target.cache.free(row)
    assert logits_TV is not None
    for place, (token, logprob, is_sampled) in enumerate(
        zip(sample.completion_ids, sample.logprobs, sample.mask, strict=True)
    ):
        if is_sampled:
            expected = float(logits_TV[len(sample.prompt_ids) + place - 1].log_softmax(-1)[token])
            assert logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_neither_drafts_nor_company_change_a_sample(model: Path) -> None:
    samples = []
    for drafter, at_once in (("none", 1), ("random-dflash", 4)):
        with endpoint_of(model, drafter) as served, served:
            groups = AgentRollouts(served, two_turns, by_code(length), at_once=at_once).run(TASKS)
            samples.append([each.sample.completion_ids for group in groups for each in group])
    assert samples[0] == samples[1]


def test_prompts_are_read_in_whole_chunks(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent waits for whole answers: nobody follows them token by token."""
    engine = endpoint.rollouts.llm.engine
    planner, step, sizes = engine.planner, engine.step, list[int]()
    assert isinstance(planner, AdaptivePlanner)
    endpoint.call(lambda _: planner.chunks.prefilled(32, 0.032))
    endpoint.call(lambda _: planner.chunks.decoded(1e-3, beside_chunk=False))
    assert planner.chunks.size(2) < 32

    def spied() -> list[Chunk]:
        sizes.append(planner.chunks.size(2))
        return step()

    monkeypatch.setattr(engine, "step", spied)
    AgentRollouts(endpoint, two_turns, by_code(length)).run([("sing", 1)])
    assert sizes and set(sizes) == {endpoint.rollouts.llm.config.prefill_chunk}


def test_a_turn_is_recorded_before_its_client_gets_the_answer(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next turn, which comes at once, would not find the tokens that it goes on from."""
    hand_over, recorded = EngineWorker._hand_over, list[int]()

    def watched(worker: EngineWorker, chunks: list[Chunk], *args: Any, **flags: Any) -> None:
        if any(chunk.finish_reason for chunk in chunks):
            recorded.append(sum(len(attempt.turns) for attempt in endpoint.attempts.values()))
        hand_over(worker, chunks, *args, **flags)

    monkeypatch.setattr(EngineWorker, "_hand_over", watched)
    attempt = endpoint.begin("recorded")
    two_turns("wait", Access(attempt.base_url, attempt.model))
    endpoint.end(attempt)
    assert recorded == [1, 2]


@pytest.mark.slow
def test_who_comes_before_the_server_accepts_waits(model: Path) -> None:
    with (
        endpoint_of(model) as served,
        socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=5) as early,
        served,
    ):
        early.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert early.recv(64).startswith(b"HTTP/1.1 ")


def test_what_would_not_be_the_policys_is_refused(endpoint: Endpoint) -> None:
    attempt = endpoint.begin("refused")
    access, messages = Access(attempt.base_url, attempt.model), [{"role": "user", "content": "hello"}]
    try:
        for more in ({"response_format": {"type": "json_object"}}, {"n": 2}):
            with pytest.raises(RolloutError, match="leave"):
                access.chat(messages, **more)
        with pytest.raises(RolloutError, match="logit_bias names token 999999, outside the vocabulary"):
            access.chat(messages, logit_bias={"999999": 1})
        with pytest.raises(RolloutError, match="base_url"):
            Access(endpoint.url + "/v1", attempt.model).chat(messages)
        with pytest.raises(ConfigError, match="cannot be called 'refused': take 1 to 100 .*underscores"):
            endpoint.begin("refused")
    finally:
        endpoint.end(attempt)
    with pytest.raises(RolloutError, match="under way"):
        access.chat(messages)
    with pytest.raises(RolloutError, match="without asking"):
        attempt.sample()


@pytest.mark.slow
def test_new_weights_come_between_attempts(model: Path, endpoint: Endpoint) -> None:
    from safetensors.torch import load_file

    before = load_file(model / "model.safetensors")
    weights = {name: 3.0 * tensor for name, tensor in before.items()}
    samples = []
    agents = AgentRollouts(endpoint, two_turns, by_code(length))
    for state in (before, weights, before):
        endpoint.call(lambda _, state=state: endpoint.rollouts.load_weights(state, 1))
        samples.append([each.sample.completion_ids for each in agents.run([("count", 2)])[0]])
    assert samples[0] == samples[2] != samples[1]


@pytest.mark.slow
def test_an_agent_that_fails(endpoint: Endpoint) -> None:
    def sometimes(task: str, access: Access) -> str:
        reply = str(access.chat([{"role": "user", "content": "hello"}])["content"])
        if access.base_url.endswith(".1/v1"):
            raise ValueError("no tool of this name")
        return reply

    (group,) = AgentRollouts(endpoint, sometimes, by_code(lambda task, each: 1.0), failed=-1.0).run([("a", 3)])
    assert [each.reward for each in group] == [1.0, -1.0, 1.0] and "no tool" in group[1].error

    def always(task: str, access: Access) -> str:
        access.chat([{"role": "user", "content": "hello"}])
        raise ValueError("no luck")

    with pytest.raises(RolloutError, match="all 2 attempts failed.*no luck"):
        AgentRollouts(endpoint, always, by_code(length)).run([("a", 2)])
    with pytest.raises(RolloutError, match="before the policy said anything"):
        AgentRollouts(endpoint, lambda task, access: 1 / 0, by_code(length)).run([("a", 1)])
    with pytest.raises(RolloutError, match="finite"):
        AgentRollouts(endpoint, two_turns, by_code(lambda task, each: float("nan"))).run([("a", 1)])


def test_an_async_agent(endpoint: Endpoint) -> None:
    async def agent(task: str, access: Access) -> str:
        return str(access.chat([{"role": "user", "content": task}])["content"])

    (group,) = AgentRollouts(endpoint, agent, by_code(length)).run([("a", 1)])
    assert group[0].result == group[0].texts[0]


class Words:
    """A tokenizer that joins what it can: "ab" is one token when it is encoded, and two when it was said."""

    pieces = ("a", "b", "ab", "|")

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return "".join(self.pieces[each] for each in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            number = max(
                (n for n, piece in enumerate(self.pieces) if text.startswith(piece)), key=lambda n: len(self.pieces[n])
            )
            ids.append(number)
            text = text[len(self.pieces[number]) :]
        return ids


def test_what_was_said_goes_back_as_it_was_said() -> None:
    words, turn = Words(), Turn([3], [0, 1, 3], [-1.0] * 3, "stop")
    prompt_ids = words.encode("|ab|ab")
    assert prompt_ids == [3, 2, 3, 2]
    assert with_exact_turns(prompt_ids, [turn], words) == [3, 0, 1, 3, 2]
    assert with_exact_turns([3, 0, 1, 3, 1], [turn], words) == [3, 0, 1, 3, 1]
    other = words.encode("|b|ab")
    assert with_exact_turns(other, [turn], words) == other


@pytest.mark.slow
def test_only_what_the_last_turn_goes_on_from_is_one_conversation() -> None:
    attempt = Attempt("a", "", "")
    first, other = Turn([1, 2], [3], [-1.0], "stop"), Turn([9], [8], [-1.0], "stop")
    last = Turn([1, 2, 3, 4, 5], [6, 7], [-1.0, -2.0], "length")
    attempt.turns = [first, other, last]
    sample = attempt.sample()
    assert (sample.prompt_ids, sample.completion_ids) == ([1, 2], [3, 4, 5, 6, 7])
    assert sample.mask == [1, 0, 0, 1, 1] and sample.logprobs == [-1.0, 0.0, 0.0, -1.0, -2.0]
    assert attempt.num_left_out == 1
