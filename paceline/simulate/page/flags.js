// Server flags that realise a prediction, as paceline.simulate.answer writes them, and the command that predicts the same.

export const METHODS = ["dflash", "mtp", "eagle3", "draft-model", "ngram"];
export const PLACEHOLDER = "YOUR-DRAFTER";
const SGLANG_NAMES = { dflash: "DFLASH", mtp: "EAGLE", eagle3: "EAGLE3", "draft-model": "STANDALONE", ngram: "NGRAM" };

/** A word as a POSIX shell reads it back. */
export function quoted(word) {
  const text = String(word);
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

const joined = (words) => words.map(quoted).join(" ");

/** {paceline, vllm, sglang} of {model, method, drafter, num_drafted, batch, num_gpus, has_8bit_cache}; 0 drafts decode plainly. */
export const serverFlags = (serving) => ({ paceline: paceline(serving), vllm: vllm(serving), sglang: sglang(serving) });

function paceline({ model, method, drafter, num_drafted, batch }) {
  const words = ["paceline", "serve", "--model", model, "--max-batch", batch];
  if (num_drafted === 0) return joined([...words, "--drafter", "none"]);
  if (method === "mtp" || method === "eagle3") return `# paceline serves no ${method} drafter: train a DFlash one with paceline train`;
  return joined([...words, "--drafter", method === "ngram" ? "ngram" : drafter, "--num-drafted", num_drafted, "--speculate", "full"]);
}

function vllm({ model, method, drafter, num_drafted, batch, num_gpus, has_8bit_cache }) {
  const words = ["vllm", "serve", model, "--max-num-seqs", batch, ...(num_gpus > 1 ? ["--tensor-parallel-size", num_gpus] : []),
    ...(has_8bit_cache ? ["--kv-cache-dtype", "fp8"] : [])];
  if (num_drafted === 0) return joined(words);
  const config = [["method", method.replace("-", "_")]];
  if (["dflash", "eagle3", "draft-model"].includes(method)) config.push(["model", drafter]);
  config.push(["num_speculative_tokens", num_drafted]);
  if (method === "ngram") config.push(["prompt_lookup_max", 4]);
  const json = config.map(([key, value]) => `${JSON.stringify(key)}: ${JSON.stringify(value)}`).join(", ");
  return joined([...words, "--speculative-config", `{${json}}`]);
}

function sglang({ model, method, drafter, num_drafted, batch, num_gpus, has_8bit_cache }) {
  const words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--max-running-requests", batch,
    ...(num_gpus > 1 ? ["--tp-size", num_gpus] : []), ...(has_8bit_cache ? ["--kv-cache-dtype", "fp8_e4m3"] : [])];
  if (num_drafted === 0) return joined(words);
  words.push("--speculative-algorithm", SGLANG_NAMES[method]);
  if (["dflash", "eagle3", "draft-model"].includes(method)) words.push("--speculative-draft-model-path", drafter);
  if (["mtp", "eagle3", "draft-model"].includes(method)) words.push("--speculative-num-steps", num_drafted, "--speculative-eagle-topk", 1);
  return joined([...words, "--speculative-num-draft-tokens", num_drafted + 1]);
}

/** The command that gives the same figures; `told`: its acceptance. A pasted config.json is expected in the file of that name. */
export function simulateCommand(state, told, { machines }) {
  const parts = ["weights", "experts", "attention", "kv", "indexer"].filter((part) => state[part]).map((part) => `${part}=${state[part]}`);
  const words = ["paceline", "simulate", "--model", state.model === "pasted" ? "config.json" : state.model,
    "--hardware", machines[state.hardware].option, "--batch", state.batch, "--context", state.context,
    "--acceptance", told, "--max-draft", state.max_draft];
  if (state.gpus > 1) words.push("--gpus", state.gpus);
  words.push(...(state.cost === "share" ? ["--drafter-cost", state.fraction] : ["--drafter-params", state.params * 1e9]));
  if (state.drafter === "block") words.push("--block", state.block);
  if (parts.length) words.push("--precision", parts.join(","));
  if (state.locality) words.push("--expert-locality", state.locality);
  if (state.per_layer) words.push("--per-layer");
  if (state.method) words.push("--method", state.method);
  if (state.drafter_name) words.push("--drafter", state.drafter_name);
  return joined(words);
}
