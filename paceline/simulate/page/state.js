// What can be set, how it travels in a link, and what becomes of it. Nothing here touches the page.
import { acceptanceOf, flopsPerS, fromHistogram, fromSurvival, InputError } from "./formulas.js";
import { METHODS } from "./flags.js";
import { readConfig } from "./hf_config.js";

const MOST_TEXT = 20_000;
const MOST_PLACES = 64;
const FINE = ["gpus", "weights", "experts", "attention", "kv", "indexer", "locality", "per_layer", "method", "drafter_name"];
export const PASTED = "pasted";
const MEASURED = [0.77, 0.73, 0.74, 0.77, 0.79, 0.81, 0.82, 0.83, 0.85, 0.86, 0.86, 0.88, 0.87, 0.87, 0.86];
const RECORDED = "survival: .772, .565, .42, .323, .256, .208, .17, .141, .12, .103, .089, .078, .068, .059, .051";

const halves = (low, high) => {
  const stops = [];
  for (let stop = low; stop <= high; stop *= 2) stops.push(stop, ...(stop > 1 && 1.5 * stop < high ? [1.5 * stop] : []));
  return stops;
};
const decades = (low, high) => {
  const stops = [];
  for (let ten = low; ten <= high; ten *= 10) stops.push(...[1, 1.5, 2, 3, 5, 7].map((one) => Number((one * ten).toPrecision(3))));
  return stops.filter((stop) => stop <= high);
};

const menu = (label, standard, options) => ({ kind: "menu", label, standard, options });
const number = (label, standard, min, max, more) => ({ kind: "number", label, standard, min, max, ...more });
const text = (label, standard, more) => ({ kind: "text", label, standard, ...more });

/** Name -> field. `stops`: where a slider halts, when its steps are not even. */
export function fieldsOf({ models, machines, formats, measured_locality }) {
  const stored = [["", "as stored"], ...Object.keys(formats).map((name) => [name, name])];
  return {
    model: menu("Model", "DeepSeek-V4-Flash", [...Object.keys(models).map((name) => [name, models[name].label]), [PASTED, "pasted config.json ..."]]),
    config: text("config.json of any Hugging Face model", "", { placeholder: '{"model_type": "qwen3", "hidden_size": 4096, ...}', isLong: true }),
    hardware: menu("Hardware", "B200", Object.keys(machines).map((name) => [name, name])),
    gpus: number("Number of GPUs", 1, 1, 1024, { isWhole: true, stops: [1, 2, 4, 8, 16, 32, 64] }),
    weights: menu("Weights", "", stored),
    experts: menu("Experts", "", stored),
    attention: menu("Attention arithmetic", "", stored),
    kv: menu("KV cache", "", stored),
    indexer: menu("Indexer", "", stored),
    locality: number("Expert locality", 0, 0, 1, { step: 0.005, hint: `0 uniform, ${measured_locality} as measured, 1 shared` }),
    per_layer: { kind: "flag", label: "Take attention's limits by kind of layer", standard: false },
    batch: number("Batch, sequences", 32, 1, 65536, { isWhole: true, stops: halves(1, 4096) }),
    context: number("Context, tokens of each", 4096, 1, 16777216, { isWhole: true, stops: halves(128, 1048576) }),
    max_draft: number("Longest draft", 16, 1, MOST_PLACES, { isWhole: true, step: 1 }),
    acceptance: menu("Given as", "constant", [["constant", "one chance"], ["curve", "a chance for each place"], ["recorded", "recorded"]]),
    chance: number("Chance that a draft stands", 0.89, 0, 1, { step: 0.01 }),
    curve: { kind: "list", label: "Chances by place, each given that the earlier drafts stood", standard: MEASURED, min: 0, max: 1 },
    recorded: text("Counts of rounds with 0, 1, 2, ... kept drafts, survival: shares, or a bench run's results.json", RECORDED, { isLong: true }),
    drafter: menu("Drafts", "block", [["autoregressive", "token by token (MTP, EAGLE, small model)"], ["block", "in blocks (DFlash)"]]),
    block: number("Block, drafts of one pass", 16, 1, MOST_PLACES, { isWhole: true, step: 1 }),
    cost: menu("A drafter pass costs", "share", [["share", "a share of a plain target pass"], ["params", "what its own size takes"]]),
    fraction: number("Share of a plain target pass", 0.1, 0, 2, { step: 0.01, top: 1 }),
    params: number("Drafter parameters, billions", 1, 0.001, 1000, { stops: decades(0.01, 100) }),
    method: menu("Method", "", [["", "as the drafter"], ...METHODS.map((name) => [name, name])]),
    drafter_name: text("Drafter, folder or id", "", { placeholder: "YOUR-DRAFTER", most: 200 }),
  };
}

