"""Settings of a drafter's training: one frozen dataclass per part, validated on construction.

`train` accepts a `TrainConfig`, `regenerate` a `RegenerateConfig`; the other classes are parts of these two. The fields
are the commands' options, with their docstrings as help. Does not import PyTorch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline import bounds
from paceline.bounds import Checked, Count, Depth, Must, Positive, Share, Whole, at_least, check, refuse_unused, within
from paceline.config import EngineConfig
from paceline.data.prompts import Message, read_messages, read_tools
from paceline.errors import ConfigError, PromptError, refuse, reraised
from paceline.types import GrammarSpec, SamplingParams

SomeTokens = Annotated[int, Must("0 for all tokens, or at least 2 tokens", lambda value: value == 0 or value >= 2)]
LOSSES = ("ce", "d-pace", "kl", "lk", "lk-hybrid")
DEFAULT_SELF_WRITTEN = 1000
"""Number of prompts that the target writes itself when none are given."""


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """Settings of the target's answers to prompts: lengths, sampling, and messages and tools to add."""

    max_tokens: bounds.Context = 256
    """Longest answer, in tokens."""
    max_prompt_tokens: bounds.Context = 512
    """Longest prompt, in tokens; longer ones are left out."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures, comma-separated; every prompt is answered at each of them."""
    seed: int = 0
    """Seed of sampled answers."""
    system: str | None = None
    """System message for conversations without one."""
    before: Path | None = None
    """JSON file of messages to put before every conversation without a system message, such as worked examples."""
    tools: Path | None = None
    """JSON file of tools, in the API's format, that are offered with every prompt."""
    variables: tuple[str, ...] = ()
    """Variable of the chat template as NAME=VALUE, such as enable_thinking=false."""
    raw: bool = False
    """Use every prompt as plain text, without the chat template: for base models, which have no template."""
    grammar: GrammarSpec | None = None
    """Grammar that every answer must match."""
    samples: Count = 1
    """Answers to each prompt at each temperature above 0."""
    top_k: Annotated[int, within("between 0 and 100", least=0, most=100)] = 0
    """Also store this many most probable tokens at each position, with log-probabilities, for distilling a smaller
    model."""

    def __post_init__(self) -> None:
        check(self)
        self.template_variables()
        num_distinct = len({f"{temperature:g}" for temperature in self.temperatures})
        refuse(
            ConfigError,
            (not self.temperatures, "give at least one temperature"),
            (num_distinct < len(self.temperatures), f"temperatures must differ, unlike {self.temperatures}"),
            (self.samples > 1 and not any(self.temperatures), "samples above 1 need a temperature above 0: give one"),
        )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)

    def template_variables(self) -> dict[str, Any]:
        """Returns the chat template's variables, name -> value; a value that is not JSON is text. Raises ConfigError
        for a variable without a name or value."""
        variables: dict[str, Any] = {}
        for variable in self.variables:
            name, sign, text = variable.partition("=")
            if not sign or not name.isidentifier():
                example = "write NAME=VALUE, as in enable_thinking=false"
                raise ConfigError(f"variables: {variable!r} has no value, {example}")
            try:
                variables[name] = json.loads(text)
            except ValueError:
                variables[name] = text
        return variables

    def read_opening(self) -> list[Message]:
        """Returns the messages that begin every conversation: `system`, then those of the file `before`. Raises
        PromptError for an unreadable or invalid file."""
        before = read_messages(_json(self.before), str(self.before)) if self.before else []
        return ([{"role": "system", "content": self.system}] if self.system else []) + before

    def read_tools(self) -> tuple[dict[str, Any], ...]:
        """Returns the tools for every prompt; () if no file is set. Raises PromptError for a file without tools."""
        return read_tools(_json(self.tools), str(self.tools)) if self.tools else ()


