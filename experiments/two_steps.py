"""Whether a DFlash drafter gains from a second denoising step, in which the beginning of its own drafts is revealed.

    .venv/bin/python -m paceline regenerate --prompts gsm8k_train.jsonl --limit 1200 --out runs/texts
    .venv/bin/python experiments/two_steps.py --answers runs/texts --out runs/two-steps

    pass 1   [anchor, MASK x 7]               drafts d1 .. d7: DFlash, which drafts every token without the others
    pass 2   [anchor, d1 .. dr, MASK x 7-r]   drafts the rest anew, from the first r drafts: the block is d1 .. dr, rest

The number r is chosen at inference: a fixed one, or the longest beginning of the drafts whose product of probabilities
is at least a threshold. With r = 0 or r = 7 there is no second pass. Two networks of equal size train for equal minutes
(`two_ideas.py` has the data, the loop and the measurement):

    one   every block is all MASK, as DFlash is trained
    two   half of the blocks are; in the others, 1 to 6 true tokens are revealed, and only the rest is learned

`two` learns from true tokens because a wrong draft ends the accepted ones, whatever pass 2 drafts behind it: with
greedy verification, pass 2 matters only where the revealed drafts are the true tokens. For the same reason seven
passes, with 0 to 6 true tokens revealed, give the figures of all rules: a revealed token counts only if pass 1 drafted
it.

Ceilings are printed first. "True first r" reveals the target's tokens and counts them as accepted: a first pass that
is perfect so far. "Best r" chooses, for each block, how many of its own drafts to reveal, by looking at the answer.

With v and c, the times of a verify pass and of a drafter's pass over a plain target pass, a second pass in a share s of
the rounds pays if N2 / N1 > (v + (1 + s) c) / (v + c), where N1 and N2 are the acceptance lengths with one and two
passes. `paceline bench steps` measures v and c at the end, one request at a time, if they are not given; its c includes
reading the features of accepted tokens, which a second pass does not repeat. The rule with the most tokens per second
on a third of the held-out documents is the chosen one; the others are measured. Intervals: 95%, bootstrap over
documents, of the mean over seeds. A killed run continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from two_ideas import NUM_DRAFTS, Study, study_parser, with_seeds

from paceline.bench.config import StepsConfig
from paceline.bench.runs import bench_steps
from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.report.tables import Column, Table
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head, SlotMetrics, Slots, head_loss
from paceline.train.learn.packs import DFlashTrainable, Pack, Trainable

SHARES = {"one": 0.0, "two": 0.5}
"""The two networks: the share of their blocks in which true tokens are revealed."""
FIXED, THRESHOLDS = (1, 2, 3), (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
ONE_PASS, BEST = "one pass", "ceiling: best r of each block"
TRUE = {f"ceiling: true first {number}": number for number in FIXED}
OWN = {f"own first {number}": number for number in FIXED}
SURE = {f"own while probability >= {least:g}": least for least in THRESHOLDS}
NUM_DRAWS = 1000


class Revealing(DFlashTrainable):
    """DFlash whose blocks may begin with known tokens after the anchor. `share`: of the training blocks that do."""

    def __init__(self, network: DFlashNetwork, raw: dict[str, Any], share: float) -> None:
        super().__init__(network, raw)
        self.share = share

    def input_tokens(self, pack: Pack, tokens_AK: Tensor, num_A: Tensor) -> Tensor:
        """Returns the input [A, 1 + K] of each block: the anchor, the first num_A of tokens_AK, and MASK."""
        is_masked_AK = torch.arange(tokens_AK.shape[1], device=num_A.device) >= num_A[:, None]
        return torch.cat([pack.anchors_A[:, None], tokens_AK.masked_fill(is_masked_AK, self._config.mask_token_id)], 1)

    def hidden_after(self, pack: Pack, tokens_AK: Tensor, num_A: Tensor, *options: Any) -> Tensor:
        """Returns the hidden states [A * K, D] with the first num_A of tokens_AK revealed; `options`: as of `hidden`.
        Hidden states of revealed positions predict nothing."""
        return self.hidden_of(self.input_tokens(pack, tokens_AK, num_A), pack, *options)


class RevealingTrainer(Trainer):
    """Trains with true tokens revealed in the drafter's share of the blocks."""

    def pack_loss(
        self, pack: Pack, head: Head, num_slots: float, is_measured: bool = True
    ) -> tuple[Tensor, SlotMetrics]:
        drafter, config = self.drafter, self.config
        assert isinstance(drafter, Revealing)
        num_A = drawn_counts(pack, drafter.share, config.seed, self.state.step)
        hidden_TD = drafter.hidden_after(pack, pack.slots.labels_AK, num_A, self.embedding_VD, config.autocast)
        rows_T, slots = unrevealed_first(pack.slots, num_A)
        return head_loss(hidden_TD[rows_T], slots, head, config.loss, num_slots, is_measured)


