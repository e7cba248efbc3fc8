"""What a drafter's training is asked for: one frozen dataclass per part, all of them checked when they are made.

`TrainConfig` is what `train` takes, `RegenerateConfig` what `regenerate` takes; the others are parts of these two. The
options of the commands are these fields, and their help is the docstring under each field. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.bounds import Count, Must, Positive, Share, Whole, at_least, check, within
from paceline.config import EngineConfig
from paceline.data.prompts import Message, read_messages, read_tools
from paceline.errors import ConfigError, PromptError, refuse, reraised
from paceline.types import GrammarSpec, SamplingParams

SomeTokens = Annotated[int, Must("0 for all tokens, or at least 2 tokens", lambda value: value == 0 or value >= 2)]
LOSSES = ("ce", "d-pace", "kl", "lk", "lk-hybrid")
DEFAULT_SELF_WRITTEN = 1000
"""Prompts that the target writes itself when none are given."""


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """How the target answers the prompts."""

    max_tokens: Count = 256
    """Longest answer, in tokens."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out."""
    temperatures: tuple[float, ...] = (0.0,)
    """Comma-separated; each prompt is answered at each."""
    seed: int = 0
    """Another seed, other sampled answers."""
    system: str | None = None
    """System message of conversations that have none."""
    before: Path | None = None
    """JSON file: messages that stand before every conversation that has no system message, such as worked examples."""
    tools: Path | None = None
    """JSON file: the tools that every prompt offers, as the API takes them."""
    variables: tuple[str, ...] = ()
    """Variable of the chat template, as enable_thinking=false."""
    raw: bool = False
    """Ask every prompt as it stands, without the chat template: for base models, which have none."""
    grammar: GrammarSpec | None = None
    """What every answer has to be."""
    samples: Count = 1
    """Answers to each prompt at each temperature above 0."""
    top_k: Annotated[int, within("between 0 and 100", least=0, most=100)] = 0
    """Also keep so many of the target's likeliest tokens at each place, with their log-probabilities: what a smaller model is
    distilled from."""

    def __post_init__(self) -> None:
        check(self)
        self.template_variables()
        different = {f"{temperature:g}" for temperature in self.temperatures}
        refuse(
            ConfigError,
            (not self.temperatures, "give at least one temperature"),
            (len(different) < len(self.temperatures), f"temperatures must differ from each other, unlike {self.temperatures}"),
        )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)

    def template_variables(self) -> dict[str, Any]:
        """By name; a value that is JSON is what it says, any other is text. Raises ConfigError."""
        found: dict[str, Any] = {}
        for each in self.variables:
            name, sign, text = each.partition("=")
            if not sign or not name.isidentifier():
                raise ConfigError(f"variables: {each!r} is none, write NAME=VALUE, as in enable_thinking=false")
            try:
                found[name] = json.loads(text)
            except ValueError:
                found[name] = text
        return found

    def read_opening(self) -> list[Message]:
        """The system message, and what else stands before a conversation. Raises PromptError on a file without messages."""
        before = read_messages(_json(self.before), str(self.before)) if self.before else []
        return ([{"role": "system", "content": self.system}] if self.system else []) + before

    def read_tools(self) -> tuple[dict[str, Any], ...]:
        """Raises PromptError on a file that holds no tools."""
        return read_tools(_json(self.tools), str(self.tools)) if self.tools else ()


