// What can be set, how it travels in a link, and what becomes of it. Nothing here touches the page.
// Each drafter has fields of its own: "block.chance" is the chance of the drafter "block".
import {
  acceptanceOf,
  flopsPerS,
  fromHistogram,
  fromSurvival,
  InputError,
  overheadSeconds,
  sharesEvenly,
} from "./formulas.js";
import { METHODS } from "./flags.js";
import { readConfig } from "./hf_config.js";
import { compact, parseList, parseNumber, readRecorded } from "./results.js";

const MOST_TEXT = 20_000, MOST_RUN = 5_000_000;
const MOST_PLACES = 64;
const FINE = [
  "gpus",
  "weights",
  "experts",
  "attention",
  "kv",
  "indexer",
  "locality",
  "per_layer",
  "method",
  "drafter_name",
  "overhead",
  "overhead_ms",
  "plain_rate",
  "tab",
  "measured",
  "runs",
];
export const PASTED = "pasted";
const MEASURED = [0.77, 0.73, 0.74, 0.77, 0.79, 0.81, 0.82, 0.83, 0.85, 0.86, 0.86, 0.88, 0.87, 0.87, 0.86];
const RECORDED = "survival: .772, .565, .42, .323, .256, .208, .17, .141, .12, .103, .089, .078, .068, .059, .051";

const halves = (low, high) => {
  const stops = [];
  for (let stop = low; stop <= high; stop *= 2)
    stops.push(stop, ...(stop > 1 && 1.5 * stop < high ? [1.5 * stop] : []));
  return stops;
};
const decades = (low, high) => {
  const stops = [];
  for (let ten = low; ten <= high; ten *= 10)
    stops.push(...[1, 1.5, 2, 3, 5, 7].map((one) => Number((one * ten).toPrecision(3))));
  return stops.filter((stop) => stop <= high);
};

const menu = (label, standard, options) => ({ kind: "menu", label, standard, options });
const number = (label, standard, min, max, more) => ({ kind: "number", label, standard, min, max, ...more });
const text = (label, standard, more) => ({ kind: "text", label, standard, ...more });

export const OWN = ["acceptance", "chance", "curve", "recorded", "cost", "fraction", "params", "block"];
export const TABS = ["lengths", "tokens", "watch"];
/** What each drafter begins with; a drafter of one draft a pass has no block to set. */
export const KINDS = {
  ideal: { label: "ideal", acceptance: "constant", chance: 0.98, fraction: 0, block: 16 },
  autoregressive: { label: "token by token", acceptance: "constant", chance: 0.75, fraction: 0.1 },
  block: { label: "in blocks", acceptance: "constant", chance: 0.89, fraction: 0.1, block: 16 },
  yours: { label: "yours", acceptance: "recorded", chance: 0.8, fraction: 0.1, block: 16, recorded: "" },
};

/** "block.chance" -> ["block", "chance"]; of no drafter: ["", name]. */
function split(name) {
  const dot = name.indexOf(".");
  return dot < 0 ? ["", name] : [name.slice(0, dot), name.slice(dot + 1)];
}

/** The field that a control of this name sets: of the chosen drafter, where each has its own. */
export const fieldFor = (name, { drafter }) => (OWN.includes(name) ? `${drafter}.${name}` : name);

/** Acceptance and cost of one drafter. */
function ownFields({ acceptance, chance, fraction, block, recorded = RECORDED }) {
  const ways = [
    ["constant", "one chance"],
    ["curve", "a chance for each place"],
    ["recorded", "recorded: a run, or numbers"],
  ];
  return {
    acceptance: menu("Kept tokens, given as", acceptance, ways),
    chance: number("Chance that a draft stands", chance, 0, 1, { step: 0.01 }),
    curve: {
      kind: "list",
      label: "Chances by place, each given that the earlier drafts stood",
      standard: MEASURED,
      min: 0,
      max: 1,
    },
    recorded: text(
      "A run's JSON (bench decode, evaluate, metrics), counts of rounds with 0, 1, 2, ... kept drafts, or survival: " +
      "shares",
      recorded,
      {
        isLong: true,
        most: MOST_RUN,
        placeholder: '{"results": [{"drafter": "mine", "accepted_histogram": [20, 10, 5], ...}]}',
      },
    ),
    cost: menu("A drafter pass costs", "share", [
      ["share", "a share of a plain target pass"],
      ["params", "what its own size takes"],
    ]),
    fraction: number("Share of a plain target pass", fraction, 0, 2, { step: 0.01, top: 1 }),
    params: number("Drafter parameters, billions", 1, 0.001, 1000, { stops: decades(0.01, 100) }),
    ...(block && {
      block: number("Block, drafts of one pass", block, 1, MOST_PLACES, {
        isWhole: true,
        step: 1,
        hint: "1: token by token",
      }),
    }),
  };
}

