"""GRPO by TRL on word problems with a calculator, rollouts by paceline: with speculation the same samples, and how much
sooner.

    .venv/bin/python experiments/grpo_tools.py --out runs/grpo --arm follow --steps 40
    .venv/bin/python experiments/grpo_tools.py --out runs/grpo --arm plain --steps 40
    .venv/bin/python experiments/grpo_tools.py --out runs/grpo --report

Arms: `plain` decodes without drafts; `follow` has the shipped drafter, trained on each step's rollouts. Both have the
same seeds: their samples, and so their curves, must be the same, token for token (`--report` says so, from the digest
of each step's tokens). Every `--compare-every` steps the arm with drafts makes that step's attempts again, plainly and
with drafts in turns, for the speed-up; and with whole blocks of the drafter that followed and of the one that did not,
for what its tokens a round fall to. `--speed` measures both by the number of rows of the engine. A run that was stopped
goes on from its last checkpoint with the same command.

The model is SmolLM2-135M-Instruct, whose 4-bit file is expanded to float32 once (`OUT/model`). `--tiny` goes through
all of it with a random model in seconds. Needs pip install 'paceline[rl,serve,hf]'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from grpo_agents import AGENTS, problems, reward

from paceline.draft import shipped
from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.formats.family import read_drafter
from paceline.engine.llm import LLM
from paceline.hub import resolve
from paceline.loop.rl.agents import AgentRollouts, Trajectory, by_code
from paceline.loop.rl.endpoint import Endpoint
from paceline.loop.rl.follow import DFlashFollower, FollowConfig
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts
from paceline.loop.rl.with_trl import agent_rollout_func, attempt_reward, task_rows, trl
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Rounds
from paceline.runs.folder import RunFolder, append_lines
from paceline.train.config import OptimConfig
from paceline.train.tiny import write_tiny_target

MODEL = "smollm2-135m"
LOG = "rollouts.jsonl"


def model_folder(args: argparse.Namespace) -> Path:
    """The model as a folder of float32 weights, made once."""
    folder = args.out / ("tiny" if args.tiny else "model")
    if args.tiny:
        return write_tiny_target(folder)
    if not (folder / "generation_config.json").is_file():
        from gguf_to_folder import write_folder

        write_folder(resolve(MODEL), folder)
    return folder


def new_drafter(args: argparse.Namespace, folder: Path) -> DFlashDrafter:
    """The one that ships, read anew; in a tiny run a random one."""
    if not args.tiny:
        return read_drafter(shipped.find(MODEL))
    target = LLM(str(folder), drafter="none", device="cpu", dtype="float32", max_len=64).target
    return DFlashDrafter.random(target, num_layers=1, block_size=4)


def policy(args: argparse.Namespace, folder: Path, step: int = 0) -> Rollouts:
    """The policy in the engine, with the drafter of this arm; of one that follows, as it was at this step."""
    stored = args.out / args.arm / f"drafter-{step}"
    drafter = "none" if args.arm == "plain" else read_drafter(stored) if stored.is_dir() else new_drafter(args, folder)
    llm = LLM(str(folder), drafter=drafter, device="cpu", dtype="float32", max_batch=args.rows, max_len=args.max_len)
    follower = None
    if args.arm == "follow":
        optim = OptimConfig(lr=args.drafter_lr)
        follower = DFlashFollower(llm.drafter, FollowConfig(steps=args.drafter_steps, optim=optim, seed=args.seed))
    return Rollouts(llm, RolloutConfig(seed=args.seed, max_tokens=args.max_tokens), follower=follower)


class Logged:
    """Attempts whose figures go to a file, step by step, and which are made again to be compared."""

    def __init__(self, agents: AgentRollouts, args: argparse.Namespace, folder: Path) -> None:
        self.agents, self.rollouts, self.endpoint, self.args = agents, agents.rollouts, agents.endpoint, args
        self.still = new_drafter(args, folder) if args.arm == "follow" and args.compare_every else None
        """The drafter of the beginning, which does not follow."""
        self.file = args.out / args.arm / LOG

    def run(self, tasks: list[tuple[Any, int]]) -> list[list[Trajectory]]:
        """Run the agents like AgentRollouts.run."""
        groups = self.agents.run(tasks)
        self._save_drafter(self.rollouts.step)
        figures = self.rollouts.figures[-1].as_json() | {"digest": digest(groups)}
        is_due = self.args.arm != "plain" and self.args.compare_every and figures["step"] % self.args.compare_every == 0
        if is_due:
            figures["again"] = self._again(tasks, figures)
        append_lines(self.file, [figures])
        text = " / ".join(groups[0][0].texts)
        print(
            f"step {figures['step']}: reward {figures['reward']:.3f}, "
            f"{figures['tokens_per_round']:.2f} tokens a round: {text}",
            flush=True,
        )
        return groups

    def _save_drafter(self, step: int) -> None:
        """Where the trainer has just written a checkpoint."""
        if self.args.arm == "follow" and step and step % self.args.save_steps == 0:
            for older in self.file.parent.glob("drafter-*"):
                shutil.rmtree(older)
            drafter = self.rollouts.llm.drafter
            assert isinstance(drafter, DFlashDrafter)
            drafter.save(self.file.parent / f"drafter-{step}")

    def _again(self, tasks: list[tuple[Any, int]], figures: dict[str, Any]) -> dict[str, Any]:
        """The step's attempts plainly and with drafts as the planner has them, in turns, for the time that takes; then
        each drafter's whole blocks in every round, for what they bring."""
        seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
        followed = self.rollouts.llm.drafter
        for way in ("plain", "drafted", "drafted", "plain"):
            began = time.perf_counter()
            self._once_more(tasks, figures, None if way == "plain" else followed)
            seconds[way].append(time.perf_counter() - began)
        drafters = {"drafter": followed} | ({"still": self.still} if self.still else {})
        whole = {name: self._once_more(tasks, figures, drafter, whole=True) for name, drafter in drafters.items()}
        self.endpoint.call(lambda llm: llm.use_drafter(followed))
        return {"seconds": seconds, "tokens_per_round": whole}

    def _once_more(
        self, tasks: list[tuple[Any, int]], figures: dict[str, Any], drafter: Drafter | None, *, whole: bool = False
    ) -> float:
        """The same attempts with empty caches; their tokens a round. Ends the run where a sample differs."""

        def prepare(llm: LLM) -> None:
            llm.use_drafter(drafter)
            llm.renew()
            if whole:
                llm.engine.planner = FixedPlanner()

        self.endpoint.call(prepare)
        groups = self.agents.run(tasks, place=self.rollouts.place)
        if digest(groups) != figures["digest"]:
            raise SystemExit(f"step {figures['step']}: the samples are others than before: report this as a defect")
        return Rounds.sum(each.rounds for group in groups for each in group).tokens_per_round