def drawn_counts(pack: Pack, share: float, seed: int, step: int) -> Tensor:
    """Returns how many tokens of each block are revealed, [A]: in this share of them 1 to K - 1, else 0. The draw
    depends on the blocks and the step alone, so that a continued run has the same."""
    (num_blocks, num_drafts), anchors = pack.slots.labels_AK.shape, torch.cat(pack.layout.anchors)
    draw = np.random.default_rng((seed, step, zlib.crc32(anchors.cpu().numpy().tobytes())))
    counts_A = np.where(draw.random(num_blocks) < share, draw.integers(1, num_drafts, num_blocks), 0)
    return torch.from_numpy(counts_A).to(anchors.device)


def unrevealed_first(slots: Slots, num_A: Tensor) -> tuple[Tensor, Slots]:
    """Moves the first num_A slots of each block to its end, where they are not valid: returns the rows of hidden
    states in that order, [A * K], and the slots. Where they are, they would take all weight from the slots behind them:
    d-pace multiplies the chances of earlier slots, and a slot that is not valid has none."""
    size, device = slots.labels_AK.shape[1], num_A.device
    place_AK = torch.arange(size, device=device) + num_A[:, None]
    moved_AK = place_AK % size
    rows_AK = moved_AK + size * torch.arange(len(num_A), device=device)[:, None]
    valid_AK = slots.valid_AK.gather(1, moved_AK) & (place_AK < size)
    return rows_AK.flatten(), Slots(slots.labels_AK.gather(1, moved_AK), valid_AK)


@torch.no_grad()
def seven_passes(
    drafter: Revealing, pack: Pack, embedding_VD: Tensor, head: Head, *options: Any
) -> tuple[Tensor, Tensor]:
    """Returns right_AR [A, K], r plus the leading right drafts with r = 0 .. K - 1 true tokens revealed, and sure_AK
    [A, K], the product of the probabilities of pass 1's drafts up to each."""
    labels_AK, right = pack.slots.labels_AK, list[Tensor]()
    counts = [torch.full_like(pack.anchors_A, number) for number in range(labels_AK.shape[1])]
    hidden = [drafter.hidden_after(pack, labels_AK, num_A, embedding_VD, *options) for num_A in counts]
    for number, hidden_TD in enumerate(hidden):
        right_AK = drafter.right(hidden_TD, pack, head, embedding_VD)
        right_AK[:, :number] = True
        right.append(right_AK.cumprod(dim=1).sum(dim=1))
    probs_T = head.logits(hidden[0]).float().softmax(-1).amax(-1)
    return torch.stack(right, dim=1), probs_T.view(labels_AK.shape).cumprod(dim=1)


