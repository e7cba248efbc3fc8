// From the controls' state to the problem that the page shows: the chosen drafter's prediction, every drafter's curve
// over draft
// length and over batch.
import { DRAFTERS } from "./charts.js";
import { best, draftedTimes, InputError, memoryNeed, predict, roundParts, speedups, verifyTimes } from "./formulas.js";
import { resolve } from "./state.js";

const BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/** Of each drafter that can be predicted what `work` makes of it, null of the others. */
const each = (drafters, work) => DRAFTERS.map(({ key }) => (drafters[key].error ? null : work(drafters[key])));

/** Best speed-up of each drafter at each batch. */
function overBatches({ shape, deployment, load, drafters }) {
  const batches = [...new Set([...BATCHES, load.batch])].sort((one, other) => one - other);
  const rows = batches.map((batch) => {
    const there = { ...load, batch }, verify = verifyTimes({ shape, deployment }, there);
    return each(drafters, ({ drafter, acceptance }) =>
      best(speedups(acceptance, draftedTimes({ shape, deployment, drafter }, there, verify))),
    );
  });
  return { batches, bests: DRAFTERS.map((_, index) => rows.map((row) => row[index])) };
}

/** Every drafter's curve; the chosen one's prediction, or its error. */
export function solve(state, fields, data) {
  const found = resolve(state, fields, data),
    { shape, deployment, load, drafters } = found,
    own = drafters[state.drafter];
  const costs = { shape, deployment, drafter: own.drafter }, verify = verifyTimes(costs, load);
  const curves = each(drafters, ({ drafter, acceptance }) =>
    speedups(acceptance, draftedTimes({ ...costs, drafter }, load, verify)),
  );
  const prediction = own.error ? null : predict(costs, own.acceptance, load, verify);
  const isFinite = [...curves.filter(Boolean).flat(), prediction?.tokens_per_s ?? 0].every(Number.isFinite);
  if (!isFinite) throw new InputError("these sizes have no finite answer: check them");
  const parts = prediction && prediction.curve.map((_, length) => roundParts(costs, load, length, verify[0]));
  return {
    ...found,
    ...own,
    prediction,
    curves,
    parts,
    memory: memoryNeed(shape, deployment, load),
    over: overBatches(found),
    chosen: DRAFTERS.map(({ key }) => key === state.drafter),
  };
}
