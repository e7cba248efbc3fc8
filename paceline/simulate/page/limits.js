// What a prediction takes for granted: the sentences are those of limits.json, the conditions those of
// paceline.simulate.limits.
import { filled } from "./flags.js";
import { arithmetic, longest, sharesEvenly } from "./formulas.js";

const sixDigits = (value) => String(Number(value.toPrecision(6)));

/** Formats that the machine multiplies in a wider one. */
function rateLimits(shape, { precisions, machine }, texts) {
  const parts = ["weights", "attention", ...(shape.experts ? ["experts"] : [])];
  return parts.flatMap((part) => {
    const { name } = precisions[part], rate = arithmetic(precisions[part], machine.flops_per_s);
    const isUsual = rate === "bfloat16" && ["float16", "int4", "q8_0", "q4_1"].includes(name);
    return rate === name || isUsual ? [] : [filled(texts.no_rate, { machine: machine.name, format: name, part, rate })];
  });
}

function rooflineLimits(shape, deployment, { limits: texts, measured_locality }) {
  const found = [...texts.roofline], { num_gpus, machine, latency_s, locality } = deployment;
  if (shape.experts && locality === 0)
    found.push(filled(texts.uniform_experts, { locality: `an expert locality of ${measured_locality}` }));
  else if (shape.experts) found.push(filled(texts.local_experts, { power: sixDigits(1 - locality) }));
  if (shape.attention.some(({ kind }) => kind === "linear")) found.push(texts.linear);
  if (num_gpus > 1) {
    const gigabytes = (machine.link_bytes_per_s / 1e9).toFixed(0), microseconds = sixDigits(1e6 * latency_s);
    found.push(filled(texts.several_gpus, { num_gpus, gigabytes, microseconds }));
  }
  return [...found, ...rateLimits(shape, deployment, texts), ...(shape.note ? [shape.note] : [])];
}

function acceptanceLimits({ kind, conditional, numRounds }, most, { limits: texts }) {
  if (kind === "constant") return [texts.constant];
  const found = [], chance = conditional[conditional.length - 1].toFixed(2);
  if (most > conditional.length) found.push(filled(texts.beyond, { place: conditional.length, chance }));
  if (numRounds) found.push(filled(texts.recorded, { rounds: numRounds.toLocaleString("en-US") }));
  return found;
}

/** `overhead`: {seconds, source}, or none. */
export function limitsOf({ shape, deployment, drafter, acceptance, load, overhead }, data) {
  const found = rooflineLimits(shape, deployment, data);
  if (overhead)
    found.splice(
      1,
      0,
      filled(data.limits.overhead, {
        ms: String(Number((1e3 * overhead.seconds).toPrecision(3))),
        source: overhead.source,
      }),
    );
  return [...found, ...acceptanceLimits(acceptance, longest(drafter, load), data)];
}

const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);

/** Why the model does not fit, and what would help; "" if it fits. */
export function fitOf({ shape, deployment, memory: { weights, cache, memory, fits } }) {
  if (fits) return "";
  const { num_gpus, machine } = deployment, least = Math.ceil((weights + cache) / (memory / num_gpus));
  const fewest = sharesEvenly(shape).find((number) => number >= least) ?? least;
  const more = machine.link_bytes_per_s ? `Take ${fewest} × ${machine.name} or more, ` : "Take ";
  return (
    `Does not fit: ${gigabytes(weights)} GB of weights and ${gigabytes(cache)} GB of cache are more than the ` +
    `${(memory / 1e9).toFixed(0)} GB of ${num_gpus} × ${machine.name}. ${more}a smaller batch or context, or ` +
    `narrower formats.`
  );
}

/** Why it cannot run as asked for, if so. */
export function warningsOf(problem) {
  const { shape, load } = problem, found = [fitOf(problem)].filter(Boolean);
  if (shape.max_context && load.context > shape.max_context) {
    found.push(
      `A context of ${load.context} is longer than the ${shape.max_context} tokens that ${shape.name} was made for.`,
    );
  }
  return found;
}