/** Name -> field. `stops`: where a slider halts, when its steps are not even. */
export function fieldsOf({ models, machines, formats, measured_locality, measured }) {
  const stored = [["", "as stored"], ...Object.keys(formats).map((name) => [name, name])];
  return {
    model: menu("Model", "DeepSeek-V4-Pro", [
      ...Object.keys(models).map((name) => [name, models[name].label]),
      [PASTED, "pasted config.json ..."],
    ]),
    config: text("config.json of any Hugging Face model", "", {
      placeholder: '{"model_type": "qwen3", "hidden_size": 4096, ...}',
      isLong: true,
    }),
    hardware: menu(
      "Hardware",
      "B200",
      Object.keys(machines).map((name) => [name, name]),
    ),
    gpus: number("Number of GPUs", 1, 1, 1024, { isWhole: true, stops: [1, 2, 4, 8, 16, 32, 64] }),
    weights: menu("Weights", "", stored),
    experts: menu("Experts", "", stored),
    attention: menu("Attention arithmetic", "", stored),
    kv: menu("KV cache", "", stored),
    indexer: menu("Indexer", "", stored),
    locality: number("Expert locality", 0, 0, 1, {
      step: 0.005,
      hint: `0 uniform, ${measured_locality} as measured, 1 shared`,
    }),
    per_layer: { kind: "flag", label: "Take attention's limits by kind of layer", standard: false },
    batch: number("Batch, sequences", 32, 1, 65536, { isWhole: true, stops: halves(1, 4096) }),
    context: number("Context, tokens of each", 4096, 1, 16777216, { isWhole: true, stops: halves(128, 1048576) }),
    max_draft: number("Longest draft", 16, 1, MOST_PLACES, { isWhole: true, step: 1 }),
    overhead: menu("Overhead of every round", "none", [
      ["none", "none: the roofline alone"],
      ["ms", "milliseconds"],
      ["rate", "solved from a plain rate"],
    ]),
    overhead_ms: number("Overhead, ms a round", 5, 0, 10000, {
      step: 0.1,
      top: 20,
      hint: "launches, scheduling, sampling, the host",
    }),
    plain_rate: number("Plain rate, tokens/s", 75, 0.001, 1000000, {
      stops: decades(1, 1000),
      hint: "measured: one stream that decodes alone, at this context",
    }),
    tab: menu(
      "Shown",
      "lengths",
      TABS.map((name) => [name, name]),
    ),
    measured: menu("Measured points", "none", [
      ["none", "none"],
      ...Object.entries(measured).map(([name, { label }]) => [name, label]),
    ]),
    runs: text(
      "Your own: JSON of bench decode, mocked (--mock-tokens-per-round) or with drafters, or of evaluate",
      "",
      {
        isLong: true,
        most: MOST_RUN,
        placeholder: '{"results": [{"drafter": "mine", "batch": 1, "tokens_per_round": 3.1, "speedup": 2.2}]}',
      },
    ),
    drafter: menu(
      "Drafter",
      "block",
      Object.entries(KINDS).map(([kind, { label }]) => [kind, label]),
    ),
    ...Object.fromEntries(
      Object.entries(KINDS).flatMap(([kind, own]) =>
        Object.entries(ownFields(own)).map(([name, field]) => [`${kind}.${name}`, field]),
      ),
    ),
    method: menu("Method", "", [["", "as the drafter"], ...METHODS.map((name) => [name, name])]),
    drafter_name: text("Drafter, folder or id", "", { placeholder: "YOUR-DRAFTER", most: 200 }),
  };
}

export const standards = (fields) =>
  Object.fromEntries(Object.entries(fields).map(([name, { standard }]) => [name, standard]));

// Values as text, in fields and in links

