"""The stages `real` and `teach`: a real model where its pieces were brought, and its drafters trained on the device."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpu_day_stages.models import free_memory
from gpu_day_stages.pieces import ANSWERS, join, names_below, pack
from gpu_day_stages.tiny_models import are_same, parted
from gpu_day_stages.visit import Skipped, Visit
from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.data.answers import read_answers
from paceline.data.prompts import read_prompts
from paceline.draft.dflash.checkpoint import weights_file
from paceline.draft.formats.family import read_drafter
from paceline.draft.shipped import SHIPPED, local
from paceline.engine.completion import Completion
from paceline.errors import DrafterMismatchError
from paceline.report.tables import Progress
from paceline.train import train
from paceline.train.config import AnswerConfig, DrafterShape, LoopConfig, LossConfig, OptimConfig, TrainConfig

MOST_ERRORS, LEAST_P = 4.0, 1e-5
BLOCKS = (8, 16)
RESERVED_S = 30.0
"""Seconds of each training beside its steps: loading, serving held-out prompts, writing."""
BUNDLED_PROMPTS = Path(__file__).parents[2] / "paceline" / "bench" / "prompts.jsonl"


@contextmanager
def brought_model(visit: Visit) -> Iterator[Path]:
    """The model's file, joined and checked. Raises Skipped when none was brought."""
    names = sorted(name for name in names_below(visit.bring) if name.endswith(".gguf")) if visit.bring else []
    if not names or visit.bring is None:
        raise Skipped("no model was brought (--bring)")
    with tempfile.TemporaryDirectory() as scratch:
        yield join(visit.bring, names[0], Path(scratch))


def brought_answers(visit: Visit) -> Path | None:
    return next(iter(sorted(visit.bring.rglob(ANSWERS))), None) if visit.bring else None


def real(visit: Visit) -> None:
    """Greedy text of every drafter at hand against plain decoding in float32, sampled text, and acceptance lengths."""
    with brought_model(visit) as path:
        llm = LLM(str(path), drafter="none", device=visit.device, dtype="float32", speculate="full", max_batch=4)
        prompts, most = prompts_for(visit, llm), visit.sized(96, 8)
        greedy = SamplingParams(max_tokens=most)
        plain = [out.token_ids for out in llm.generate_ids(prompts, greedy)]
        for name in drafters_at_hand(visit):
            what = f"real {Path(name).name}"
            with visit.part(what):
                try:
                    llm.use_drafter(name)
                except DrafterMismatchError as error:
                    raise Skipped(str(error)) from error
                began = time.perf_counter()
                answers = llm.generate_ids(prompts, greedy)
                spent_s = time.perf_counter() - began
                texts = [out.token_ids for out in answers]
                llm.use_drafter("none")
                gaps = parted(llm.target, prompts, plain, texts)
                figures = {
                    "acceptance_length": acceptance_length(answers),
                    "tokens_per_s": sum(map(len, texts)) / spent_s,
                }
                name_of_check = f"{what}: greedy text is plain decoding's"
                visit.check(name_of_check, are_same(gaps), parted=gaps, prompts=len(prompts), **figures)
                sampled(visit, llm, name, what, prompts)


def acceptance_length(answers: list[Completion]) -> float:
    """Tokens a round, the bonus token included."""
    accepted, rounds = (sum(getattr(out.stats, key) for out in answers) for key in ("num_accepted", "num_rounds"))
    return 1 + accepted / max(rounds, 1)


