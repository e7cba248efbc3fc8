"""Is a DSpark drafter's confidence head a better estimate of acceptance than the probability of the draft itself?

    python experiments/dspark_confidence.py runs/dspark/drafter --model smollm2-135m --prompts gsm8k_test.jsonl

The drafter drafts the same tokens with and without its confidence head, so both estimates are of the same drafts: those
that the target reached, which are a round's accepted ones and the first that was refused. Printed are the mean estimate
beside the share that was accepted, the Brier score, the logarithmic loss in nats, and the expected calibration error in
ten bins of equal width; smaller is better, but for the mean. Greedy, one request at a time, all drafts checked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline import LLM, SamplingParams
from paceline.data.prompts import read_prompts
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dspark.drafter import DSparkDrafter, DSparkNetwork
from paceline.draft.formats.family import read_drafter
from paceline.plan.planner import FixedPlanner, Plan
from paceline.report.tables import Column, Table
from paceline.types import RoundStats


class Watching(FixedPlanner):
    """Checks every draft, and keeps each estimate beside its outcome."""

    def __init__(self) -> None:
        super().__init__(whole_blocks=False)
        self.seen: list[tuple[float, bool]] = []

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        rows = zip(stats.confidence_B or [], stats.num_drafted_B, stats.num_accepted_B, strict=False)
        for confidence, num_drafted, num_accepted in rows:
            reached = min(num_accepted + 1, num_drafted)
            self.seen += [(logprob, slot < num_accepted) for slot, logprob in enumerate((confidence or [])[:reached])]


def without_head(drafter: DSparkDrafter) -> DSparkDrafter:
    nested = drafter.config.raw["dflash_config"] | {"enable_confidence_head": False}
    config = DFlashConfig.from_json({**drafter.config.raw, "dflash_config": nested})
    tensors = {name: each for name, each in drafter.network.state_dict().items() if not name.startswith("confidence")}
    return DSparkDrafter(DSparkNetwork.of(config, tensors), draft_ids=drafter.draft_ids, head_VD=drafter.head_VD)


def scores(seen: list[tuple[float, bool]]) -> dict[str, Any]:
    chances = np.exp([logprob for logprob, _ in seen]).clip(1e-6, 1 - 1e-6)
    accepted = np.array([is_accepted for _, is_accepted in seen])
    bins = np.minimum((chances * 10).astype(int), 9)
    gaps = [abs(chances[bins == each].sum() - accepted[bins == each].sum()) for each in range(10)]
    return {
        "drafts": len(seen),
        "mean": float(chances.mean()),
        "accepted": float(accepted.mean()),
        "brier": float(((chances - accepted) ** 2).mean()),
        "log_loss": float(-np.log(np.where(accepted, chances, 1 - chances)).mean()),
        "calibration_error": float(sum(gaps) / len(seen)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    drafter = read_drafter(args.drafter)
    if not isinstance(drafter, DSparkDrafter) or drafter.network.confidence_head is None:
        parser.error(f"{args.drafter} holds no DSpark drafter with a confidence head")
    llm = LLM(args.model, drafter="none")
    prompts = [each for file in args.prompts for each in read_prompts(file, args.limit)]
    params = SamplingParams(max_tokens=args.max_tokens)
    rows, texts = [], []
    for name, each in (("confidence head", drafter), ("the draft's probability", without_head(drafter))):
        llm.use_drafter(each)
        llm.engine.planner = watching = Watching()
        texts.append([llm.generate_ids([llm.encode_chat(prompt.messages)], params)[0].text for prompt in prompts])
        rows.append({"estimate": name, **scores(watching.seen)})
    columns = [Column("estimate", lambda row: row["estimate"])]
    for key in ("drafts", "mean", "accepted", "brier", "log_loss", "calibration_error"):
        columns.append(Column(key.replace("_", " "), lambda row, key=key: row[key], "{:.4g}", "right"))
    Table(columns, rows).show()
    print(json.dumps({"texts_are_equal": texts[0] == texts[1]}))


if __name__ == "__main__":
    main()