/** Why a value cannot be, or "". */
export function fault({ kind, label, min, max, isWhole, options, most = MOST_TEXT }, value) {
  const range = `${isWhole ? "a whole number" : "a number"} from ${min} to ${max}`;
  if (kind === "number")
    return value >= min && value <= max && (!isWhole || Number.isInteger(value)) ? "" : `${label} must be ${range}`;
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

export const written = (value) =>
  Array.isArray(value) ? value.join(",") : value === true ? "1" : value === false ? "0" : String(value);

/** Whether a field counts as things are set; others are hidden, unchecked, and stay out of links. */
export function isUsed(name, state) {
  const [kind, own] = split(name), at = (other) => state[`${kind}.${other}`];
  const rules = kind
    ? {
        chance: at("acceptance") === "constant",
        curve: at("acceptance") === "curve",
        recorded: at("acceptance") === "recorded",
        fraction: at("cost") === "share",
        params: at("cost") === "params",
        block: at("block") !== undefined,
      }
    : { config: state.model === PASTED, overhead_ms: state.overhead === "ms", plain_rate: state.overhead === "rate" };
  return rules[own] ?? true;
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

/** Everything that counts; fine adjustments and drafters only where something was changed. */
export function toHash(fields, state) {
  const told = Object.keys(fields)
    .filter((name) => isUsed(name, state))
    .filter(
      (name) => !(FINE.includes(name) || split(name)[0]) || written(state[name]) !== written(fields[name].standard),
    );
  const short = (name) => (fields[name].most === MOST_RUN ? compact(state[name]) : written(state[name]));
  return `#${new URLSearchParams(told.map((name) => [name, short(name)]))}`;
}

// From a state to a prediction's arguments

/** {shape, used}: and the part of a pasted config that it came from. */
function shapeFrom(state, { models, formats }) {
  if (state.model !== PASTED) return { shape: models[state.model].shape, used: "" };
  if (!state.config.trim()) throw new InputError("paste a model's config.json, or choose another model");
  let config;
  try {
    config = JSON.parse(state.config);
  } catch (error) {
    throw new InputError(`the config.json is not JSON: ${error.message}`);
  }
  const { shape, used } = readConfig(config, formats);
  return { shape, used: JSON.stringify(used) };
}

function deploymentFrom(state, shape, { machines, formats, latency_s }) {
  const machine = machines[state.hardware];
  if (state.gpus > 1 && !machine.link_bytes_per_s)
    throw new InputError(`how fast several ${machine.name} talk to each other is not known: set 1 GPU`);
  const fitting = sharesEvenly(shape);
  if (fitting.length && !fitting.includes(state.gpus)) {
    const words = `the heads of ${shape.name} cannot be shared out evenly to ${state.gpus} GPUs`;
    throw new InputError(`${words}: choose from ${fitting.join(", ")}`);
  }
  const precisions = Object.fromEntries(
    Object.entries(shape.precisions).map(([part, name]) => [part, formats[state[part] || name]]),
  );
  return { machine, precisions, num_gpus: state.gpus, locality: state.locality, per_layer: state.per_layer, latency_s };
}

/** {seconds, source} of what every round takes beyond the roofline, or null. */
function overheadFrom(state, shape, deployment) {
  if (state.overhead === "ms") return { seconds: state.overhead_ms / 1e3, source: "as given" };
  if (state.overhead !== "rate") return null;
  const rate = String(Number(state.plain_rate.toPrecision(6)));
  return {
    seconds: overheadSeconds({ shape, deployment }, { batch: 1, context: state.context }, state.plain_rate),
    source: `from ${rate} tokens/s of one plain stream`,
  };
}

/** {acceptance, told}: and how the command line is told of it. */
function acceptanceFrom({ acceptance, chance, curve, recorded }) {
  if (acceptance === "constant") return { acceptance: acceptanceOf([chance], "constant"), told: String(chance) };
  if (acceptance === "curve")
    return { acceptance: acceptanceOf(curve, "conditional"), told: `conditional:${curve.join(",")}` };
  const { kind, values } = readRecorded(recorded), told = `${kind}:${values.join(",")}`;
  if (kind === "conditional") return { acceptance: acceptanceOf(values, kind), told };
  return { acceptance: kind === "histogram" ? fromHistogram(values) : fromSurvival(values), told };
}

/** What a pass of it costs, and how many drafts it makes; null: one. */
function costOf({ cost, fraction, params, block = 1 }, deployment, { formats }) {
  const drafts = block > 1 ? block : null;
  if (cost === "share") return { fraction, block: drafts };
  const format = deployment.precisions.weights.name === "float32" ? formats.float32 : formats.bfloat16;
  const flops = flopsPerS(deployment, format), bytes = deployment.machine.bytes_per_s * deployment.num_gpus;
  return { dense: params * 1e9, flops_per_s: flops, bytes_per_s: bytes, num_bytes: format.num_bytes, block: drafts };
}

/** The settings of one drafter, without its name before them. */
export const ownOf = (state, kind) => Object.fromEntries(OWN.map((name) => [name, state[`${kind}.${name}`]]));

const faultOf = (names, fields, state) =>
  names
    .filter((name) => isUsed(name, state))
    .map((name) => fault(fields[name], state[name]))
    .find(Boolean);

/** {drafter, acceptance, told}, or {error}: one that cannot be read does not take the others away. */
function drafterFrom(kind, state, fields, deployment, data) {
  try {
    const wrong = faultOf(Object.keys(fields).filter((name) => split(name)[0] === kind), fields, state);
    if (wrong) throw new InputError(wrong);
    const own = ownOf(state, kind);
    return { drafter: costOf(own, deployment, data), ...acceptanceFrom(own) };
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return { error };
  }
}

/**
 * {shape, used, deployment, overhead, load, drafters: {kind: {drafter, acceptance, told} or {error}}}. Raises
 * InputError.
 */
export function resolve(state, fields, data) {
  const wrong = faultOf(Object.keys(fields).filter((name) => !split(name)[0]), fields, state);
  if (wrong) throw new InputError(wrong);
  const { shape, used } = shapeFrom(state, data), bare = deploymentFrom(state, shape, data);
  const overhead = overheadFrom(state, shape, bare), deployment = { ...bare, host_s: overhead?.seconds ?? 0 };
  const load = { batch: state.batch, context: state.context, max_draft: state.max_draft };
  const drafters = Object.fromEntries(
    Object.keys(KINDS).map((kind) => [kind, drafterFrom(kind, state, fields, deployment, data)]),
  );
  return { shape, used, deployment, overhead, load, drafters };
}