def _json(file: Path) -> Any:
    with reraised(PromptError, f"cannot read {file}", "give a JSON file, as the API takes it", OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class PromptsConfig:
    """Which prompts the target answers."""

    prompts: tuple[str, ...] = ()
    """JSON lines, Parquet, folder of traces or data set id, each perhaps with a weight (a.jsonl=2)."""
    limit: int | None = None
    """Only the first prompts of each source."""
    strict: bool = False
    """Refuse a source with rows that cannot be used, in place of leaving them out and saying how many."""
    self_written: Whole = 0
    """Also answer this many prompts that the target writes itself."""
    openers: Path | None = None
    """Text file: beginnings of self-written prompts, one a line; in synthesize {name} stands for a value of that property."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def num_self_written(self) -> int:
        """How many prompts the target writes itself: as many as were asked for, a default number if no prompts are given."""
        return self.self_written or (0 if self.prompts else DEFAULT_SELF_WRITTEN)


@dataclass(frozen=True, slots=True)
class ElsewhereConfig:
    """What runs the target in place of this machine: a server, whose key is PACELINE_ELSEWHERE_KEY, in the environment only; or
    the workers of a Ray cluster."""

    answers_from: str | None = None
    """Address of an OpenAI-compatible server of the target, which writes the answers [default: this machine does]."""
    features_from: str | None = None
    """Address of vLLM with hidden-state extraction, or of paceline serve --features [default: this machine computes them]."""
    features_folder: Path | None = None
    """Where vLLM's connector writes (shared_storage_path), as this machine sees it."""
    served_name: str | None = None
    """What the server calls the target [default: the first it names]."""
    at_once: Count = 32
    """Requests under way at once."""
    patience_minutes: Positive = 15.0
    """Give up when the server has answered nothing for so long; what is done stays."""
    ray: str | None = None
    """Ray cluster whose workers run the target, for answers and hidden states: auto, HOST:PORT, ray://HOST:PORT, or local."""
    ray_workers: Count | None = None
    """How many of them [default: one for each GPU of the cluster, else for each machine]."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("answers_from", "features_from"):
            both = self.ray is not None and getattr(self, name) is not None
            refuse(ConfigError, (both, f"ray and {name} both say who runs the target: leave one out"))
        refuse(ConfigError, (self.ray_workers is not None and self.ray is None, "ray_workers needs ray: give its address"))

    @property
    def answers_at(self) -> str | None:
        """For people: what answers in place of this machine, if anything does."""
        return f"Ray ({self.ray})" if self.ray else self.answers_from

    @property
    def features_at(self) -> str | None:
        """The same of hidden states."""
        return f"Ray ({self.ray})" if self.ray else self.features_from


@dataclass(frozen=True, slots=True)
class RegenerateConfig:
    """What `regenerate` does: the target answers prompts into a folder."""

    out: Path
    """Run folder; the same command again goes on where it stopped."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """Which model answers, and how it runs; its drafter, `max_batch` and `max_len` are chosen by `regenerate`."""
    asked: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    max_batch: int = 32
    """Answers written at once."""
    elsewhere: ElsewhereConfig = field(default_factory=ElsewhereConfig)


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss, and its numbers; losses.py has the formulas."""

    name: Annotated[str, LOSSES] = "d-pace"
    """Which loss teaches the slots."""
    gamma: Positive | None = None
    """Decay of ce and kl in slots [default: by block size; mtp: 0.6 for each]. The paper's: 4 for blocks of 8, 5 for 10,
    7 for 16."""
    alpha: Share = 0.5
    """Floor of d-pace's confidence: 0 follows the drafter's own confidence, 1 does not look at it."""
    selector: Positive = 1.0
    """Weight of the selector's loss (dflash2)."""
    vocab: SomeTokens | None = None
    """Tokens that ce and d-pace compare with in a step, 0 for all. Fewer are faster and noisier."""

    def __post_init__(self) -> None:
        check(self)
        if self.vocab and self.needs_target_probs:
            raise ConfigError(f"loss {self.name} compares whole distributions: leave the loss vocabulary out")

    @property
    def needs_target_probs(self) -> bool:
        return self.name in ("kl", "lk", "lk-hybrid")


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Which optimiser, and its numbers."""

    name: Annotated[str, ("adamw", "muon")] = "adamw"
    """AdamW for all weights, or muon for the matrices and AdamW for the rest."""
    lr: Positive = 6e-4
    """Peak learning rate. For muon too: its steps are scaled to AdamW's size."""
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: Positive = 1.0
    """Largest norm of the gradient; a longer one is scaled down."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """How the steps go. A resumed run must have the same values, but for those that `checkpoint.FREE_TO_CHANGE` names."""

    epochs: Positive = 6.0
    """Passes over the documents, each with new anchors."""
    max_steps: int | None = None
    """Stop after this many steps instead."""
    max_minutes: float | None = None
    """Stop training after this time at the latest. The learning rate falls with steps or time, whichever ends first."""
    blocks_per_step: Count = 512
    """Blocks between two updates."""
    anchors: Count = 64
    """Blocks per document and epoch, at random places. The paper has 512 in 3,072 tokens."""
    blocks_per_pack: Count = 128
    """Blocks computed at once; a step adds up its packs."""
    tokens_per_pack: Annotated[int, at_least(16)] | None = 4096
    """Context positions and slots computed at once; a longer document goes in pieces, each with all of its context."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    autocast: bool = True
    """Multiply in bfloat16. Weights and their updates stay float32."""
    attention: Annotated[str, ("auto", "split", "sdpa", "flex")] = "auto"
    """How blocks attend; auto takes flex on a GPU, split elsewhere."""
    gradient_checkpointing: bool = False
    """Less memory, more time. Each layer is computed again in the backward pass instead of being kept."""
    seed: int = 0
    """Data order, anchors, first weights."""
    heldout_every: Count = 50
    """Steps between looks at held-out documents."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints."""
    keep: Annotated[str, ("last", "best")] = "last"
    """Which weights become the drafter: the last, or those that served held-out prompts best, which are kept beside them."""
    keep_last: Count = 1
    """Checkpoints that stay."""
    serve_share: Share = 0.05
    """Share of the training time that may go to serving held-out prompts on the way; 0 serves at the end only."""
    selector_from: Share = 0.3
    """Share of the run after which a selector learns too (dflash2); body and convolutions learn all along."""
    selector_share: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.25
    """Share of a step's blocks that a selector learns from, others in every step (dflash2): fewer are faster and noisier."""
    parallel: Annotated[str, ("auto", "replicated", "sharded")] = "auto"
    """Several processes (torchrun) each hold the whole network, or a part of it (FSDP2)."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a new drafter looks like; sizes not named are the target's."""

    num_layers: Count = 3
    """Draft layers."""
    intermediate_size: Count | None = None
    """Width of the draft layers' MLPs [default: the target's]. Copied layers keep their loudest neurons."""
    num_heads: Count | None = None
    """Query heads of a draft layer [default: the target's]. Copied layers keep the first ones."""
    num_kv_heads: Count | None = None
    """Key and value heads of a draft layer [default: as many queries for each as the target has]."""
    block_size: Annotated[int, at_least(2)] = 8
    """Anchor and drafts together."""
    num_taps: int | None = None
    """Target layers the drafter reads [default: 5, or as many as layers]."""
    tap_layers: tuple[int, ...] | None = None
    """Exactly these target layers, comma-separated, 0-based."""
    start: Literal["random", "copied", "target"] = "random"
    """Begin with random layers, or with copies of the target's (target means copied too); mtp: with the target's own layer, or
    with a copy of its last one where it has none."""
    attention_bias: bool | None = None
    """Biases in the attention [default: copied layers have them when the target does]."""
    is_causal: bool | None = None
    """Whether slots see only slots before them. None leaves it to the format: they see both ways."""
    sliding_window: int | None = None
    """Positions that draft layers see [default: all]."""
    mask_token_id: int | None = None
    """Token id that stands for a slot to be drafted [default: the last]."""
    draft_vocab: SomeTokens | None = None
    """Draft among the most frequent tokens only, this many; 0 for all."""
    kind: Annotated[str, ("dflash", "dflash2", "eagle3", "mtp")] = "dflash"
    """dflash2 adds convolutions and a selector, to a new drafter or to the one that --init names; eagle3 is of another kind;
    mtp trains the target's own multi-token-prediction layer."""
    ttt_steps: Count = 3
    """Drafts one behind the other that an eagle3 or mtp drafter learns at once: its blocks are these and the anchor."""
    eagle_version: Annotated[str, ("3.1", "3")] = "3.1"
    """Of a new eagle3 drafter: 3.1 norms each layer's features, and what the next draft is told."""
    selector_rank: Count = 64
    """Numbers a token in the codebooks of a new dflash2 selector."""
    codebooks: Annotated[str, ("factored", "free")] = "factored"
    """A new selector's codebooks: made of the target's embedding (few weights, for any token), or a row of weights a token."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_copied(self) -> bool:
        return self.start != "random"

    @property
    def is_chained(self) -> bool:
        """Whether it drafts token after token, each step told what the step before found."""
        return self.kind in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What `train` does: prompts in, drafter out."""

    out: Path = Path("runs/train")
    """Run folder; the same command again goes on where it stopped."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """The model to be sped up, and how it runs; only model, device, dtype, threads, backend and weight_format are read."""
    asked: PromptsConfig = field(default_factory=PromptsConfig)
    answers: tuple[Path, ...] = ()
    """Answers of regenerate, or a server's traces."""
    init: str | None = None
    """Continue this drafter: a folder, or default for the one that ships."""
    scale: Annotated[str, ("default", "tiny")] = "default"
    """tiny: every stage in a minute on a random target."""
    ood: tuple[str, ...] = ()
    """Prompts of another kind, watched but not learned."""
    heldout: tuple[str, ...] = ()
    """Prompts to be tested on, in place of a share of the others."""
    heldout_share: Share = 0.02
    """Share of the prompts that is held out, never under 16 of them."""
    max_len: int = 1024
    """Longest document, prompt and answer, in tokens."""
    minutes: Positive | None = None
    """Minutes for the whole run: answers, features and steps. The plan shares them out."""
    plan: Annotated[str, ("auto", "off")] = "auto"
    """auto: what is not asked for is chosen for this target, data and machine; off: it is the default."""
    log_to: Annotated[str, ("none", "tensorboard", "wandb", "mlflow")] = "none"
    """Where the curves go too, as they are made."""
    push_to_hub: str | None = None
    """Send the finished drafter to this repository of the Hugging Face hub, owner/name; a new one is private."""
    public: bool = False
    """A repository that `push_to_hub` makes is public."""
    features: Annotated[str, ("auto", "online", "cached", "streamed")] = "auto"
    """Hidden states: computed as documents come, kept on disk, or produced ahead of the trainer (streamed, with documents on
    disk: memory does not grow with their number). auto keeps them when documents are seen again and the disk has room."""
    feature_dtype: Annotated[str, ("model", "int8")] = "model"
    """Hidden states are kept as the model gives them, or in 8 bits with a scale for each vector."""
    stream_buffer: Annotated[int, "bytes"] = 256 * 2**20
    """Most bytes of streamed hidden states that wait for the trainer."""
    step_timeout_minutes: Positive = 30.0
    """Minutes that one of several processes waits for the others within a step; between stages it does as long as they live."""
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    elsewhere: ElsewhereConfig = field(default_factory=ElsewhereConfig)
    shape: DrafterShape = field(default_factory=DrafterShape)
    loop: LoopConfig = field(default_factory=LoopConfig)
    given: tuple[str, ...] | None = None
    """Fields that were asked for, as shape.num_layers: no plan changes them. None: those that differ from their defaults."""

    def __post_init__(self) -> None:
        check(self)
        is_kept = self.features in ("auto", "cached") and self.feature_dtype == "model"
        refuse(
            ConfigError,
            (
                self.elsewhere.ray is not None and not is_kept,
                "ray keeps hidden states on disk, as the model gives them: leave features and feature_dtype out",
            ),
        )

    def is_given(self, name: str) -> bool:
        """Whether this field, as shape.num_layers, was asked for."""
        if self.given is not None:
            return name in self.given
        pair: tuple[Any, Any] = (self, TrainConfig())
        for part in name.split("."):
            pair = getattr(pair[0], part), getattr(pair[1], part)
        return pair[0] != pair[1]
