// From a problem to what its charts, its replay and its table of points show.
import { count, duration, PARTS, times } from "./charts.js";
import { best, InputError, survival } from "./formulas.js";
import { readPoints } from "./results.js";

export const drafts = (length) => (length === 1 ? "1 draft" : `${length} drafts`);

export function lengthView({ curves, chosen, prediction, load }, names) {
  const bests = curves.map((curve) => curve && best(curve)),
    lengths = Array.from({ length: load.max_draft + 1 }, (_, length) => length);
  const shown = (at) => ({
    where: at === null ? "at the best of each" : `at ${drafts(at)}`,
    values:
      at === null
        ? bests.map((found) => (found ? `${times(found.speedup)}, ${drafts(found.length)}` : "–"))
        : curves.map((curve) => (curve?.[at] ? times(curve[at]) : "–")),
  });
  const told = prediction ? ` Best: ${drafts(prediction.best_draft_length)}, ${times(prediction.speedup)}.` : "";
  return {
    data: [lengths, ...curves.map((curve) => lengths.map((at) => curve?.[at] ?? null))],
    bests,
    chosen,
    shown,
    start: prediction?.best_draft_length ?? 0,
    names,
    label: `Speed-up by draft length.${told} Arrow keys read it out.`,
  };
}

export function batchView({ over: { batches, bests }, chosen, load, prediction }, names) {
  const here = batches.indexOf(load.batch), curves = bests.map((row) => row.map((found) => found?.speedup ?? null));
  const shown = (at) => ({
    where: `at batch ${batches[at ?? here]}`,
    values: bests
      .map((row) => row[at ?? here])
      .map((found) => (found ? `${times(found.speedup)}, ${drafts(found.length)}` : "–")),
  });
  const told = prediction ? ` ${times(prediction.speedup)} at ${load.batch}.` : "";
  return {
    data: [batches, ...curves],
    chosen,
    shown,
    start: here,
    names,
    now: { batch: load.batch, speedups: curves.map((curve) => curve[here]) },
    label: `Best speed-up by batch.${told} Arrow keys read it out.`,
  };
}

export function timeView({ parts, prediction }) {
  const lengths = parts.map((_, length) => length), keys = PARTS.map(({ key }) => key).reverse();
  const own = keys.map((key) => parts.map((each) => each[key]));
  const sums = own.map((_, index) =>
    lengths.map((length) => own.slice(index).reduce((sum, row) => sum + row[length], 0)),
  );
  const shown = (at) => {
    const length = at ?? prediction.best_draft_length, whole = sums[0][length];
    return {
      where: `${drafts(length)}: ${duration(whole)} a round${at === null ? ", the best" : ""}`,
      values: own.map((row) =>
        row[length] ? `${((100 * row[length]) / whole).toFixed(1)}%, ${duration(row[length])}` : "none",
      ),
    };
  };
  return {
    data: [lengths, ...sums],
    whole: sums[0],
    best: prediction.best_draft_length,
    start: prediction.best_draft_length,
    shown,
    label:
      `Time of a round by part and draft length. ${duration(prediction.round_s)} at the best. ` +
      "Arrow keys read it out.",
  };
}

/** {points, elsewhere, fault}: built-in and pasted settings of this batch, and the batches of the others. */
export function measuredPoints({ batch }, state, measured) {
  const pasted = [];
  let fault = "";
  for (const text of [state.runs, state["yours.recorded"]]) {
    try { pasted.push(...readPoints(text)); } catch (error) {
      if (!(error instanceof InputError)) throw error;
      fault ||= error.message;
    }
  }
  const all = [...(measured[state.measured]?.points ?? []), ...pasted],
    points = all.filter((each) => each.batch === batch);
  return {
    points,
    elsewhere: [...new Set(all.filter((each) => each.batch !== batch).map((each) => each.batch))],
    fault,
  };
}

/** What the third tab replays: one sequence, plainly and with the chosen drafter. */
export function watchView({ prediction: p, acceptance, load }, name) {
  const length = p.best_draft_length, each = (rate) => count(rate / load.batch);
  return {
    plain_s: p.plain_round_s,
    round_s: p.round_s,
    survival: survival(acceptance, length),
    name,
    note:
      `Predicted${load.batch === 1 ? "" : ` for one of ${load.batch} sequences`}: ${each(p.plain_tokens_per_s)} → ` +
      `${each(p.tokens_per_s)} tokens/s, ${times(p.speedup)}. No model runs; the text is the same on both sides.`,
  };
}