def _json(file: Path) -> Any:
    with reraised(PromptError, f"cannot read {file}", "give a JSON file, as the API takes it", OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class PromptsConfig(Checked):
    """Settings that select the prompts for the target to answer: their sources, and which rows of them."""

    prompts: tuple[str, ...] = ()
    """JSON lines or Parquet file, folder of traces, or data set id; optionally with a weight (a.jsonl=2)."""
    limit: int | None = None
    """Use only the first prompts of each source, at most this many."""
    strict: bool = False
    """Reject a source with unusable rows instead of skipping and counting those rows."""
    self_written: Whole = 0
    """Also answer this many prompts that the target writes itself."""
    tags: tuple[str, ...] = ()
    """Use only rows of --prompts and --answers with this value in the column tag (the request's x-paceline-tag)."""
    openers: Path | None = None
    """Text file of beginnings of self-written prompts, one per line. In synthesize, {order_id} in a line is replaced by
    a random value of the property order_id in the answers' schema."""

    @property
    def num_self_written(self) -> int:
        """Number of prompts that the target writes: `self_written`, or 1,000 if it is 0 and no prompts are given."""
        return self.self_written or (0 if self.prompts else DEFAULT_SELF_WRITTEN)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings for a target that does not run on this machine, but on a server or on Ray workers. The server's API key
    is the environment variable PACELINE_REMOTE_KEY."""

    answers_from: str | None = None
    """Address of an OpenAI-compatible server of the target that writes the answers [default: this machine does]."""
    features_from: str | None = None
    """Address of vLLM with hidden-state extraction, or of paceline serve --features [default: this machine computes
    them]."""
    features_folder: Path | None = None
    """Folder where vLLM's connector writes (shared_storage_path), as this machine sees it."""
    served_name: str | None = None
    """Model name on the server [default: the first one that the server lists]."""
    at_once: Count = 32
    """Maximum number of concurrent requests."""
    patience_minutes: bounds.TimeoutMinutes = 15.0
    """Give up after this many minutes without any response from the server; finished work is kept."""
    ray: str | None = None
    """Ray cluster whose workers run the target, for answers and hidden states: auto, HOST:PORT, ray://HOST:PORT, or
    local."""
    ray_workers: Count | None = None
    """Number of Ray workers [default: one for each GPU of the cluster, else for each machine]."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("answers_from", "features_from"):
            has_both = self.ray is not None and getattr(self, name) is not None
            refuse(ConfigError, (has_both, f"ray and {name} both say who runs the target: leave one out"))
        if self.ray_workers is not None and not self.ray:
            raise ConfigError("ray_workers needs ray: give its address")
        if bool(self.features_folder) and not self.features_from:
            raise ConfigError("features_folder needs features_from: give it")
        has_server, of_server = bool(self.answers_from or self.features_from), ("at_once", "patience_minutes")
        refuse_unused(self, has_server, "without a server, such as answers_from", "served_name", *of_server)

    @property
    def answers_at(self) -> str | None:
        """Address of the server, or "Ray (ADDRESS)", that generates answers; None if this machine does."""
        return f"Ray ({self.ray})" if self.ray else self.answers_from

    @property
    def features_at(self) -> str | None:
        """Address of the server, or "Ray (ADDRESS)", that computes hidden states; None if this machine does."""
        return f"Ray ({self.ray})" if self.ray else self.features_from


@dataclass(frozen=True, slots=True)
class RegenerateConfig(Checked):
    """Settings of `regenerate`, which writes the target's answers to prompts into a folder."""

    out: Path
    """Run folder; repeat the same command to resume."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """The model that answers, and how it runs; `regenerate` chooses the drafter, `max_batch` and `max_len`."""
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    max_batch: bounds.Streams = 32
    """Answers generated concurrently."""
    remote: RemoteConfig = field(default_factory=RemoteConfig)


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss function and its parameters; losses.py has the formulas."""

    name: Annotated[str, LOSSES] = "d-pace"
    """Loss function over the draft positions."""
    gamma: Positive | None = None
    """Draft position k has the weight exp(-(k - 1) / gamma) in all losses but d-pace; not for eagle3 [default: by block
    size, 4 for 8, 5 for 10, 7 for 16; mtp: 0.6 per position]."""
    alpha: Share = 0.5
    """Lower bound of d-pace's confidence: 0 uses the drafter's own confidence, 1 ignores it."""
    selector: Positive = 1.0
    """Weight of the selector's loss (dflash2)."""
    vocab: SomeTokens | None = None
    """Tokens over which ce and d-pace compute probabilities in a step; 0 for all. Fewer are faster and noisier."""

    def __post_init__(self) -> None:
        check(self)
        if self.vocab and self.needs_target_probs:
            raise ConfigError(f"loss {self.name} compares whole distributions: leave the loss vocabulary out")

    @property
    def needs_target_probs(self) -> bool:
        return self.name in ("kl", "lk", "lk-hybrid")


@dataclass(frozen=True, slots=True)
class OptimConfig(Checked):
    """The optimiser and its parameters."""

    name: Annotated[str, ("adamw", "muon")] = "adamw"
    """adamw for all weights, or muon for the matrices and AdamW for the rest."""
    lr: Positive = 6e-4
    """Peak learning rate. Muon's steps are scaled to AdamW's size."""
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: Positive = 1.0
    """Largest gradient norm; longer gradients are scaled down."""


@dataclass(frozen=True, slots=True)
class LoopConfig(Checked):
    """Settings of the training loop. A resumed run must repeat them, except those for the length of the run, memory
    use, checkpoints and evaluations (`checkpoint.FREE_TO_CHANGE`)."""

    epochs: Positive = 6.0
    """Passes over the documents, each with new anchors (positions after which a block is drafted)."""
    max_steps: Count | None = None
    """Stop after this many steps, instead of after `epochs`."""
    max_minutes: Positive | None = None
    """Stop after this many minutes, with evaluations. The learning rate decays by the nearer limit, time or steps."""
    blocks_per_step: Count = 512
    """Blocks (each an anchor and its draft positions) per optimiser step."""
    anchors: Count = 64
    """Blocks per document and epoch, at random positions. The DFlash paper uses 512 per 3,072 tokens."""
    blocks_per_pack: Count = 128
    """Maximum blocks in one forward and backward pass; a step adds up the gradients of its passes."""
    tokens_per_pack: Annotated[int, at_least(16)] | None = 4096
    """Maximum context and draft positions in one pass. A longer document is split; each part has its full context."""
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    autocast: bool = True
    """Multiply in bfloat16. Weights and their updates stay float32."""
    attention: Annotated[str, ("auto", "split", "sdpa", "flex")] = "auto"
    """Attention implementation; auto uses flex on a GPU and split on a CPU."""
    gradient_checkpointing: bool = False
    """Use less memory and more time: each layer is recomputed in the backward pass."""
    seed: Whole = 0
    """Seed of data order, anchors and initial weights."""
    heldout_every: Count = 50
    """Steps between evaluations on held-out documents."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints."""
    keep: Annotated[str, ("last", "best")] = "last"
    """Weights that become the drafter: the last, or those with the best acceptance length on held-out prompts."""
    keep_last: Count = 1
    """Number of checkpoints to retain."""
    serve_share: Share = 0.05
    """Largest share of the training time for serving held-out prompts during training; 0 serves only at the end."""
    selector_from: Share = 0.3
    """Share of the run after which a selector is trained too (dflash2); body and convolutions are trained from the
    start."""
    selector_share: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.25
    """Share of a step's blocks that train the selector, drawn anew in every step (dflash2); fewer are faster and
    noisier."""
    learn: Annotated[str, ("all", "last-layer", "low-rank")] = "all"
    """Weights of the drafter of --init to train: all, its last layer and final norm, or low-rank additions (LoRA)."""
    rank: Count = 8
    """Rank of the matrices that --learn low-rank adds."""
    parallel: Annotated[str, ("auto", "replicated", "sharded")] = "auto"
    """With several processes (torchrun): each holds the whole network (replicated), or a part of it (sharded,
    FSDP2)."""


@dataclass(frozen=True, slots=True)
class DrafterShape(Checked):
    """Architecture of a drafter. A new drafter has the target's sizes where none are given. For the drafter of --init,
    only block size and sliding window can be changed."""

    num_layers: Depth = 3
    """Number of draft layers."""
    intermediate_size: Count | None = None
    """Width of the draft layers' MLPs [default: the target's]. Copied layers retain the neurons of largest norm."""
    num_heads: Count | None = None
    """Query heads of a draft layer [default: the target's]. Copied layers retain the first ones."""
    num_kv_heads: Count | None = None
    """Key and value heads of a draft layer [default: each serves as many query heads as in the target]."""
    block_size: Annotated[int, within("between 2 and 1024", least=2, most=1024)] = 8
    """Block size in tokens: the anchor and the draft tokens [default with --init: that drafter's]."""
    num_taps: Count | None = None
    """Number of target layers whose hidden states the drafter reads [default: 5, or num_layers if larger]."""
    tap_layers: tuple[Whole, ...] | None = None
    """Indices of the target layers to read, comma-separated, 0-based."""
    start: Literal["random", "copied", "target"] = "random"
    """Initial layers: random, or copies of the target's (copied; target is a synonym). mtp: random is the target's own
    mtp layer; copied, for a target without one, is a copy of its last layer of full attention."""
    attention_bias: bool | None = None
    """Whether the attention has biases [default: copied layers have them if the target does]."""
    is_causal: bool | None = None
    """Whether draft positions attend only to earlier draft positions, or also to later ones [default: also to later
    ones; with --init: as that drafter]."""
    sliding_window: Count | None = None
    """Sliding window of the draft layers' attention, in positions [default: none; with --init: as that drafter]."""
    mask_token_id: Whole | None = None
    """Token id that marks a position to be drafted [default: the last one of the vocabulary]."""
    draft_vocab: SomeTokens | None = None
    """Draft only this many tokens of the vocabulary, the most frequent ones; 0 for all."""
    kind: Annotated[str, ("dflash", "dflash2", "dspark", "eagle3", "mtp")] = "dflash"
    """Drafting method. dflash2 adds convolutions and a selector to a new drafter or to that of --init, dspark a Markov
    head and a confidence head; eagle3 is EAGLE-3; mtp trains the target's own multi-token-prediction layer."""
    ttt_steps: Annotated[int, within("between 1 and 1023", least=1, most=1023)] = 3
    """Draft tokens per block of eagle3 and mtp, which draft one after another; block_size is 1 more (the anchor)."""
    eagle_version: Annotated[str, ("3.1", "3")] = "3.1"
    """Version of a new eagle3 drafter: 3.1 also norms each layer's features and the state passed to the next step."""
    selector_rank: Count = 64
    """Values per token in the codebooks of a new dflash2 selector or dspark Markov head."""
    codebooks: Annotated[str, ("factored", "free")] = "factored"
    """New codebooks: computed from the target's embedding (factored), or one trained row per token
    (free)."""

    @property
    def is_copied(self) -> bool:
        """True if the layers of a new drafter begin as copies of the target's, not with random weights."""
        return self.start != "random"

    @property
    def is_chained(self) -> bool:
        """True if tokens are drafted one after another, each step reading the hidden state of the step before."""
        return self.kind in ("eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class TrainConfig(Checked):
    """All settings of a drafter's training, the argument of `train`."""

    out: Path = Path("runs/train")
    """Run folder; repeat the same command to resume."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """The model to speed up, and how it runs; only model, device, dtype, threads, backend and weight_format are
    read."""
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answers: tuple[Path, ...] = ()
    """Folder of answers from regenerate, or of a server's traces."""
    init: str | None = None
    """Continue this drafter: a folder, or default for the one that ships."""
    scale: Annotated[str, ("default", "tiny")] = "default"
    """tiny runs every stage in a minute on a random target."""
    ood: tuple[str, ...] = ()
    """Out-of-distribution prompts: evaluated during training but not learned from."""
    heldout: tuple[str, ...] = ()
    """Prompts for evaluation, instead of a share of the others."""
    heldout_share: Share = 0.02
    """Share of the prompts that is held out, at least 16 and at most 128 prompts."""
    max_len: Annotated[int, at_least(2), bounds.at_most(bounds.MAX_CONTEXT)] | None = None
    """Longest document (prompt and answer), in tokens [default: 99% fit whole, if memory and context allow]."""
    minutes: Positive | None = None
    """Minutes for the whole run: answers, features and steps. The plan divides them."""
    plan: Annotated[str, ("auto", "off")] = "auto"
    """auto chooses settings that are not given for this target, data and machine; off uses the defaults."""
    log_to: Annotated[str, ("none", "tensorboard", "wandb", "mlflow")] = "none"
    """Also send the training curves to this tracker."""
    push_to_hub: str | None = None
    """Upload the finished drafter to this repository of the Hugging Face hub, owner/name; a new one is private."""
    public: bool = False
    """Make the repository that `push_to_hub` creates public."""
    features: Annotated[str, ("auto", "online", "cached", "streamed")] = "auto"
    """Hidden states: computed when needed (online), stored on disk (cached), or prefetched into a buffer (streamed,
    with documents on disk, in bounded memory). auto stores them if documents are seen again and the disk has room."""
    feature_dtype: Annotated[str, ("model", "int8")] = "model"
    """Precision of stored hidden states: as computed by the model, or 8 bits with a scale per vector."""
    shared_features: Path | None = None
    """Folder of stored hidden states for several runs: each document is computed once for all [default: in `out`]."""
    stream_buffer: Annotated[int, "bytes"] = 256 * 2**20
    """Size of the buffer for streamed hidden states, in bytes."""
    step_timeout_minutes: bounds.TimeoutMinutes = 30.0
    """Minutes that one of several processes waits for the others within a step. Between stages it waits without a limit
    while they are alive."""
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    shape: DrafterShape = field(default_factory=DrafterShape)
    loop: LoopConfig = field(default_factory=LoopConfig)
    given: tuple[str, ...] | None = None
    """Fields that the user gave, such as shape.num_layers; no plan changes them. None: all that differ from
    defaults."""

    def is_given(self, name: str) -> bool:
        """Returns True if the user set the field `name`, such as "shape.num_layers". A plan may change only the other
        fields."""
        if self.given is not None:
            return name in self.given
        value_of = attrgetter(name)
        return value_of(self) != value_of(TrainConfig())
