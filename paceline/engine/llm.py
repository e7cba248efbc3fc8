"""The library's main class: `LLM` loads a model and a drafter, and generates text: blocking, streaming or batched.

llm = LLM("smollm2-135m", drafter="default", dtype="bfloat16")
out = llm.chat([[{"role": "user", "content": "..."}]], SamplingParams(max_tokens=128))
out[0].text, out[0].stats.tokens_per_round
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.bounds import Count, Share, check_all
from paceline.config import EngineConfig
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.pool import Member, memory_of
from paceline.draft.registry import make_drafter
from paceline.engine.completion import Completion
from paceline.engine.engine import Chunk, Engine
from paceline.engine.residency import Residency, create, fit_budget
from paceline.engine.round import RuleJudge
from paceline.errors import ConfigError, EngineReplacedError, PromptError, SamplingError, reraised, shown, way_out
from paceline.hub import resolve as resolve_model
from paceline.model.backends import load_target, settle
from paceline.model.measure import measure_passes
from paceline.model.native import library as native_lib
from paceline.model.text.chat import chat_ids
from paceline.model.text.tokenizer import Tokenizer
from paceline.plan.costs import PassCosts
from paceline.plan.marginals import Marginals, MockedPlanner
from paceline.plan.planner import AdaptivePlanner, Planner
from paceline.plan.routes import Router
from paceline.plan.trees import MOST_NODES
from paceline.types import SamplingParams
from paceline.verify.rules import RULES, mocked

Message = dict[str, Any]
_RAW_TEXT = "pass the text itself to generate()"
"""Remedy for errors of `chat` templates."""
LATER = 7
"""With a router, drafters may be added later: target passes are captured for at least this many drafts per round, and
measured for as many if no drafter drafts yet."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of LLM that are not settings of the engine."""

    model: str | Path
    drafter: str | Path | Drafter | None
    drafters: Mapping[str, str | Path | Drafter] | None
    router: Router | None
    allow_lossy: bool
    max_tv: Share | None
    loaded_drafters: Count | None

    def __post_init__(self) -> None:
        check_all(self)


