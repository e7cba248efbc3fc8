// Server flags that realise a prediction, as paceline.simulate.answer writes them, and the command that predicts the
// same.

import FLAGS from "../flags.json" with { type: "json" };

export const METHODS = Object.keys(FLAGS.methods), PLACEHOLDER = FLAGS.placeholder;

/** A word as a POSIX shell reads it back. */
export function quoted(word) {
  const text = String(word);
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

const joined = (words) => words.map(quoted).join(" ");

/** A text with its {names} filled in. */
export const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);

/**
 * {paceline, vllm, sglang} of {model, method, drafter, num_drafted, batch, num_gpus, has_8bit_cache, has_decoder}; 0
 * drafts decode
 * plainly. What paceline does not serve becomes a remark in place of a command.
 */
export function serverFlags(serving) {
  const { drafter, num_drafted, num_gpus, has_8bit_cache, has_decoder } = serving;
  const method = FLAGS.methods[serving.method],
    drafts = num_drafted > 0,
    checkpoint = method.model && { model: drafter };
  const config = { method: method.vllm, ...checkpoint, num_speculative_tokens: num_drafted, ...method.vllm_more };
  const json = Object.entries(config)
    .map(([key, value]) => `${JSON.stringify(key)}: ${JSON.stringify(value)}`)
    .join(", ");
  const own_drafter = filled(method.paceline, { drafter });
  const values = { ...serving, block: num_drafted + 1, sglang: method.sglang, vllm_config: `{${json}}`, own_drafter };
  const facts = {
    "": true, plain: !drafts, drafts, gpus: num_gpus > 1, "8bit_cache": has_8bit_cache,
    model: drafts && method.model, steps: drafts && method.steps,
  };
  const commands = Object.entries(FLAGS.servers).map(([server, lines]) =>
    [server, joined(lines.flatMap(([fact, words]) => (facts[fact] ? words.map((word) => filled(word, values)) : [])))]);
  const unserved = { model: !has_decoder, gpus: num_gpus > 1 };
  const reason = Object.keys(unserved).find((name) => unserved[name]);
  return { ...Object.fromEntries(commands), ...(reason && { paceline: filled(FLAGS.unserved[reason], serving) }) };
}

/**
 * The command that gives the same figures; `own`: settings of its drafter, `told`: its acceptance. A pasted
 * config.json is expected in the file of that name.
 */
export function simulateCommand(state, own, told, { machines }) {
  const parts = ["weights", "experts", "attention", "kv", "indexer"]
    .filter((part) => state[part])
    .map((part) => `${part}=${state[part]}`);
  const words = ["paceline", "simulate", "--model", state.model === "pasted" ? "config.json" : state.model,
    "--hardware", machines[state.hardware].option, "--batch", state.batch, "--context", state.context,
    "--acceptance", told, "--max-draft", state.max_draft];
  if (state.gpus > 1) words.push("--gpus", state.gpus);
  words.push(...(own.cost === "share" ? ["--drafter-cost", own.fraction] : ["--drafter-params", own.params * 1e9]));
  if (own.block > 1) words.push("--block", own.block);
  if (state.overhead === "ms") words.push("--overhead-ms", state.overhead_ms);
  if (state.overhead === "rate") words.push("--plain-rate", state.plain_rate);
  if (parts.length) words.push("--precision", parts.join(","));
  if (state.locality) words.push("--expert-locality", state.locality);
  if (state.per_layer) words.push("--per-layer");
  if (state.method) words.push("--method", state.method);
  if (state.drafter_name) words.push("--drafter", state.drafter_name);
  return joined(words);
}
