// The formulas of paceline.simulate: roofline, acceptance, drafter, speed-up, memory. Pure functions on plain numbers.
// Shapes and machines are the Python package's own, as JSON; a deployment holds whole formats in place of their names:
// {machine, precisions: {weights: {name, num_bytes, computes_as}, ...}, num_gpus, locality, per_layer, latency_s,
// host_s}.
// tests/simulate/test_page_formulas.py compares with Python.

export const DELTAS = [-0.1, -0.05, -0.01, 0.01, 0.05, 0.1];

/** What a person can put right. */
export class InputError extends Error {}

const add = (values) => values.reduce((sum, value) => sum + value, 0);

// Roofline

export function arithmetic(format, rates) {
  const rate = format.computes_as.find((name) => rates[name]);
  if (!rate) throw new InputError(`this machine has no known arithmetic rate for ${format.name}`);
  return rate;
}

export const flopsPerS = ({ machine, num_gpus }, format) =>
  machine.flops_per_s[arithmetic(format, machine.flops_per_s)] * num_gpus;
export const bytesPerS = ({ machine, num_gpus }) => machine.bytes_per_s * num_gpus;

/** Expected routed experts that a pass reads, of a layer. */
export function distinctExperts(routed, perToken, batch, positions, locality = 0) {
  const tokens = batch * positions ** (1 - locality);
  return routed * (1 - (1 - perToken / routed) ** tokens);
}

const expertEach = ({ resident, active, num_routed, per_token }) => (resident - active) / (num_routed - per_token);

function expertWork(experts, format, batch, positions, locality) {
  const each = expertEach(experts), shared = experts.active - experts.per_token * each;
  const read = shared + distinctExperts(experts.num_routed, experts.per_token, batch, positions, locality) * each;
  return { part: "experts", flops: 2 * experts.active * batch * positions, bytes: read * format.num_bytes, format };
}

/** Cache entries that one query reads in one layer. */
function attended({ kind, window, ratio, topk }, context) {
  if (kind === "linear") return 0;
  if (ratio == null) return window == null ? context : Math.min(context, window);
  const history = Math.floor(context / ratio);
  return Math.min(context, window ?? 0) + (topk == null ? history : Math.min(history, topk));
}

/** Of one position's cache entry, in values. */
const cacheWidth = ({ kind, latent = 0, rope = 0, kv_heads = 0, head_dim = 0 }) =>
  kind === "mla" ? latent + rope : 2 * kv_heads * head_dim;

function attentionFlops(group, positions, context) {
  const seen = attended(group, context), { heads = 0, latent = 0, rope = 0, head_dim = 0 } = group;
  return group.kind === "mla"
    ? 2 * heads * (2 * latent + rope) * positions * seen
    : 4 * heads * head_dim * positions * seen;
}

const attentionBytes = (group, bytesEach, context) =>
  group.kind === "linear" ? group.state_bytes ?? 0 : cacheWidth(group) * bytesEach * attended(group, context);

function attentionWork(group, { kv, attention }, batch, positions, context) {
  const times = batch * group.layers;
  return { part: "attention", flops: times * attentionFlops(group, positions, context),
    bytes: times * attentionBytes(group, kv.num_bytes, context), format: attention };
}

/** The indexer's scores over the whole compressed history. */
function indexerWork(group, { indexer }, batch, positions, context) {
  const times = batch * group.layers, ratio = group.ratio ?? 1;
  return {
    part: "attention",
    flops: times * 2 * group.indexer_heads * group.indexer_dim * Math.floor(context / ratio) * positions,
    bytes: times * (context / ratio) * group.indexer_dim * indexer.num_bytes,
    format: indexer,
  };
}

const merged = (works) => ({
  ...works[0],
  flops: add(works.map((work) => work.flops)),
  bytes: add(works.map((work) => work.bytes)),
});

function attentionWorks(shape, { precisions, per_layer }, batch, positions, context) {
  const main = shape.attention.map((group) => attentionWork(group, precisions, batch, positions, context));
  const index = shape.attention.filter((group) => group.indexer_heads)
    .map((group) => indexerWork(group, precisions, batch, positions, context));
  if (per_layer) return [...main, ...index];
  return [main, index].filter((works) => works.length).map(merged);
}