class LLM:
    """A model with its drafter, to generate text. `drafter`: a drafter's name or path, or a Drafter object. `settings`:
    further fields of `EngineConfig`.

    `drafters`: several drafters by name, instead of `drafter`; the first is the default. `router`: object that chooses
    a drafter for each request that is added with request classes (`Route.clusters`). `loaded_drafters`: maximum number
    of drafters in memory; None: no limit. Drafters with running requests stay in memory even beyond it. `allow_lossy`:
    permits lossy rules (`SamplingParams.lossy`), with at most `max_tv` mean total variation per answer.

    Raises ModelNotFoundError for a missing model, DrafterMismatchError for a drafter of another target,
    MemoryBudgetError if the KV caches exceed the memory budget, and other errors of paceline.errors.
    """

    residency: Residency | None = None

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        drafter: str | Path | Drafter | None = "default",
        drafters: Mapping[str, str | Path | Drafter] | None = None,
        router: Router | None = None,
        allow_lossy: bool = False,
        max_tv: float | None = None,
        loaded_drafters: int | None = None,
        **settings: Any,
    ) -> None:
        _Arguments(model, drafter, drafters, router, allow_lossy, max_tv, loaded_drafters)
        specs = {key: str(one) if isinstance(one, Path) else one for key, one in (drafters or {"": drafter}).items()}
        first = next(iter(specs.values()))
        name = first.name or type(first).__name__ if isinstance(first, Drafter) else first
        self.config = settle(EngineConfig.of(model=model, drafter=name, **settings))
        if self.config.speculation.is_off:
            drafters, specs = None, {"": None}
        elif drafters and drafter not in ("default", first):
            raise ConfigError("drafter and drafters both set the drafter: leave one out")
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
            if native_lib.load() is not None:
                native_lib.follow_torch()
        with ThreadPoolExecutor(1) as executor:  # packing the target's matrices leaves Python to the tokenizer
            tokenizer = executor.submit(_tokenizer, self.config, resolve_model(self.config.model))
            self.target = load_target(self.config)
            self.tokenizer = tokenizer.result() or Tokenizer.stand_in(self.target.vocab_size)
        make = partial(self.make_drafter, num_drafted=self.config.num_drafted)
        created = create(specs, make, loaded_drafters)
        self.drafter = next(iter(created.values()))
        """The default drafter for new requests."""
        self.router = router
        self.allow_lossy, self.max_tv = allow_lossy, max_tv
        fit_budget(self.config, self.target, list(created.values()))
        if loaded_drafters is not None:
            self.residency = Residency(loaded_drafters, self.target, make, self.config.kv_memory)
        self.pass_costs: PassCosts | None = None
        """Seconds of target passes; None until an adaptive planner first needs them and they are measured."""
        self._planners: WeakKeyDictionary[Drafter, Planner] = WeakKeyDictionary()
        self._inboxes: dict[int, deque[Chunk]] = {}
        """Request id -> chunks for `generate` and `stream`, no matter which caller ran the step."""
        self.engine = self.new_engine(created if drafters else self.drafter)

    @classmethod
    def of(cls, config: EngineConfig, **more: Any) -> LLM:
        """Creates an LLM from a config. `more`: further arguments of LLM; they have priority over fields of the
        config."""
        return cls(**(asdict(config) | more))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all KV caches, the target's and the drafters'. Requests do not change the number."""
        return self.target.cache.num_bytes + memory_of(self.engine.pool.drafters, self.target).cache_bytes

    def new_engine(self, drafter: Drafter | Mapping[str, Drafter]) -> Engine:
        """Returns another engine with this LLM's weights and cache, and the given drafter, or several by name. Use only
        one engine at a time: all share the cache. On CUDA this first captures CUDA graphs, which takes seconds."""
        every, mock = [drafter] if isinstance(drafter, Drafter) else list(drafter.values()), self.config.mocked
        engine = Engine(
            self.target,
            self.tokenizer,
            drafter,
            judge=RuleJudge(RULES[self.config.rule] if mock is None else mocked(mock)),
            router=self.router,
            lookups=self._adapts and self.config.num_drafted is None,
            most_predicted=self.config.num_drafted if mock is None else 0,
            eos_token_ids=self.tokenizer.eos_token_ids,
            allow_lossy=self.allow_lossy,
            max_tv=self.max_tv,
        )
        engine.pool.residency = self.residency
        self.record_passes(engine)  # with the taps of its drafters, and before passes are measured
        engine.planner = self._planner_of(*every)
        return engine

    @property
    def _adapts(self) -> bool:
        return self.config.speculation.adapts and self.config.mocked is None

    def _pool_changed(self) -> None:
        """Update the default drafter. If idle, capture the passes as CUDA graphs; else rounds run eagerly until a
        change while idle."""
        self.drafter = self.engine.drafter
        if not self.engine.has_work:
            self.record_passes(self.engine)

    def record_passes(self, engine: Engine) -> None:
        """Capture the target and drafter passes that `engine` needs as CUDA graphs, if the device uses them. Passes
        that were captured earlier are reused."""
        grows = self.config.trees if self._adapts else self.config.speculation.num_nodes > 0
        engine.record(LATER if self.router else 0, grows_trees=grows)

    def _planner_of(self, *drafters: Drafter) -> Planner:
        """Returns the planner of these drafters; an adaptive one is kept with the first drafter, with its estimates."""
        chunk = self.config.prefill_chunk
        if not self._adapts:
            num_nodes, mock = self.config.speculation.num_nodes, self.config.mocked
            if num_nodes and isinstance(mock, Marginals):
                return MockedPlanner(most_chunk=chunk, num_nodes=num_nodes, marginals=mock)
            return self.config.speculation.planner(chunk)
        most = max((drafter.num_drafted for drafter in drafters), default=0) or (LATER if self.router else 0)
        grows = self.config.trees and self.target.takes_trees
        if self.pass_costs is None and most:
            largest = max(self.target.cache.num_rows * (1 + most), 1 + MOST_NODES if grows else 0)
            self.pass_costs = measure_passes(self.target, largest, 1 + most)
        first = drafters[0] if drafters else NoDrafter()
        if first not in self._planners:
            costs, adapts = self.pass_costs or PassCosts([(1, 1.0)]), self.target.is_width_invariant
            self._planners[first] = AdaptivePlanner(costs, most_chunk=chunk, adapts_chunks=adapts, grows_trees=grows)
        return self._planners[first]

    def make_drafter(self, drafter: str | Drafter | None, **options: Any) -> Drafter:
        """Creates a drafter for this target from its name or path; a Drafter object is returned unchanged. `options`:
        arguments for the drafter's constructor; `num_drafted` defaults to `EngineConfig.most_drafted`. Raises the
        errors of `draft.registry.make_drafter`."""
        if not isinstance(drafter, Drafter) and options.get("num_drafted") is None:
            options["num_drafted"] = self.config.most_drafted
        return make_drafter(drafter, self.target, target_name=self.config.model, **options)

    def use_drafter(self, drafter: str | Drafter | None, **options: Any) -> None:
        """Replace the default drafter for new requests. `drafter`, `options`: as in `make_drafter`. Raises an error,
        and changes nothing, if the drafter cannot be created or does not fit the target."""
        created = self.make_drafter(drafter, **options)
        self.engine.swap(created)
        self._pool_changed()
        if not self.engine.has_work and len(self.members) == 1:
            self.engine.planner = self._planner_of(created)

    @property
    def members(self) -> dict[str, Member]:
        """The pool's drafters by name, each as a copy of its pool entry. "none" is always available in addition."""
        return {name: replace(member) for name, member in self.engine.pool.members.items()}

    def use_members(self, members: Mapping[str, Member]) -> None:
        """Start a new engine whose drafters are `members`, such as those of an earlier LLM (`LLM.members`). Raises
        ConfigError while answers are running, DrafterMismatchError for a drafter that does not fit the target."""
        self._refuse_while_running("drafters cannot be exchanged all at once")
        self._replace_engine(members)

    def _refuse_while_running(self, what: str) -> None:
        if self.engine.has_work:
            raise ConfigError(f"{what} while answers are under way: wait until they have ended, or close their streams")

    def _replace_engine(self, members: Mapping[str, Member]) -> None:
        old = self.engine
        self.engine = self.new_engine({name: member.drafter for name, member in members.items()})
        self.engine.grammars = old.grammars  # they know the tokenizer alone, and took a while
        self.engine.ids = old.ids
        for name, member in members.items():
            self.engine.pool.admit(name, member.is_open)
        self.drafter = self.engine.drafter

    def put_drafter(self, name: str, drafter: Drafter) -> None:
        """Add a drafter to the pool under this name. An earlier one of this name serves only its running requests from
        now on. Raises DrafterMismatchError if the drafter does not fit the target, or ConfigError for a reserved name,
        and then changes nothing."""
        self.engine.put(name, drafter)
        if self.residency:
            self.residency.put(self.engine.pool, name)
        self._pool_changed()

    def drain_drafter(self, name: str) -> None:
        """Stop giving this drafter to new requests; it stays in the pool. Raises ConfigError for an unknown name."""
        self.engine.pool.admit(name, False)
        self._pool_changed()

    def remove_drafter(self, name: str) -> None:
        """Remove this drafter; running requests keep it. Raises ConfigError for an unknown name."""
        self.engine.remove(name)
        self._pool_changed()

    def renew(self) -> None:
        """Start a new engine after a failure, with the same weights and drafters and an empty cache. Running answers
        are lost: their streams raise EngineReplacedError."""
        cache, members = self.target.cache, self.members
        self.target.allocate_cache(cache.num_rows, cache.max_len)
        self._replace_engine(members)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the model's weights, for example after a policy update. `tensors`: by their Hugging Face names, of
        the same shapes. The drafters stay; cached keys, values and features are discarded. Raises ConfigError while
        answers are running, and the errors of `Target.load_weights`; nothing has changed then."""
        self._refuse_while_running("weights cannot change")
        members = self.members
        self.target.load_weights(tensors.items())
        self._replace_engine(members)

    def encode_chat(
        self,
        messages: list[Message],
        tools: Iterable[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, by the model's chat template. `tools`: tool definitions,
        `variables`: further values for the template. Raises PromptError if the template is missing or fails, or a
        message is malformed."""
        return chat_ids(self.tokenizer, messages, tools or (), variables)

    def chat(
        self,
        conversations: list[list[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> list[Completion]:
        """Answers conversations, each a list of messages; returns the answers in the same order. Raises the errors of
        `encode_chat`; other arguments and errors: see `generate_ids`."""
        with way_out(_RAW_TEXT):
            prompts = [self.encode_chat(messages) for messages in _listed(conversations, "conversation")]
        return self.generate_ids(prompts, params, on_chunk)

    def generate(
        self,
        prompts: list[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> list[Completion]:
        """Continues raw texts, without a chat template; returns the answers in the same order. Raises PromptError for
        one text instead of a list; other arguments and errors: see `generate_ids`."""
        return self.generate_ids(list(map(self.tokenizer.encode, _listed(prompts, "text"))), params, on_chunk)

    def generate_ids(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> list[Completion]:
        """Continues prompts, each a list of token ids; returns the answers in the same order. `params`: one for all
        prompts, or one for each. `on_chunk`: function that is called with each `Chunk` of new output. Without it, all
        prompts together may finish sooner, because prefill chunks are larger.

        Raises PromptError for a prompt that is not a list of integers, SamplingError if the numbers of `params` and
        prompts differ, the errors of `Engine.add`, and the error of a request that fails. An error or interrupt aborts
        all requests of this call.
        """
        every = _token_ids(prompts)
        each = list(params) if isinstance(params, Iterable) and not isinstance(params, dict) else [params] * len(every)
        if len(each) != len(every):
            raise SamplingError(f"{len(each)} params for {len(every)} prompts: give one for each, or one for all")
        texts, done = [""] * len(every), dict[int, Completion]()
        with (
            contextlib.nullcontext() if on_chunk or self._inboxes else self.engine.whole_chunks(),
            contextlib.closing(self._answer(list(zip(every, each, strict=True)))) as answering,
        ):
            for place, chunk in answering:
                texts[place] += chunk.text
                if chunk.finish_reason is not None:
                    done[place] = Completion.of(chunk.sequence, texts[place])
                if on_chunk:
                    on_chunk(chunk)
        return [done[place] for place in range(len(every))]

    def stream(self, prompt: list[Message] | str | list[int], params: SamplingParams | None = None) -> Generator[Chunk]:
        """Yields the new output of one answer after each step that adds to it. `prompt`: messages for the chat
        template, raw text, or token ids. Between two chunks, the caller may read other streams or generate other
        answers. Raises the errors of `encode_chat` and `Engine.add`, and the error of a request that fails."""
        with contextlib.closing(self._answer([(self._ids_of(prompt), params)])) as answering:
            yield from (chunk for _, chunk in answering)

    def _answer(self, requests: list[tuple[list[int], Any]]) -> Generator[tuple[int, Chunk]]:
        """Yields (index of the request, chunk) until all requests are finished; aborts the others if it ends early."""
        engine, inbox, places = self.engine, deque[Chunk](), dict[int, int]()
        try:
            for place, (prompt_ids, params) in enumerate(requests):
                request_id = engine.add(prompt_ids, params)
                self._inboxes[request_id], places[request_id] = inbox, place
            num_left = len(requests)
            while num_left:
                while not inbox:
                    if self.engine is not engine or not engine.has_work:
                        raise EngineReplacedError(
                            "the engine was replaced or the request dropped before the end: send the prompt again"
                        )
                    for chunk in engine.step():
                        if chunk.sequence.request_id in self._inboxes:
                            self._inboxes[chunk.sequence.request_id].append(chunk)
                chunk = inbox.popleft()
                if chunk.sequence.error:
                    raise chunk.sequence.error
                num_left -= chunk.finish_reason is not None
                yield places[chunk.sequence.request_id], chunk
        finally:
            for request_id in places:
                del self._inboxes[request_id]
                if self.engine is engine:  # the rows of one that was replaced are others' by now
                    engine.abort(request_id)

    def _ids_of(self, prompt: list[Message] | str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple) and (not prompt or isinstance(prompt[0], Mapping)):
            with way_out(_RAW_TEXT):
                return self.encode_chat(cast("list[Message]", [*prompt]))
        return _token_ids([prompt])[0]


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PromptError(f"give a list of {what}s, as in [{what}], not {shown(values)}")
    return [*values]


def _token_ids(prompts: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Returns the token ids of prompts, also of arrays and tensors. Raises PromptError if one is not an integer."""
    with reraised(PromptError, "a prompt must be a list of token ids", "give one prompt as in [[1, 2]]", TypeError):
        return [[operator.index(token) for token in prompt] for prompt in prompts]


def _tokenizer(config: EngineConfig, path: Path) -> Tokenizer | None:
    """Returns the tokenizer; None for random weights in a folder without one."""
    if config.weights == "random" and path.is_dir() and not (path / "tokenizer.json").is_file():
        return None
    return Tokenizer.from_path(path)