def digest(groups: list[list[Trajectory]]) -> str:
    """Hash of all tokens, in order."""
    token_ids = [[each.sample.prompt_ids, each.sample.completion_ids] for group in groups for each in group]
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def speed(args: argparse.Namespace) -> None:
    """Tokens a second of the first batch, plainly and with drafts, by how many attempts the engine has at once: the
    best plain number is what drafts must be held against."""
    folder, tasks = model_folder(args), [(task, args.attempts) for task in problems(args.tasks, args.seed)]
    args.arm = "still"  # drafts without following: no arm of a training
    for rows in (1, 2, 4, 8, 16):
        args.rows = rows
        rollouts = policy(args, folder)
        drafter = rollouts.llm.drafter
        with Endpoint(rollouts) as endpoint:
            agents = AgentRollouts(endpoint, AGENTS[args.agent], by_code(reward))
            rates: dict[str, list[float]] = {}
            for each in (drafter, None, drafter, None, drafter):  # the first teaches the planner
                endpoint.call(lambda llm, each=each: llm.use_drafter(each))
                endpoint.call(lambda llm: llm.renew())
                began = time.perf_counter()
                groups = agents.run(tasks, place="0.0")
                spent, tokens = (
                    time.perf_counter() - began,
                    sum(sum(one.sample.mask) for group in groups for one in group),
                )
                rates.setdefault("plain" if each is None else "drafted", []).append(tokens / spent)
        print(
            json.dumps({"rows": rows, "tokens": tokens, "plain": rates["plain"], "drafted": rates["drafted"][1:]}),
            flush=True,
        )