def prompts_for(visit: Visit, llm: LLM) -> list[list[int]]:
    """Token ids of answered prompts where they were brought, else of the bundled ones."""
    file, number = brought_answers(visit), visit.sized(16, 3)
    if file is not None:
        every = [answer.prompt_ids for answer in read_answers(file)]
    else:
        every = [llm.encode_chat(list(prompt.messages)) for prompt in read_prompts(str(BUNDLED_PROMPTS), limit=number)]
    room = llm.target.cache.max_len // 2
    return [ids for ids in every[:: max(len(every) // number, 1)] if len(ids) <= room][:number]


def drafters_at_hand(visit: Visit) -> list[str]:
    """Names and folders: those that need no file, shipped ones whose weights are there, and those that were brought."""
    shipped = [folder for name in SHIPPED if (folder := local(name)) and weights_file(folder).is_file()]
    extra = [file.parent for file in sorted(visit.bring.rglob("config.json"))] if visit.bring else []
    return ["ngram", "random-dflash", "random-eagle3", *map(str, visit.sized(shipped, []) + extra)]


def sampled(visit: Visit, llm: LLM, name: str, what: str, prompts: list[list[int]]) -> None:
    """Tests of sampled tokens as in lossless_sampled.py: mean NLL minus entropy, and chi-square of their points."""
    from lossless_sampled import p_value, scored

    number = visit.sized(128, 24)
    repeated = [prompts[index % len(prompts)] for index in range(number)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=index if visit.is_tiny else None)
        for index in range(number)
    ]
    llm.use_drafter(name)
    answers = llm.generate_ids(repeated, params)
    llm.use_drafter("none")
    luck, rows = random.Random(0), zip(repeated, answers, params, strict=True)
    pairs = [scored(llm, prompt, out.token_ids, own, luck) for prompt, out, own in rows]
    excess = torch.tensor([values for values, _ in pairs]).flatten()
    errors_off = float(excess.mean() / (excess.std() / len(excess) ** 0.5))
    chance = p_value([point for _, points in pairs for point in points])
    is_right = abs(errors_off) <= MOST_ERRORS and chance >= LEAST_P
    figures = {"standard_errors_off": errors_off, "p_value": chance, "acceptance_length": acceptance_length(answers)}
    visit.check(f"{what}: sampled text is the target's", is_right, completions=number, **figures)


class News(Progress):
    """A training's news, into the log and as lines."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._send(text)


def teach(visit: Visit) -> None:
    """Train by the default drafter's recipe for the time that is left, blocks of 8, then of 16; bring both back."""
    answers = brought_answers(visit)
    if answers is None:
        raise Skipped("no answers were brought (--bring)")
    with brought_model(visit) as path, tempfile.TemporaryDirectory() as scratch:
        blocks = visit.sized(BLOCKS, BLOCKS[:1])
        for number, block in enumerate(blocks):
            share_s = (visit.left_s - 10) / (len(blocks) - number) - visit.sized(RESERVED_S, 0)
            folder, name = Path(scratch) / f"block-{block}", f"teach, blocks of {block}"
            with visit.part(name):
                if share_s < visit.sized(20, 0):
                    raise Skipped("no time is left")
                news = News(lambda text, name=name: visit.report(name, news=text))
                result = train(recipe(visit, path, answers, folder, block, share_s), progress=news)
                figures = {
                    "steps": result.steps,
                    "blocks": result.blocks,
                    "expected": result.eal,
                    "served": result.heldout,
                }
                visit.report(name, **figures, share_s=share_s)
                visit.check(f"{name} learned", result.steps > 0, **figures)
            if folder.is_dir():
                bring_back(visit, folder, block, Path(scratch) / "drafters")
            free_memory()


def recipe(visit: Visit, model: Path, answers: Path, out: Path, block: int, seconds: float) -> TrainConfig:
    """recipes/default_drafter.sh in one training, with packs and steps of a size that keeps a GPU busy."""
    loop = LoopConfig(
        epochs=200.0, max_steps=visit.sized(None, 3), max_minutes=seconds / 60, blocks_per_step=visit.sized(512, 16),
        anchors=visit.sized(128, 8), blocks_per_pack=512, tokens_per_pack=visit.sized(32768, 512),
        loss=LossConfig("d-pace", vocab=visit.sized(8192, None)), optim=OptimConfig(lr=2e-3), keep="best",
        heldout_every=visit.sized(250, 3), checkpoint_minutes=1.0, selector_from=0.2, autocast=not visit.is_tiny,
    )  # fmt: skip
    kind = {"kind": "dflash2", "selector_rank": 64, "start": "copied"}
    shape = DrafterShape(num_layers=visit.sized(3, 1), block_size=block, **kind)
    target = EngineConfig(str(model), device=visit.device, dtype=visit.sized("bfloat16", "float32"))
    answering = AnswerConfig(max_tokens=visit.sized(128, 4))  # of the held-out prompts that are served at the end
    return TrainConfig(
        out=out, target=target, answers=(answers,), plan="off", features="online", max_len=visit.sized(512, 64),
        shape=shape, loop=loop, answering=answering,
    )  # fmt: skip


def bring_back(visit: Visit, run: Path, block: int, drafters: Path) -> None:
    """Add the finished drafter, or the best checkpoint so far, in 8 bits to the tar that is brought back."""
    every = run / "drafter", run / "checkpoints" / "best"
    folders = [folder for folder in every if (folder / "config.json").is_file()]
    with visit.part(f"bring back blocks of {block}"):
        if not folders:
            raise Skipped("there is no checkpoint yet")
        read_drafter(folders[0]).save(drafters / f"block-{block}", in_8_bits=True)
        pieces = pack(drafters, "drafters.tar", visit.out)
        visit.report(f"brought back, blocks of {block}", source=folders[0].name, pieces=pieces)