function worksOf(shape, deployment, batch, positions, context) {
  const { precisions } = deployment, tokens = batch * positions;
  const works = [
    {
      part: "projections",
      flops: 2 * shape.dense * tokens,
      bytes: shape.dense * precisions.weights.num_bytes,
      format: precisions.weights,
    },
  ];
  if (shape.experts) works.push(expertWork(shape.experts, precisions.experts, batch, positions, deployment.locality));
  return [...works, ...attentionWorks(shape, deployment, batch, positions, context)];
}

/** Two ring all-reduces of 16-bit activations a layer; 0 on one GPU. */
function collectiveSeconds(shape, { num_gpus, latency_s, machine }, tokens) {
  if (num_gpus === 1) return 0;
  const sent = ((2 * (num_gpus - 1)) / num_gpus) * tokens * shape.hidden_size * 2;
  return 2 * shape.num_layers * (latency_s + sent / machine.link_bytes_per_s);
}

/** Seconds of one target pass by part. */
export function passSeconds(shape, deployment, batch, positions, context) {
  const parts = {
    projections: 0,
    experts: 0,
    attention: 0,
    collectives: collectiveSeconds(shape, deployment, batch * positions),
  };
  for (const { part, flops, bytes, format } of worksOf(shape, deployment, batch, positions, context)) {
    parts[part] += Math.max(flops / flopsPerS(deployment, format), bytes / bytesPerS(deployment));
  }
  return parts;
}

export const wholePass = (...args) => add(Object.values(passSeconds(...args)));

// Drafter: {fraction, block} costs a share of a plain pass; {dense, ...} has a roofline of its own. block null: token
// by token

export const passes = (numDrafted, block) => (block == null ? numDrafted : Math.ceil(numDrafted / block));

function ownDraftSeconds(drafter, batch, numDrafted) {
  const { dense, flops_per_s, bytes_per_s, num_bytes = 2, block = null } = drafter;
  const computing = (2 * dense * batch * (block || 1)) / flops_per_s;
  return passes(numDrafted, block) * Math.max(computing, (num_bytes * dense) / bytes_per_s);
}

export const draftSeconds = (drafter, batch, numDrafted, plainS) =>
  drafter.dense === undefined
    ? drafter.fraction * plainS * passes(numDrafted, drafter.block)
    : ownDraftSeconds(drafter, batch, numDrafted);

// Overhead: what every round takes beyond the roofline, as deployment.host_s

/**
 * Seconds to add to a round so that plain decoding of `load` gives each stream `plainRate` tokens/s, as
 * paceline.simulate.costs.overhead:
 * 1 / plainRate - round(0). Raises InputError when the prediction is slower without any.
 */
export function overheadSeconds({ shape, deployment }, { batch, context }, plainRate) {
  if (!(plainRate > 0 && plainRate < Infinity))
    throw new InputError(`the plain rate must be above 0 tokens/s, not ${plainRate}`);
  const predicted = wholePass(shape, deployment, batch, 1, context) + (deployment.host_s ?? 0),
    added = 1 / plainRate - predicted;
  if (added < -1e-9 * predicted) {
    throw new InputError(
      `a plain rate of ${plainRate} tokens/s is a step of ${(1e3 / plainRate).toFixed(2)} ms, but the prediction ` +
      `takes ${(1e3 * predicted).toFixed(2)} ms without any overhead (${(1 / predicted).toFixed(0)} tokens/s): the ` +
      `model was stored smaller, on more or faster GPUs, or several streams were counted together`,
    );
  }
  return Math.max(added, 0);
}

// Acceptance: chances by place, given that the earlier drafts stood; deeper drafts have the last one's