def train(args: argparse.Namespace) -> None:
    """One arm, from its last checkpoint if there is one."""
    library = trl()
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    folder, out = model_folder(args), args.out / args.arm
    checkpoints = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    step = int(checkpoints[-1].name.partition("-")[2]) if checkpoints else 0
    rollouts = policy(args, folder, step)
    cut_log(out / LOG, step)
    settings = library.GRPOConfig(
        output_dir=str(out), max_steps=args.steps, learning_rate=args.lr, lr_scheduler_type="constant", seed=args.seed,
        per_device_train_batch_size=args.attempts * args.tasks // args.accumulate,
        gradient_accumulation_steps=args.accumulate,
        num_generations=args.attempts, max_completion_length=4 * args.max_tokens, beta=0.0, temperature=1.0,
        save_steps=args.save_steps, save_total_limit=1, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    with Endpoint(rollouts) as endpoint:
        agents: Any = Logged(AgentRollouts(endpoint, AGENTS[args.agent], by_code(reward)), args, folder)
        trainer = library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=[attempt_reward],
            args=settings,
            train_dataset=Dataset.from_list(task_rows(problems(args.problems, args.seed))),
            rollout_func=agent_rollout_func(agents),
        )
        trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
        (out / "history.json").write_text(json.dumps(trainer.state.log_history))


def cut_log(file: Path, step: int) -> None:
    """Leave out what a run that goes on after this step will write again."""
    if file.is_file():
        kept = [line for line in file.read_text().splitlines(True) if json.loads(line)["step"] < step]
        file.write_text("".join(kept))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Results of the variants so far: means of the first and of the last `--ends` steps."""
    arms = {arm: lines for arm in ("plain", "follow") if (lines := RunFolder(args.out / arm).lines(LOG))}
    if not arms:
        raise SystemExit(f"there is no arm in {args.out}: run one with --arm")
    ends, result = max(1, args.ends), dict[str, Any]()
    for arm, steps in arms.items():
        curves = {name: [each[name] for each in steps] for name in ("reward", "tokens_per_round")}
        pairs = [(statistics.mean(each[:ends]), statistics.mean(each[-ends:])) for each in curves.values()]
        result[arm] = dict(zip(curves, pairs, strict=True)) | {"steps": len(steps)}
        again = [each["again"] for each in steps if "again" in each]
        if again:
            result[arm] |= compared(again)
    common = min(map(len, arms.values()))
    digests = {arm: [each["digest"] for each in steps[:common]] for arm, steps in arms.items()}
    result["same_samples"] = {"steps": common, "arms": list(arms), "same": len(set(map(tuple, digests.values()))) == 1}
    print(json.dumps(result, indent=1))
    return result


def compared(again: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-up over plain sampling of the same attempts, and tokens a round of whole blocks by who drafted, look by
    look."""
    result: dict[str, Any] = {}
    ratios = [sum(each["seconds"]["plain"]) / sum(each["seconds"]["drafted"]) for each in again]
    result["speed_up"] = {"median": statistics.median(ratios), "each": [round(ratio, 3) for ratio in ratios]}
    for who in again[0]["tokens_per_round"]:
        result[f"whole_blocks_{who}"] = [round(each["tokens_per_round"][who], 3) for each in again]
    return result


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--arm", choices=("plain", "follow"), default="follow")
    parser.add_argument("--agent", choices=tuple(AGENTS), default="plain")
    parser.add_argument("--report", action="store_true", help="only say what the arms came to")
    parser.add_argument("--speed", action="store_true", help="only measure rollouts, by rows of the engine")
    parser.add_argument("--tiny", action="store_true", help="a random model, in seconds")
    numbers: dict[str, tuple[Callable[[str], Any], Any]] = {
        "steps": (int, 40), "tasks": (int, 4), "attempts": (int, 6), "accumulate": (int, 4), "problems": (int, 400),
        "rows": (int, 1), "max_tokens": (int, 32), "max_len": (int, 512), "lr": (float, 1e-5), "seed": (int, 1),
        "drafter_steps": (int, 2), "drafter_lr": (float, 1e-4), "compare_every": (int, 5), "save_steps": (int, 10),
        "ends": (int, 5),
    }  # fmt: skip
    for name, (kind, default) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    return parser


def main(words: list[str] | None = None) -> None:
    args = arguments().parse_args(words)
    if args.speed:
        speed(args)
        return
    if not args.report:
        train(args)
    report(args)


if __name__ == "__main__":
    main()