def by_rule(right_AR: Tensor, sure_AK: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns, for each rule, the acceptance length of each block and whether it has a second pass, [A] each; the
    arguments are those that `seven_passes` returns."""
    first_A1, number_R = right_AR[:, :1], torch.arange(right_AR.shape[1])
    # Pass 2 changes the accepted drafts only if all that it reveals are right.
    own_AR = torch.where(first_A1 >= number_R, right_AR, first_A1)

    def own(number_A: Tensor) -> tuple[Tensor, Tensor]:
        return 1 + own_AR.gather(1, number_A[:, None])[:, 0], number_A > 0

    is_all_A = torch.ones(len(right_AR), dtype=torch.bool)
    rules = {ONE_PASS: own(torch.zeros(len(right_AR), dtype=torch.long))}
    rules |= {name: (1 + right_AR[:, number], is_all_A) for name, number in TRUE.items()}
    rules[BEST] = own(own_AR.argmax(dim=1))
    rules |= {name: own(is_all_A.long() * number) for name, number in OWN.items()}
    # All drafts are sure: nothing is left to draft anew, as with r = 0.
    return rules | {name: own((sure_AK >= least).sum(1) % sure_AK.shape[1]) for name, least in SURE.items()}


class Steps(Study):
    """The study of one or two steps: `two_ideas.Study` with other networks, and figures of all rules."""

    trainer = RevealingTrainer
    not_settings = (*Study.not_settings, "draft_cost", "verify_cost")

    def cell(self, name: str, seed: int) -> tuple[Trainable, Tensor]:
        drafter, scale_F = super().cell("block + injection", seed)
        assert isinstance(drafter.network, DFlashNetwork)
        return Revealing(drafter.network, drafter.raw, SHARES[name]), scale_F

    def measured(self, drafter: Trainable, scale_F: Tensor, use: str) -> dict[str, Any]:
        """Returns {use: {rule: {"lengths": each document's sum of acceptance lengths, "passes": its number of second
        passes}}}, with the number of anchors as the lengths of the rule "anchors"."""
        assert isinstance(drafter, Revealing)
        figures: dict[str, Any] = {}
        for use in ("tune", "measure"):
            figures[use] = {rule: {"lengths": [], "passes": []} for rule in (ONE_PASS, *TRUE, BEST, *OWN, *SURE)}
            figures[use]["anchors"] = {"lengths": []}
            for pack in self.packs(scale_F, use):
                passes = seven_passes(drafter, pack, self.embedding_VD, self.head, self.is_autocast)
                for rule, (length_A, has_second_A) in by_rule(*(each.cpu() for each in passes)).items():
                    figures[use][rule]["lengths"].append(int(length_A.sum()))
                    figures[use][rule]["passes"].append(int(has_second_A.sum()))
                figures[use]["anchors"]["lengths"].append(len(pack.anchors_A))
        return figures

    def costs(self) -> dict[str, float]:
        """Returns the times of a verify pass and of a drafter's pass over a plain target pass: those given as options,
        or measured once with random weights (steps.json)."""
        args, file = self.args, self.args.out / "bench-steps" / "steps.json"
        if args.verify_cost is not None and args.draft_cost is not None:
            return {"verify": args.verify_cost, "draft": args.draft_cost}
        if not file.exists():
            drafter, folder = super().cell("block + injection", 0)[0], args.out / "random-drafter"
            write_checkpoint(folder, drafter.raw, drafter.network.state_dict(), self.ids)
            bench = StepsConfig(batches=(1,), max_positions=1 + NUM_DRAFTS)
            bench_steps(EngineConfig(model=args.target, drafter=str(folder)), bench, file.parent)
        steps = json.loads(file.read_text())
        seconds = {(use, size): spent for use in ("verify", "draft") for _, size, spent in steps[use]}
        plain_s, verify_s = seconds["verify", 1], seconds["verify", 1 + NUM_DRAFTS]
        measured = {"verify": verify_s / plain_s, "draft": seconds["draft", NUM_DRAFTS] / plain_s}
        given = {"verify": args.verify_cost, "draft": args.draft_cost}
        return measured | {name: float(cost) for name, cost in given.items() if cost is not None}


def ratio(above_SD: NDArray[Any], below_SD: NDArray[Any]) -> dict[str, Any]:
    """Returns the ratio of the sums over documents, its interval, and its value for each seed."""
    num_documents = above_SD.shape[1]
    draws = np.random.default_rng(0).choice(num_documents, (NUM_DRAWS, num_documents))
    drawn_N = above_SD.mean(0)[draws].sum(-1) / below_SD.mean(0)[draws].sum(-1)
    seeds_S = above_SD.sum(-1) / below_SD.sum(-1)
    value = above_SD.sum() / below_SD.sum()
    return {"value": value, "interval": np.quantile(drawn_N, (0.025, 0.975)), "seeds": seeds_S}


def summary(runs: dict[str, list[dict[str, Any]]], costs: dict[str, float]) -> dict[str, Any]:
    """Returns the figures of each network and rule, each network's chosen rule, and the comparison of both networks."""

    def of(name: str, rule: str, key: str = "lengths", use: str = "measure") -> NDArray[Any]:
        return np.array([run[use][rule][key] for run in runs[name]], dtype=np.float64)

    def compared(name: str, rule: str, base: str, use: str = "measure") -> dict[str, Any]:
        """Compares with one pass of the network `base`; `needed`: the ratio above which the second passes pay."""
        share = of(name, rule, "passes", use).sum() / of(name, "anchors", use=use).sum()
        needed = (costs["verify"] + (1 + share) * costs["draft"]) / (costs["verify"] + costs["draft"])
        gain = ratio(of(name, rule, use=use), of(base, ONE_PASS, use=use))
        low, high = gain["interval"]
        verdict = "yes" if low > needed else "no" if high < needed else "unclear"
        pays = None if rule in TRUE or (share == 0 and name == base) else verdict
        return {"gain": gain, "second_passes": share, "needed": needed, "pays": pays}

    figures: dict[str, Any] = {"costs": costs, "networks": {}, "chosen": {}}
    for name in runs:
        figures["networks"][name] = {
            rule: {"length": ratio(of(name, rule), of(name, "anchors"))} | compared(name, rule, name)
            for rule in (ONE_PASS, *TRUE, BEST, *OWN, *SURE)
        }
        tuned = {rule: compared(name, rule, name, "tune") for rule in (ONE_PASS, *OWN, *SURE)}
        figures["chosen"][name] = max(tuned, key=lambda rule: tuned[rule]["gain"]["value"] / tuned[rule]["needed"])
    rules = {"one pass": ONE_PASS, f"chosen: {figures['chosen']['two']}": figures["chosen"]["two"]}
    figures["two over one pass of one"] = {title: compared("two", rule, "one") for title, rule in rules.items()}
    return figures


def tables(figures: dict[str, Any]) -> list[Table]:
    """Returns a table for each network, and that of both."""

    def table(title: str, rows: dict[str, Any], has_length: bool) -> Table:
        lengths = [Column("acceptance length", lambda rule: with_seeds(rows[rule]["length"]))] if has_length else []
        gains = [
            Column("over one pass", lambda rule: with_seeds(rows[rule]["gain"])),
            Column("second passes", lambda rule: rows[rule]["second_passes"], "{:.0%}"),
            Column("needed", lambda rule: rows[rule]["needed"], "{:.3f}"),
            Column("pays", lambda rule: rows[rule]["pays"]),
        ]
        return Table([Column(title, str), *lengths, *gains], list(rows))

    shown = [table(f"network {name}", rows, True) for name, rows in figures["networks"].items()]
    return [*shown, table("network two over one pass of one", figures["two over one pass of one"], False)]


def main(words: list[str] | None = None) -> None:
    study = Steps(args := arguments(words))
    # Both networks of a seed, then the next seed: changes of the machine's speed meet both.
    of_seeds = [{name: study.run(name, seed, args.rate) for name in SHARES} for seed in range(args.seeds)]
    runs = {name: [of_seed[name] for of_seed in of_seeds] for name in SHARES}
    figures = summary(runs, study.costs())
    study.write({"figures": figures})
    print("times over a plain target pass: verify {verify:.2f}, drafter {draft:.2f}".format(**figures["costs"]))
    print("chosen on the tuning documents: " + ", ".join(f"{name}: {rule}" for name, rule in figures["chosen"].items()))
    for table in tables(figures):
        table.show(stderr=False)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, 2, "runs/two-steps")
    parser.add_argument("--rate", type=float, default=1.6e-3, help="learning rate; two_ideas.py compares several")
    parser.add_argument("--verify-cost", type=float, help="verify pass over a plain target pass [default: measured]")
    parser.add_argument("--draft-cost", type=float, help="drafter's pass over a plain target pass [default: measured]")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
