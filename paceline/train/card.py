"""Writes the model card (README.md) of a finished drafter and uploads the drafter to the Hugging Face hub.

The card contains only facts read from the run's folder and from the target's file. `push` uploads the drafter's folder
unchanged, to a private repository by default.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.eagle3.checkpoint import LAYER_IDS
from paceline.draft.eagle3.drafter import DEFAULT_DRAFTED
from paceline.draft.formats.inspection import kind_of
from paceline.draft.mtp.checkpoint import MARK, is_mtp
from paceline.errors import ConfigError, DownloadError, PacelineError, reraised
from paceline.hub import BUILTINS, resolve
from paceline.model.adapter import adapter_digest, base_of, is_adapter
from paceline.report.statistics import possible_speedup
from paceline.runs.folder import write_whole
from paceline.train.config import TrainConfig

HASHED_BYTES = 4 << 30
"""Most bytes of a target's weights that are hashed. Of larger files, the size and the first bytes are hashed."""
CHUNK = 1 << 22


def target_hash(name: str) -> str:
    """Returns "sha256:..." of the target's weights: of its GGUF file, or of all its safetensors files, ordered by name.
    Above 4 GB, only the names and sizes of all files and the first 4 GB are hashed. For an adapter, returns the hashes
    of the adapter and of its base model. Raises ModelNotFoundError, ModelFileError, DownloadError or CacheError if the
    target cannot be found or read."""
    if name in BUILTINS:
        return f"sha256:{BUILTINS[name].gguf_sha256}"
    path = resolve(name)
    if is_adapter(path):
        return f"sha256:{adapter_digest(path)} (adapter) on {target_hash(str(base_of(path)))}"
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest, left = hashlib.sha256(), HASHED_BYTES
    for file in files:
        if len(files) > 1 or file.stat().st_size > left:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as handle:
            while left > 0 and (data := handle.read(min(CHUNK, left))):
                digest.update(data)
                left -= len(data)
    return f"sha256:{digest.hexdigest()}" + ("" if left > 0 else " (names, sizes and the first 4 GB)")


def write_card(config: TrainConfig, drafter: Path, figures: dict[str, Any], served: dict[str, Any]) -> Path:
    """Writes the drafter's model card to README.md in the folder `drafter`; returns the file's path. `figures`,
    `served`: results of the training and of the engine, as for `card_text`. Raises CacheError for disk errors."""
    file = drafter / "README.md"
    write_whole(file, card_text(config, drafter, figures, served))
    return file


class _Kind(NamedTuple):
    """The parts of a card that depend on the drafting method."""

    title: str
    drafts: int
    """Draft tokens per round."""
    about: str
    others: list[str]
    """Shell commands for other programs."""


def _kind(config: TrainConfig, drafter: Path, raw: dict[str, Any], named: str) -> _Kind:
    size = f"{(drafter / 'model.safetensors').stat().st_size / 1e6:.1f} MB"
    if is_mtp(raw):
        layout = "Qwen3-Next and Qwen3.5" if raw[MARK]["layout"] == "qwen" else "DeepSeek-V3"
        about = (
            f"One multi-token-prediction layer, in the layout of {layout}: its tensors have the names that the "
            f"target's file has for them, {size}. Embedding and head are"
        )
        return _Kind("MTP", raw[MARK]["steps"], about, [])
    sizes = f"format: {raw.get('num_hidden_layers')} layers, features of target layers {_taps(raw)}, {size}."
    if config.shape.kind == "eagle3":
        return _Kind("EAGLE-3", DEFAULT_DRAFTED, f"EAGLE-3 in SpecForge's {sizes} The embedding is", [])
    place = _place(config, drafter)
    parsed = DFlashConfig.from_json(raw)
    block, kind = int(raw.get("block_size", 0)) or 1 + DEFAULT_DRAFTED, kind_of(parsed)
    title = "DSpark" if kind == "DSpark" else "DFlash"
    if parsed.has_own_width:
        about = "It has another width than its target, and embeddings of its own; the hidden states that it reads are"
        return _Kind(title, block - 1, f"{kind} in z-lab's {sizes} {about}", [])
    others = _engines(config.target.model, place, block) if kind == "DFlash v1" else []
    others.append(f"paceline export {shlex.quote(place)} --format speculators --model {named} --out for-vllm")
    return _Kind(title, block - 1, f"{kind} in z-lab's {sizes} Embedding and head are", others)


