"""Whole rounds on the device: draft, verify, accept, commit and inject (write the features of the new positions into
the drafter's cache), captured as one CUDA graph. The host waits for the device once per round.

The drafter's part is its `StaticDrafting`: one block of DFlash (`draft/dflash/static.py`), or the drafting steps of
EAGLE-3 or MTP (`draft/eagle3/static.py`).

Lengths, anchors (last committed tokens) and settings of all rows are stored on the device. A round drafts a block,
verifies it, counts the accepted drafts, updates each row's length and anchor, and injects the features of all verified
positions. The entries after the accepted drafts are not used, as in the target's cache. The host then reads one small
tensor. A round without drafts is plain decoding.

A round qualifies if all its rows do: greedy, or sampled by temperature, min-p, top-k and top-p, with drafts of one
DFlash (1 or 2), DSpark, EAGLE-3 or MTP drafter or none. Otherwise the whole batch takes `round.decode_round`. If
sampling a row needs the whole distribution, the host samples it from the same pass. Drafts are not cut by confidence:
the planner's number of drafts is verified.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.draft.base import Observed
from paceline.draft.pool import Pool
from paceline.draft.tapped import TappedDrafter, Verified
from paceline.engine.device_rows import DeviceRows, Marks, RowState
from paceline.engine.round import RuleJudge, commit, failure_reason, is_shaped, sampled_token
from paceline.errors import ConfigError
from paceline.lossy import LOSSY
from paceline.model.sampling.device_race import FAILED, WHOLE, race
from paceline.model.target import Target
from paceline.model.torch.cuda_graphs import Grid, Recordings, Region, row_sizes
from paceline.model.torch.recorded_pass import GraphDecoder, can_record, pass_grid
from paceline.types import NONE, Batch, DraftBlock, RoundStats, Take, Verdict

EVERYWHERE = False
"""True if engines also compute device rounds on devices without CUDA graphs; set by tests."""
FEW_STEPS = 4
"""Numbers of drafts up to this have rounds of their own if each draft is a step of the drafter; otherwise a few drafts
would take the steps of many."""
ROUNDS = "device"
"""Key of `DeviceRounds.counts` that counts device rounds."""


class Form(NamedTuple):
    """Properties of a round that are fixed in its CUDA graph: rounds that differ in one of them need different graphs.
    `drafter`: the drafter of all rows that draft; None for rounds without drafts."""

    is_drawn: bool
    """True if some rows are sampled, by an exponential race; the other rows take the most probable tokens."""
    is_mocked: bool
    """True if a table prescribes the number of accepted drafts (`verify.rules.mocked`)."""
    drafter: TappedDrafter | None = None


class Outcome(NamedTuple):
    """Result of one row in a round that the device computed as one CUDA graph: the verified drafts, the drafter's
    log-probability of each (`confidence`), the number of accepted ones, and the bonus token."""

    num_accepted: int
    bonus: int
    """Token id of the bonus token. FAILED: the logits were not finite. WHOLE: the host must sample from the whole
    distribution."""
    drafts: list[int]
    """Token ids of the drafts that were verified."""
    confidence: list[float]


class StaticRound(Region):
    """One decode round of fixed shape, to be captured as a CUDA graph: cache rows 0 to B-1, up to K drafts per row."""

    kind = "round"

    def __init__(self, decoder: GraphDecoder, rows: DeviceRows, form: Form, num_rows: int, count: int) -> None:
        """`count`: J = K + 1, the verified positions of a row. `num_rows`: B."""
        device = decoder.device
        self._rows, self._num_rows, self._num_drafted = rows, num_rows, count - 1
        self._is_drawn, self._is_mocked = form.is_drawn, form.is_mocked  # not the drafter, which keeps this round
        self.target_pass, self.count = decoder.static_pass(num_rows, count), count
        self._drafting = form.drafter.static_drafting(num_rows, count) if form.drafter else None
        self._slot_J = torch.arange(count, device=device)
        self._out = torch.zeros(num_rows, 3 + 2 * self._num_drafted, dtype=torch.float64, device=device)
        is_cuda = device.type == "cuda"
        self.read_out = (
            torch.zeros_like(self._out, device="cpu").pin_memory() if is_cuda else torch.zeros_like(self._out)
        )
        """Result [B, 3 + 2K] in host memory. Columns: number of accepted drafts, bonus token, number of verified
        drafts, then K drafts and K confidences."""
        self.marks = Marks(device, 3)

    @property
    def inputs(self) -> list[Tensor]:
        return [self._rows.values]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.read_out]

    def compute(self) -> None:
        """Compute one round of all rows that are not idle: draft, verify, update the rows' state and the KV caches of
        target and drafter, and copy the results to host memory."""
        state, slot_K = self._rows.first(self._num_rows), self._slot_J[1:] - 1
        self.marks.set(0)
        tokens_BJ, confidence_BK, width_B = self._draft(state)
        self.marks.set(1)
        counts_B = (width_B + 1) * state.is_live_B
        self.target_pass.compute_of(tokens_BJ, state.length_B, counts_B)
        best_BJ = self._best(state.length_B)
        is_checked_BK = slot_K < width_B[:, None]
        agrees_BK = (best_BJ[:, :-1] == tokens_BJ[:, 1:]) & is_checked_BK
        accepted_B = agrees_BK.cumprod(1).sum(1)
        if self._is_mocked:
            accepted_B = torch.minimum(width_B, self._rows.survivors(state.length_B))
        bonus_B = best_BJ.gather(1, accepted_B[:, None])[:, 0]
        if self._drafting is not None and self.target_pass.taps_TF is not None:
            taps_TF = self.target_pass.taps_TF
            self._drafting.write_behind(Verified(state.length_B, counts_B, tokens_BJ, accepted_B, bonus_B, taps_TF))
        state.move(accepted_B, bonus_B)
        heads = torch.stack([accepted_B, bonus_B, width_B], 1).double()
        self._out.copy_(torch.cat([heads, tokens_BJ[:, 1:].double(), confidence_BK], 1))
        self.read_out.copy_(self._out, non_blocking=True)
        self.marks.set(2)

    def _draft(self, state: RowState) -> tuple[Tensor, Tensor, Tensor]:
        """Returns anchors and drafts [B, J], their confidence [B, K], and the number of verified drafts of each row
        [B]."""
        width_B, anchors_B1 = state.width_B.clamp(max=self._num_drafted), state.anchor_B[:, None]
        if self._drafting is None:
            return anchors_B1, torch.zeros(self._num_rows, 0, dtype=torch.float64, device=width_B.device), width_B
        draws = state.draws if self._is_drawn else None
        drafts_BK, confidence_BK = self._drafting.draft(state.anchor_B, state.length_B, state.is_live_B, draws)
        width_B = torch.minimum(width_B, (drafts_BK >= 0).cumprod(1).sum(1))
        return torch.cat([anchors_B1, drafts_BK.clamp(min=0)], 1), confidence_BK, width_B

    def _best(self, length_B: Tensor) -> Tensor:
        """Returns the target's own token at each position [B, J]; FAILED or WHOLE without one."""
        logits_BJV = self.target_pass.logits_TV.unflatten(0, (self._num_rows, -1))
        largest_BJ, best_BJ = logits_BJV.max(-1)  # NaN is the largest, of equals the first
        best_BJ = best_BJ.masked_fill(~largest_BJ.isfinite(), FAILED)
        if not self._is_drawn:
            return best_BJ
        draws = self._rows.first(self._num_rows).draws
        drawn_BJ = race(logits_BJV, draws, length_B[:, None] + 1 + self._slot_J)
        return torch.where(draws.is_greedy_B[:, None], best_BJ, drawn_BJ)

    def outcomes(self, rows: list[int]) -> list[Outcome]:
        """Waits until the device has computed the latest round, and returns the results of these rows."""
        if self.read_out.device != self._out.device:
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
        outcomes, num_drafted = list[Outcome](), self._num_drafted
        table = self.read_out.tolist()
        for row in rows:
            accepted, bonus, width = map(int, table[row][:3])
            drafts = [int(token) for token in table[row][3 : 3 + width]]
            outcomes.append(Outcome(accepted, bonus, drafts, table[row][3 + num_drafted : 3 + num_drafted + width]))
        return outcomes

    def logits_JV(self, row: int, count: int) -> Tensor:
        """Returns the target's logits [count, V] at the first `count` verified positions of a row in the latest
        round."""
        return self.target_pass.logits_TV.unflatten(0, (self._num_rows, -1))[row, :count]