export const standards = (fields) => Object.fromEntries(Object.entries(fields).map(([name, { standard }]) => [name, standard]));

// Values as text, in fields and in links

const NUMBER = /^-?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?$/i;

export const parseNumber = (written) => (NUMBER.test(written.trim()) ? Number(written) : NaN);
export const parseList = (written) => written.split(/[\s,;]+/).filter(Boolean).map(parseNumber);

/** Why a value cannot be, or "". */
export function fault({ kind, label, min, max, isWhole, options, most = MOST_TEXT }, value) {
  const range = `${isWhole ? "a whole number" : "a number"} from ${min} to ${max}`;
  if (kind === "number") return value >= min && value <= max && (!isWhole || Number.isInteger(value)) ? "" : `${label} must be ${range}`;
  if (kind === "menu") return options.some(([name]) => name === value) ? "" : `${label}: not known`;
  if (kind === "text") return value.length <= most ? "" : `${label}: longer than ${most} characters`;
  if (kind === "flag") return "";
  const isList = value.length > 0 && value.length <= MOST_PLACES && value.every((each) => each >= min && each <= max);
  return isList ? "" : `${label}: write 1 to ${MOST_PLACES} numbers from 0 to 1, such as 0.8, 0.75, 0.7`;
}

/** What a field or a link says, as a value. */
export function parsed({ kind }, written) {
  if (kind === "number") return parseNumber(written);
  if (kind === "list") return parseList(written);
  return kind === "flag" ? written === "1" : written;
}

export const written = (value) => (Array.isArray(value) ? value.join(",") : value === true ? "1" : value === false ? "0" : String(value));

/** Whether a field counts as things are set; others are hidden, unchecked, and stay out of links. */
export function isUsed(name, state) {
  const rules = {
    config: state.model === PASTED, chance: state.acceptance === "constant", curve: state.acceptance === "curve",
    recorded: state.acceptance === "recorded", fraction: state.cost === "share", params: state.cost === "params",
  };
  return rules[name] ?? true;
}

/** Whether a field says something of this shape. */
export function suits(name, shape) {
  if (name === "experts" || name === "locality") return Boolean(shape.experts);
  return name !== "indexer" || shape.attention.some((group) => group.indexer_heads);
}

/** The state of a link; what is missing, unknown or impossible stays at its standard. */
export function fromHash(fields, hash) {
  const state = standards(fields);
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(fields, name)) continue;
    const found = parsed(fields[name], value);
    if (!fault(fields[name], found)) state[name] = found;
  }
  return state;
}

/** Everything that counts; fine adjustments only where they were made. */
export function toHash(fields, state) {
  const told = Object.keys(fields).filter((name) => isUsed(name, state))
    .filter((name) => !FINE.includes(name) || written(state[name]) !== written(fields[name].standard));
  return `#${new URLSearchParams(told.map((name) => [name, written(state[name])]))}`;
}

// Recorded acceptance