def card_text(config: TrainConfig, drafter: Path, figures: dict[str, Any], served: dict[str, Any]) -> str:
    """Returns the drafter's model card as Markdown, with the YAML header that the hub reads. `figures`: results of the
    training: numbers of steps, blocks and prompts, eal (expected acceptance length), loss. `served`: the results on
    held-out prompts in the engine (contents of heldout.json), such as tokens_per_round and speedup."""
    raw = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    target = config.target.model
    licence = BUILTINS[target].licence.lower() if target in BUILTINS else "other"
    target_name = shlex.quote(target if target in BUILTINS else _loaded_from(target))
    kind = _kind(config, drafter, raw, target_name)
    finished = datetime.fromtimestamp((drafter / "model.safetensors").stat().st_mtime, UTC).date()
    tag = kind.title.lower().replace("-", "")
    first = f"first layers {config.shape.start if config.init is None else f'of {config.init}'}"
    if kind.title == "MTP" and config.init is None and not config.shape.is_copied:
        first = "beginning with the target's own layer"
    head = ["---", f"license: {licence}", f"base_model: {_base(target)}", "library_name: paceline"]
    head += [f"tags: [{tag}, speculative-decoding, drafter]", "---", f"# {kind.title} drafter for {_base(target)}", ""]
    body = [
        f"Drafts {kind.drafts} tokens a round for `{_base(target)}` ({_hash(config)}). {kind.about} the target's. What "
        "is drafted is checked by the target, so its text stays the target's.",
        "",
        "## Data",
        "",
        _data(config, figures),
        "",
        "## Training",
        "",
        f"{figures.get('steps')} steps, {figures.get('blocks')} blocks, loss {config.loop.loss.name}, "
        f"{config.loop.optim.name} {config.loop.optim.lr:g}, {first}. Finished on {finished} with paceline "
        f"{__version__}. `paceline train --config run.yaml` does the same again.",
        "",
        "## Figures",
        "",
        *_figures(figures, served),
        "",
        "## Use",
        "",
        "```sh",
        f"paceline serve --model {target_name} --drafter {shlex.quote(_place(config, drafter))}",
        *kind.others,
        "```",
        "",
        *_limits(raw, drafter),
        "## Licence",
        "",
        f"{licence}: check it against the licences of the target and of the prompts before you publish.",
    ]
    return "\n".join([*head, *body]) + "\n"


def _engines(target: str, drafter: str, block: int) -> list[str]:
    """Returns shell commands that start vLLM and SGLang with this DFlash v1 drafter; none for a target with an
    adapter."""
    if is_adapter(Path(target)):
        return []
    return [
        "# elsewhere num_speculative_tokens must be given, or SGLang's number with the anchor: there is no default "
        "for DFlash",
        f"vllm serve {shlex.quote(_loaded_from(target))} --speculative-config "
        + shlex.quote(json.dumps({"method": "dflash", "model": drafter, "num_speculative_tokens": block - 1})),
        f"python -m sglang.launch_server --model-path {shlex.quote(_loaded_from(target))} --speculative-algorithm "
        f"DFLASH --speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-draft-tokens {block}",
    ]


def _base(target: str) -> str:
    if (builtin := BUILTINS.get(target)) and builtin.base:
        return builtin.base
    path = Path(target)
    return path.name if path.exists() else target


def _loaded_from(target: str) -> str:
    """Returns the target's name in commands for other engines: a hub id, or a placeholder path for a local folder."""
    return f"path/to/{_base(target)}" if Path(target).exists() else _base(target)


def _hash(config: TrainConfig) -> str:
    if config.remote.features_at:
        return "its hash is not known: it ran elsewhere"
    try:
        return target_hash(config.target.model)
    except PacelineError as error:
        return f"its hash is not known: {error}"