/** Raises InputError outside 0..1. */
export function acceptanceOf(conditional, kind, numRounds = 0) {
  if (!conditional.length)
    throw new InputError("acceptance is empty: give a chance such as 0.8, or a curve such as 0.8, 0.75, 0.7");
  const wrong = conditional.find((chance) => !(chance >= 0 && chance <= 1));
  if (wrong !== undefined)
    throw new InputError(`acceptance ${wrong} is no chance: it must be between 0 and 1, such as 0.8`);
  return { conditional, kind, numRounds };
}

export function fromSurvival(shares, kind = "survival", numRounds = 0) {
  let before = 1;
  const chances = shares.map((share, index) => {
    if (!(share >= 0 && share <= before)) {
      throw new InputError(`survival at draft ${index + 1} is ${share} after ${before}: it must fall, between 1 and 0`);
    }
    const chance = before ? share / before : 0;
    before = share;
    return chance;
  });
  return acceptanceOf(chances, kind, numRounds);
}

/** counts[n]: rounds in which exactly n drafts stood. */
export function fromHistogram(counts) {
  const rounds = add(counts);
  if (counts.length < 2 || !counts.every((count) => Number.isFinite(count) && count >= 0) || !(rounds > 0)) {
    throw new InputError(
      "the histogram needs counts of rounds with 0, 1, 2, ... accepted drafts, at least two of them",
    );
  }
  const shares = counts.slice(1).map((_, index) => add(counts.slice(index + 1)) / rounds);
  while (shares.length > 1 && shares[shares.length - 1] === 0) shares.pop();
  return fromSurvival(shares, "histogram", Math.trunc(rounds));
}

export const chanceAt = ({ conditional }, place) => conditional[Math.min(place, conditional.length) - 1];

/** Share of rounds whose first i drafts all stand, i = 1..numDrafted. */
export function survival(acceptance, numDrafted) {
  let kept = 1;
  return Array.from({ length: numDrafted }, (_, index) => (kept *= chanceAt(acceptance, index + 1)));
}

/** N(g), the bonus token included. */
export const tokensPerRound = (acceptance, numDrafted) => 1 + add(survival(acceptance, numDrafted));

export const shifted = (acceptance, points) =>
  ({ ...acceptance, conditional: acceptance.conditional.map((chance) => Math.min(Math.max(chance + points, 0), 1)) });

// Speed-up. costs = {shape, deployment, drafter}, load = {batch, context, max_draft}

/** Seconds of the target pass for 0..max_draft drafts: what every drafter's curve shares. */
export const verifyTimes = ({ shape, deployment }, { batch, context, max_draft }) =>
  Array.from({ length: max_draft + 1 }, (_, length) => wholePass(shape, deployment, batch, length + 1, context));

/** Seconds of a round for 0..max_draft drafts. */
export function roundTimes(costs, load, verify = verifyTimes(costs, load)) {
  const host = costs.deployment.host_s ?? 0;
  return verify.map((seconds, length) => seconds + draftSeconds(costs.drafter, load.batch, length, verify[0]) + host);
}

/** The longest draft that is considered: a drafter in blocks makes one block. */
export const longest = ({ block }, { max_draft }) => (block > 1 ? Math.min(block, max_draft) : max_draft);

/** Seconds of a round for the drafts that the drafter makes. */
export const draftedTimes = (costs, load, verify) =>
  roundTimes(costs, load, verify).slice(0, longest(costs.drafter, load) + 1);

/** Speed-up for 0..max_draft drafts. */
export function speedups(acceptance, rounds) {
  let kept = 1, tokens = 1;
  return rounds.map((seconds, length) => {
    if (length === 0) return 1;
    kept *= chanceAt(acceptance, length);
    tokens += kept;
    return (tokens * rounds[0]) / seconds;
  });
}

/**
 * [[tokens a round, speed-up]] of rounds that draft one token fewer than they keep, from 1 on, as
 * paceline.bench.pages.speedup_chart has them.
 */
export function keptCurve(costs, load, most) {
  const rounds = roundTimes(costs, { ...load, max_draft: most - 1 });
  return rounds.map((seconds, drafted) => [drafted + 1, ((drafted + 1) * rounds[0]) / seconds]);
}