function jsonHistogram(pasted) {
  let value;
  try { value = JSON.parse(pasted); } catch { return null; }
  if (Array.isArray(value)) return value.every((each) => typeof each === "number") ? value : null;
  const known = [value, ...(Array.isArray(value?.results) ? value.results : [])].filter((each) => Array.isArray(each?.accepted_histogram) && each.accepted_histogram.length > 1);
  return known.sort((one, other) => (other.tokens_per_round ?? 0) - (one.tokens_per_round ?? 0))[0]?.accepted_histogram ?? null;
}

/** {kind, values} of what was pasted. Raises InputError. */
export function readRecorded(pasted) {
  const counts = jsonHistogram(pasted);
  if (counts) return { kind: "histogram", values: counts };
  const [, kind = "histogram", rest] = /^\s*(?:(survival|histogram|conditional)\s*:)?([^]*)$/i.exec(pasted);
  const values = parseList(rest.replace(/[[\]]/g, " "));
  if (!values.length || values.some(Number.isNaN)) {
    throw new InputError("recorded acceptance cannot be read: paste counts such as 20, 10, 5, or survival: .77, .57, .42, or a results.json");
  }
  return { kind: kind.toLowerCase(), values };
}

/** {acceptance, told}: and how the command line is told of it. */
function acceptanceFrom(state) {
  if (state.acceptance === "constant") return { acceptance: acceptanceOf([state.chance], "constant"), told: String(state.chance) };
  if (state.acceptance === "curve") return { acceptance: acceptanceOf(state.curve, "conditional"), told: `conditional:${state.curve.join(",")}` };
  const { kind, values } = readRecorded(state.recorded), told = `${kind}:${values.join(",")}`;
  if (kind === "conditional") return { acceptance: acceptanceOf(values, kind), told };
  return { acceptance: kind === "histogram" ? fromHistogram(values) : fromSurvival(values), told };
}

// From a state to a prediction's arguments

/** {shape, used}: and the part of a pasted config that it came from. */
function shapeFrom(state, { models, formats }) {
  if (state.model !== PASTED) return { shape: models[state.model].shape, used: "" };
  if (!state.config.trim()) throw new InputError("paste a model's config.json, or choose another model");
  let config;
  try { config = JSON.parse(state.config); } catch (error) { throw new InputError(`the config.json is not JSON: ${error.message}`); }
  const { shape, used } = readConfig(config, formats);
  return { shape, used: JSON.stringify(used) };
}

function deploymentFrom(state, shape, { machines, formats, latency_s }) {
  const machine = machines[state.hardware];
  if (state.gpus > 1 && !machine.link_bytes_per_s) throw new InputError(`how fast several ${machine.name} talk to each other is not known: set 1 GPU`);
  const precisions = Object.fromEntries(Object.entries(shape.precisions).map(([part, name]) => [part, formats[state[part] || name]]));
  return { machine, precisions, num_gpus: state.gpus, locality: state.locality, per_layer: state.per_layer, latency_s };
}

/** A drafter of these costs that drafts `block` tokens a pass; null: one. */
function drafterOf(state, deployment, { formats }, block) {
  if (state.cost === "share") return { fraction: state.fraction, block };
  const flops = flopsPerS(deployment, formats.bfloat16), bytes = deployment.machine.bytes_per_s * deployment.num_gpus;
  return { dense: state.params * 1e9, flops_per_s: flops, bytes_per_s: bytes, block };
}

/** {shape, used, deployment, acceptance, told, load, drafters}. Raises InputError. */
export function resolve(state, fields, data) {
  const wrong = Object.keys(fields).filter((name) => isUsed(name, state)).map((name) => fault(fields[name], state[name])).find(Boolean);
  if (wrong) throw new InputError(wrong);
  const { shape, used } = shapeFrom(state, data), deployment = deploymentFrom(state, shape, data);
  const load = { batch: state.batch, context: state.context, max_draft: state.max_draft };
  const drafters = { ideal: { fraction: 0, block: null }, autoregressive: drafterOf(state, deployment, data, null),
    block: drafterOf(state, deployment, data, state.block) };
  return { shape, used, deployment, load, drafters, ...acceptanceFrom(state) };
}