def _taps(raw: dict[str, Any]) -> str:
    eagle3_layers = (raw.get("eagle_config") or {}).get(LAYER_IDS, [])
    return ", ".join(map(str, raw.get("dflash_config", {}).get("target_layer_ids", eagle3_layers)))


def _place(config: TrainConfig, drafter: Path) -> str:
    """Returns the drafter's name in commands: its hub repository, else its relative path, else a placeholder path."""
    if config.push_to_hub:
        return config.push_to_hub
    path, here = drafter.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else f"path/to/{path.parent.name}/{path.name}"


def _data(config: TrainConfig, figures: dict[str, Any]) -> str:
    sources = [Path(source).name for source in (*config.prompting.prompts, *config.answers)]
    own = config.prompting.num_self_written if not sources else config.prompting.self_written
    parts = [", ".join(sources)] if sources else []
    parts += [f"{own} prompts that the target wrote itself"] if own else []
    temperatures = ", ".join(f"{value:g}" for value in config.answering.temperatures)
    learned = f" Learned from {figures['prompts']:,} prompts." if "prompts" in figures else ""
    return (
        f"The target's own answers (at most {config.answering.max_tokens} tokens, temperature {temperatures}) to: "
        f"{' and '.join(parts)}.{learned}"
    )


def _figures(figures: dict[str, Any], served: dict[str, Any]) -> list[str]:
    rows = [
        ("tokens a round, served, greedy", served.get("tokens_per_round"), "{:.2f}"),
        ("held-out prompts", served.get("num_prompts"), "{}"),
        ("of the same, teacher-forced", served.get("teacher_forced"), "{:.2f}"),
        (
            "one stream, times plain decoding on the machine that trained",
            possible_speedup(served.get("speedup"), served.get("tokens_per_round")),
            "{:.2f}",
        ),
        ("expected tokens a round of held-out documents, teacher-forced", figures.get("eal"), "{:.2f}"),
        ("loss there", figures.get("loss"), "{:.2f}"),
    ]
    lines = [f"| {name} | {form.format(value)} |" for name, value, form in rows if value is not None]
    if not lines:
        return ["Nothing was held out: none are known."]
    return ["| on prompts that were held out | |", "|---|---|", *lines]


def _limits(raw: dict[str, Any], drafter: Path) -> list[str]:
    limits = []
    if raw.get("attention_bias"):
        limits.append(
            "It has biases in its attention (`attention_bias`), as its target: paceline and PyPI's `dflash` read them; "
            "vLLM and SGLang were not tried."
        )
    if raw.get("target_hidden_size") not in (None, raw.get("hidden_size")):
        limits.append("paceline alone reads it: no other format has a place for embeddings of a drafter's own.")
    elif (drafter / "draft_ids.safetensors").is_file():
        limits.append(
            "paceline drafts among the tokens of `draft_ids.safetensors` only; other engines read the same weights and "
            "use the whole head, unless they get what `paceline export --format speculators` writes."
        )
    return ["## Limits", "", " ".join(limits), ""] if limits else []


def check_repository(repo: str | None) -> None:
    """Raises ConfigError if `repo` cannot be the name of a hub repository; None passes."""
    if repo is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with reraised(ConfigError, f"push_to_hub {repo!r} is no repository", "give owner/name", HFValidationError):
        validate_repo_id(repo)


def push(drafter: Path, repo: str, *, is_public: bool = False) -> str:
    """Uploads the drafter's folder to a hub repository, which is created if needed, private unless `is_public`; returns
    its URL. Raises ConfigError for an invalid repository name, DownloadError if the hub refuses or cannot be
    reached."""
    import huggingface_hub
    from huggingface_hub import errors

    remedy = "check the name owner/name and `hf auth login`; the drafter stays where it is"
    refused = (errors.HTTPError, errors.LocalTokenNotFoundError, ConnectionError, TimeoutError, OSError)
    check_repository(repo)
    with reraised(DownloadError, f"{drafter} was not sent to {repo}", remedy, *refused):
        hub = huggingface_hub.HfApi()
        url = hub.create_repo(repo, private=not is_public, exist_ok=True, repo_type="model")
        hub.upload_folder(repo_id=repo, folder_path=str(drafter), commit_message="drafter trained with paceline")
    return str(url)