/** Of the line through (1, 1) with the least squares; null without a point off x = 1. */
export function slope(pairs) {
  const whole = add(pairs.map(([x]) => (x - 1) ** 2));
  return whole > 0 ? add(pairs.map(([x, y]) => (x - 1) * (y - 1))) / whole : null;
}

/** Between the points of a curve, and beyond its last by the last line. */
export function between(curve, x) {
  const index = Math.min(Math.max(curve.findIndex(([at]) => at >= x), 1), curve.length - 1) || 1;
  const last = x > curve[curve.length - 1][0] ? curve.length - 1 : index,
    [[x0, y0], [x1, y1]] = [curve[last - 1], curve[last]];
  return y0 + ((x - x0) * (y1 - y0)) / (x1 - x0);
}

/** The shortest draft of the highest speed-up. */
export function best(curve) {
  let length = 0;
  for (let each = 1; each < curve.length; each += 1) if (curve[each] > curve[length]) length = each;
  return { length, speedup: curve[length] };
}

function sensitivity(acceptance, rounds, now) {
  return DELTAS.map((points) => {
    const found = best(speedups(shifted(acceptance, points), rounds));
    return { points, best_draft_length: found.length, speedup: found.speedup, gain: found.speedup / now - 1 };
  });
}

/** Seconds of a round by part. */
export function roundParts({ shape, deployment, drafter }, { batch, context }, length, plainS) {
  return { ...passSeconds(shape, deployment, batch, length + 1, context),
    drafter: draftSeconds(drafter, batch, length, plainS), host: deployment.host_s ?? 0 };
}

/** Everything about one load, named as in the command's JSON line. */
export function predict(costs, acceptance, load, verify = verifyTimes(costs, load)) {
  const rounds = draftedTimes(costs, load, verify), curve = speedups(acceptance, rounds);
  const { length, speedup } = best(curve), tokens = tokensPerRound(acceptance, length);
  return {
    best_draft_length: length, speedup, curve, tokens_per_round: tokens,
    tokens_per_s: (load.batch * tokens) / rounds[length], plain_tokens_per_s: load.batch / rounds[0],
    round_s: rounds[length], plain_round_s: rounds[0],
    parts: roundParts(costs, load, length, verify[0]), sensitivity: sensitivity(acceptance, rounds, speedup),
  };
}

// Memory

function keptBytes(group, { kv, indexer }, context) {
  if (group.shared) return 0;
  if (group.kind === "linear") return group.state_bytes ?? 0;
  const { window, ratio, indexer_heads = 0, indexer_dim = 0 } = group, width = cacheWidth(group);
  const seen = window == null ? context : Math.min(context, window);
  if (ratio == null) return width * kv.num_bytes * seen;
  const history = context / ratio, index = indexer_heads ? history * indexer_dim * indexer.num_bytes : 0;
  return width * kv.num_bytes * ((window == null ? 0 : seen) + history) + index;
}

/** Bytes of weights and of all sequences' caches, and what there is (0: not known). */
export function memoryNeed(shape, { precisions, machine, num_gpus }, { batch, context }) {
  const experts = shape.experts ? shape.experts.resident * precisions.experts.num_bytes : 0;
  const weights = (shape.dense + (shape.embedding ?? 0)) * precisions.weights.num_bytes + experts;
  const cache = batch * add(shape.attention.map((group) => group.layers * keptBytes(group, precisions, context)));
  const memory = machine.memory_bytes * num_gpus;
  return { weights, cache, memory, fits: !memory || weights + cache <= memory };
}

const isEven = ({ kind, heads, kv_heads: keys }, number) =>
  !heads || (heads % number === 0 && !(kind === "gqa" && keys && keys % number && number % keys));

/** Numbers of GPUs that all heads can be shared out to; [] for a shape whose heads are not known. */
export function sharesEvenly({ attention }) {
  const most = Math.max(0, ...attention.map(({ heads }) => heads ?? 0));
  return Array.from({ length: most }, (_, index) => index + 1).filter((number) =>
    attention.every((group) => isEven(group, number)),
  );
}