class DeviceRounds:
    """Runs whole decode rounds of one engine on the device, each as one CUDA graph, so that the host waits for the
    device only once per round. A batch qualifies if it has at most one drafter (DFlash 1 or 2, DSpark, EAGLE-3, MTP),
    no prompt lookup drafts, no trees, no log-probabilities, and no request with settings such as penalties or a grammar
    (`round.is_shaped`). Sampled requests also need the rule "auto", "match" or "mocked"."""

    def __init__(self, target: GraphDecoder, pool: Pool, judge: RuleJudge) -> None:
        assert target.recorder is not None
        self._target, self._pool, self._judge, self._recorder = target, pool, judge, target.recorder
        self.counts = Counter[str]()
        """Numbers of rounds: device rounds (ROUNDS), and for each reason the rounds that did not qualify. "whole
        distribution" counts rows of device rounds that the host sampled."""

    @classmethod
    def of(cls, target: Target, pool: Pool, judge: RuleJudge, wanted: bool | None) -> DeviceRounds | None:
        """Creates an engine's device rounds, or returns None for an engine that does not use them. `wanted`: True
        requires them, False disables them, None uses them if the target's passes are captured as CUDA graphs. Raises
        ConfigError if `wanted` is True and the target cannot compute them."""
        can = isinstance(target, GraphDecoder) and can_record(target.config)
        if wanted and not can:
            raise ConfigError(
                "device_rounds needs a target on CUDA whose passes are recorded, without gated delta nets "
                "(docs/how-to/gpu.md): leave it out"
            )
        is_on = EVERYWHERE or (can and target.device.type == "cuda") if wanted is None else wanted
        return cls(target, pool, judge) if is_on and can and isinstance(target, GraphDecoder) else None

    @torch.inference_mode()
    def record(self) -> None:
        """Capture CUDA graphs before the first request, so that no request waits for a capture: of rounds without
        drafts, greedy and sampled, and of rounds with drafts if the pool's only drafter qualifies. Does nothing if
        `Recorder.records_late` is True, as it is without CUDA: rounds are then captured at their first use."""
        if self._recorder.records_late:
            return
        every = [
            each for each in self._pool.drafters if isinstance(each, TappedDrafter) and each.recorded_rounds is not None
        ]
        drafters = every if len(self._pool.drafters) == 1 else []
        is_mocked = self._judge.rule.survives is not None
        if is_mocked:
            self._rows.mock(self._judge.rule, [])
        for drafter in (None, *drafters):
            for is_drawn in (False, True):
                self._recordings(Form(is_drawn, is_mocked, drafter)).record()
        self._rows.clear()

    @property
    def _rows(self) -> DeviceRows:
        target = self._target
        if "rows" not in target.rounds:
            target.rounds["rows"] = DeviceRows(target.cache.num_rows, target.cache.max_len, target.device)
        return target.rounds["rows"]

    def _recordings(self, form: Form) -> Recordings[StaticRound]:
        """Returns the CUDA graphs of this form and the present tap layers, stored by the drafter or the target."""
        target, rows = self._target, self._rows
        own = form.drafter.recorded_rounds if form.drafter else None
        recordings = target.rounds if own is None else own
        key = form.is_drawn, form.is_mocked, target.tap_layers
        if key not in recordings:
            # Weak: the drafter keeps its recordings, and a cycle would keep a replaced drafter in the device's memory.
            plain, drafter = form._replace(drafter=None), form.drafter and weakref.ref(form.drafter)

            def make(num_rows: int, count: int) -> StaticRound:
                rows.clear()  # a recording runs the round, which changes nothing while all rows are idle
                return StaticRound(target, rows, plain._replace(drafter=drafter and drafter()), num_rows, count)

            counts = [1]
            if form.drafter:
                every = pass_grid(target.cache.num_rows, 1 + form.drafter.num_drafted).sizes[1]
                few = range(2, 2 + min(form.drafter.num_drafted, FEW_STEPS)) if form.drafter.is_stepwise else ()
                counts = sorted({count for count in (*every, *few) if count > 1})
            recordings[key] = Recordings(
                self._recorder, StaticRound.kind, Grid(row_sizes(target.cache.num_rows), counts), make
            )
        return recordings[key]

    def __call__(self, batch: Batch) -> RoundStats | None:
        """Computes one round like `decode_round`, but verifies the planned drafts whatever their confidence. Returns
        None if the batch does not qualify or its shape is not captured.

        Seconds of drafting and verifying are measured within the round, or estimated by the bytes of weights that
        drafter and target read.
        """
        drafter, reason = self._qualified(batch)
        if reason:
            self.counts[reason] += 1
            return None
        started, recording_s = time.perf_counter(), self._target.recording_s
        limits_B = batch.draft_limits_B(drafter.num_drafted if drafter else 0)
        rule = self._judge.rule
        form = Form(any(not seq.params.is_greedy for seq in batch.sequences), rule.survives is not None, drafter)
        if form.is_mocked:
            self._rows.mock(rule, batch.sequences)
        region = self._recordings(form).find(max(batch.rows) + 1, 1 + max(limits_B))
        if region is None:
            self.counts["not recorded"] += 1
            return None
        if drafter:
            drafter.take_in_pending(batch.rows)
        self._rows.set(batch.sequences, limits_B)
        self._recorder.run(region)
        self._target.experts_read = region.target_pass.chosen_LTK
        outcomes = region.outcomes(batch.rows)
        whole_s = time.perf_counter() - started - (self._target.recording_s - recording_s)
        draft_s, verify_s = self._seconds(region, drafter, whole_s)
        self.counts[ROUNDS] += 1
        return self._conclude(batch, region, drafter, outcomes, (draft_s, verify_s, whole_s))

    def _qualified(self, batch: Batch) -> tuple[TappedDrafter | None, str]:
        """Returns the drafter of all rows that draft, and the reason why the batch does not qualify, or ""."""
        rule, drafters = self._judge.rule, list[Any]()
        if type(self._judge) is not RuleJudge:
            return None, "judge"
        if batch.num_candidates:
            return None, "trees"
        for seq, take in zip(batch.sequences, batch.takes_B or [], strict=True):
            if is_shaped(seq):
                return None, "shaped logits"
            if seq.params.logprobs is not None:
                return None, "log-probabilities"
            if not (seq.params.is_greedy or rule.draws or rule.survives):
                return None, "rule"
            drafters.append(self._pool.drafter_of(seq))
            if take.count and take.source != drafters[-1].name:
                return None, "lookups"
        limits = [take.count for take in batch.takes_B or []]
        if not any(limits):
            return None, ""
        drafter, size = drafters[0], 1 + max(limits)
        if any(each is not drafter for each in drafters) or len(self._pool.drafters) > 1:
            return None, "several drafters"
        if not isinstance(drafter, TappedDrafter) or drafter.recorded_rounds is None:
            return None, "kind of drafter"
        if not all(map(drafter.can_draft, batch.sequences)):
            return None, "unobserved rows"
        return drafter, "" if size <= self._target.counts[-1] else "width"

    def _seconds(self, region: StaticRound, drafter: TappedDrafter | None, whole_s: float) -> tuple[float, float]:
        """Returns the device seconds of drafting, and of the rest of the round."""
        if spans := region.marks.seconds():
            return spans[0], spans[1]
        own = drafter.weight_bytes if drafter else 0
        draft_s = whole_s * own / (own + self._target.weight_bytes)
        return draft_s, whole_s - draft_s

    def _conclude(
        self,
        batch: Batch,
        region: StaticRound,
        drafter: TappedDrafter | None,
        outcomes: list[Outcome],
        seconds: tuple[float, float, float],
    ) -> RoundStats:
        """Commit the device's result, and pass the accepted positions to the drafters."""
        began, firsts = time.perf_counter(), batch.cached_len_B
        draft = DraftBlock.certain([outcome.drafts for outcome in outcomes])
        verdict = self._verdict(batch, region, outcomes)
        cache, counts = self._target.cache, [1 + len(tokens) for tokens in draft.tokens_B]
        cache.append(batch.rows, counts)
        num_committed_B = commit(batch, draft, verdict)
        cache.rollback(batch.rows, batch.cached_len_B)
        taps_TF = region.target_pass.taps_TF
        every = [each for each in zip(batch.sequences, firsts, num_committed_B, strict=True) if each[2]]
        observed = [Observed(seq, first, count, taps_TF, seq.row * region.count) for seq, first, count in every]
        drawn_rows = {row for row, outcome in zip(batch.rows, outcomes, strict=True) if outcome.bonus < 0}
        self._observe(drafter, observed, drawn_rows)
        draft_s, verify_s, whole_s = seconds
        takes_B, width_B = batch.takes_B or [Take(NONE)] * len(batch), [len(outcome.drafts) for outcome in outcomes]
        confidence_B = [outcome.confidence or None for outcome in outcomes]
        return RoundStats(
            num_drafted_B=width_B,
            num_accepted_B=[max(count - 1, 0) for count in num_committed_B],
            lossless=all(seq.lossless for seq in batch.sequences),
            draft_s=draft_s,
            verify_s=verify_s,
            host_s=max(whole_s - draft_s - verify_s, 0.0) + time.perf_counter() - began,
            source_B=[take.source if width else NONE for take, width in zip(takes_B, width_B, strict=True)],
            num_checked_B=width_B,
            confidence_B=None if batch.whole_blocks else confidence_B,
            source_s={drafter.name: draft_s} if drafter else {},
            drafter_B=[LOSSY if seq.params.lossy else seq.drafter for seq in batch.sequences],
        )

    def _observe(self, drafter: TappedDrafter | None, observed: list[Observed], drawn_rows: set[int]) -> None:
        """Pass the new positions to the drafters. `drafter`: the drafter whose entries the round has written.
        `drawn_rows`: rows whose bonus token the host sampled. A drafter whose entries depend on the following token
        lacks this token on the device, and computes the entries of these rows again from the features."""
        written, features = list[Observed](), list[Observed]()
        for one in observed:
            is_known = drafter and not (drafter.looks_ahead and one.sequence.row in drawn_rows)
            (written if is_known else features).append(one)
        if drafter:
            self._pool.advance(drafter, written)
        self._pool.observe(features)

    def _verdict(self, batch: Batch, region: StaticRound, outcomes: list[Outcome]) -> Verdict:
        """Returns the device's verdict, with WHOLE tokens sampled on the host; updates the host's row values."""
        next_B, failed_B = list[int](), list[str | None]()
        accepted_B = [outcome.num_accepted for outcome in outcomes]
        for seq, outcome in zip(batch.sequences, outcomes, strict=True):
            token, logits_JV = outcome.bonus, None
            self._rows.moved(seq.row, outcome.num_accepted, token)
            if token < 0 and not seq.params.is_greedy:
                logits_JV = region.logits_JV(seq.row, outcome.num_accepted + 1)
                self.counts["whole distribution"] += token == WHOLE
                token = sampled_token(seq, outcome.num_accepted, logits_JV[-1])
            next_B.append(token)
            failed_B.append(failure_reason(seq, outcome.num_accepted, logits_JV) if token < 0 else None)
        accepted_B = [0 if failed else count for failed, count in zip(failed_B, accepted_B, strict=True)]
        return Verdict(accepted_B, next_B, self._judge.rule.lossless, failed_B=failed_B if any(failed_B) else None)
