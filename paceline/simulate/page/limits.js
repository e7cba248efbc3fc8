// What a prediction takes for granted, in sentences; the conditions are those of paceline.simulate.limits.
import { arithmetic } from "./formulas.js";

const sixDigits = (value) => String(Number(value.toPrecision(6)));

function expertLimit({ locality }, measured) {
  if (locality === 0) {
    return `Experts are drawn uniformly, anew for each position; real routing is more local, so drafts bring fewer new experts (an expert locality of ${measured} fits one measurement).`;
  }
  return `The q positions of a sequence draw experts as q^${sixDigits(1 - locality)} positions would, uniformly.`;
}

/** Formats that the machine multiplies in a wider one. */
function rateLimits(shape, { precisions, machine }) {
  const parts = ["weights", "attention", ...(shape.experts ? ["experts"] : [])];
  return parts.flatMap((part) => {
    const { name } = precisions[part], rate = arithmetic(precisions[part], machine.flops_per_s);
    const isUsual = rate === "bfloat16" && ["float16", "int4", "q8_0", "q4_1"].includes(name);
    return rate === name || isUsual ? [] : [`${machine.name} has no known rate for ${name}: ${part} are read as such and multiplied as ${rate}.`];
  });
}

function rooflineLimits(shape, deployment, { limits, measured_locality }) {
  const found = [...limits], { num_gpus, machine, latency_s } = deployment;
  if (shape.experts) found.push(expertLimit(deployment, measured_locality));
  if (shape.attention.some(({ kind }) => kind === "linear")) {
    found.push("Linear attention costs the reading of its state, in 16 bits, once a pass: its arithmetic and the copies of the state that taking back drafts needs are left out.");
  }
  if (num_gpus > 1) {
    found.push(`${num_gpus} GPUs: arithmetic and bandwidth add up perfectly, and each layer pays two ring all-reduces of 16-bit activations at ${(machine.link_bytes_per_s / 1e9).toFixed(0)} GB/s one way and ${sixDigits(1e6 * latency_s)} us each, hidden behind nothing. An assumption, not a measurement.`);
  }
  return [...found, ...rateLimits(shape, deployment), ...(shape.note ? [shape.note] : [])];
}

function acceptanceLimits({ kind, conditional, numRounds }, { max_draft }) {
  if (kind === "constant") return ["Each draft stands with the same chance; measured chances rise with depth, so long drafts come out too low."];
  const found = [], last = conditional[conditional.length - 1];
  if (max_draft > conditional.length) found.push(`Drafts beyond place ${conditional.length} have the last known chance, ${last.toFixed(2)}: a guess.`);
  if (numRounds) found.push(`Acceptance is that of ${numRounds.toLocaleString("en-US")} recorded rounds.`);
  return found;
}

export const limitsOf = ({ shape, deployment, acceptance, load }, data) =>
  [...rooflineLimits(shape, deployment, data), ...acceptanceLimits(acceptance, load)];

const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);

/** Why it cannot run as asked for, if so. */
export function warningsOf({ shape, deployment, load, memory }) {
  const found = [], { num_gpus, machine } = deployment;
  if (!memory.fits) {
    const fewest = Math.ceil((memory.weights + memory.cache) / (memory.memory / num_gpus));
    found.push(`Does not fit: ${gigabytes(memory.weights)} GB of weights and ${gigabytes(memory.cache)} GB of cache are more than the ${(memory.memory / 1e9).toFixed(0)} GB of ${num_gpus} × ${machine.name}. Take ${fewest} or more, a smaller batch or context, or narrower formats.`);
  }
  if (shape.max_context && load.context > shape.max_context) {
    found.push(`A context of ${load.context} is longer than the ${shape.max_context} tokens that ${shape.name} was made for.`);
  }
  return found;
}
