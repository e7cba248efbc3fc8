// A pasted config.json as a shape, as paceline.simulate.costs.catalogue counts it; or a shape's own JSON, checked.
import CONFIG_KEYS from "../costs/config_keys.json" with { type: "json" };
import { ConfigReader } from "./config_reader.js";
import { InputError } from "./formulas.js";

const COUNTS = [
  "layers",
  "heads",
  "kv_heads",
  "head_dim",
  "latent",
  "rope",
  "indexer_heads",
  "indexer_dim",
  "shared",
  "state_bytes",
];
const LIMITS = ["window", "ratio", "topk"];
const LARGEST_SIZE = 1e18;

// A shape's own JSON

const isSize = (value) => typeof value === "number" && value >= 0 && value <= LARGEST_SIZE;

function sizes(entry, names, isGiven = () => true) {
  const found = {};
  for (const name of names.filter((each) => isGiven(each) || entry[each] != null)) {
    if (!isSize(entry[name]))
      throw new InputError(`the shape's ${name} is ${JSON.stringify(entry[name])}, which is no size`);
    found[name] = entry[name];
  }
  return found;
}

function groupOf(entry) {
  if (!["gqa", "mla", "linear"].includes(entry?.kind))
    throw new InputError("the shape's attention kinds must be gqa, mla or linear");
  const group = { kind: entry.kind, ...sizes(entry, [...COUNTS, ...LIMITS], (name) => name === "layers") };
  if (group.ratio !== undefined && group.ratio < 1) throw new InputError("the shape's ratio must be 1 or more");
  return group;
}

function checkedExperts(entry) {
  if (entry == null) return null;
  const experts = sizes(entry, ["num_routed", "per_token", "active", "resident"]);
  const isPossible =
    experts.per_token > 0 && experts.per_token < experts.num_routed && experts.active < experts.resident;
  if (!isPossible)
    throw new InputError("the shape's experts must have 0 < per_token < num_routed and active < resident");
  return experts;
}

function checkedShape(entry, formats) {
  if (!Array.isArray(entry.attention)) throw new InputError("the shape's attention must be a list of groups");
  const attention = entry.attention.slice(0, 1000).map(groupOf);
  const precisions = {
    weights: "bfloat16",
    experts: "bfloat16",
    attention: "bfloat16",
    kv: "bfloat16",
    indexer: "float8",
  };
  for (const part of Object.keys(precisions)) {
    const name = entry.precisions?.[part];
    if (name !== undefined && !Object.hasOwn(formats, name))
      throw new InputError(
        `precision ${JSON.stringify(name)} is not known: choose from ${Object.keys(formats).join(", ")}`,
      );
    if (name !== undefined) precisions[part] = name;
  }
  const optional = ["embedding", "vocab_size", "max_context"];
  const shape = {
    name: typeof entry.name === "string" ? entry.name.slice(0, 100) : "a pasted shape",
    precisions,
    attention,
    experts: checkedExperts(entry.experts),
    ...sizes(entry, ["num_layers", "hidden_size", "dense", ...optional], (name) => !optional.includes(name)),
  };
  const layers = attention.reduce((sum, group) => sum + group.layers, 0);
  if (!(shape.dense > 0) || layers !== shape.num_layers)
    throw new InputError(
      "the shape's dense must be above 0, and its attention groups must have num_layers layers together",
    );
  return shape;
}

// A config.json

function layerAttention(read, layer) {
  const kind = read.layerKind(layer);
  if (kind === "linear_attention") return { kind: "linear", state_bytes: linearStateBytes(read) };
  const heads = read.whole("num_attention_heads");
  if (read.has("compress_ratios")) return compressed(read, layer, heads);
  if (read.has("kv_lora_rank")) return latent(read, heads);
  const window = kind === "sliding_attention" ? { window: read.whole("sliding_window") } : {};
  const own = { ...read.keyHeads(layer), ...window };
  if (heads % own.kv_heads)
    throw new InputError(
      `${read.family}: ${heads} heads cannot share ${own.kv_heads} key heads evenly: check the config.json`,
    );
  return { kind: "gqa", heads, ...own, ...(read.isShared(layer) ? { shared: 1 } : {}) };
}

const indexerOf = (read) => ({
  topk: read.whole("index_topk"),
  indexer_heads: read.whole("index_n_heads"),
  indexer_dim: read.whole("index_head_dim"),
});

function latent(read, heads) {
  const mla = { kind: "mla", heads, latent: read.whole("kv_lora_rank"), rope: read.whole("qk_rope_head_dim") };
  return read.has("index_topk") ? { ...mla, window: 0, ratio: 1, ...indexerOf(read) } : mla;
}

function compressed(read, layer, heads) {
  const ratio = read.numbers("compress_ratios")[layer];
  const mla = {
    kind: "mla",
    heads,
    latent: read.headDim,
    rope: read.whole("qk_rope_head_dim"),
    window: read.whole("sliding_window"),
  };
  if (ratio === 0) return mla;
  return ratio > 4 ? { ...mla, ratio } : { ...mla, ratio, ...indexerOf(read) };
}

function linearStateBytes(read) {
  const key = read.whole("linear_key_head_dim"), value = read.whole("linear_value_head_dim");
  const keys = read.whole("linear_num_key_heads"), values = read.whole("linear_num_value_heads");
  return 2 * (values * key * value + (2 * keys * key + values * value) * read.whole("linear_conv_kernel_dim"));
}

function layerParameters(read, layer) {
  const hidden = read.whole("hidden_size");
  const isSparse = read.isSparse(layer), gate = isSparse && read.has("shared_expert_intermediate_size") ? hidden : 0;
  const own = attentionParameters(read, layer) + (isSparse ? hidden * read.numExperts + gate : 0);
  if (isSparse && !read.has("enable_moe_block")) return own;
  const width = read.whole("intermediate_size") * (read.isShared(layer) && read.has("use_double_wide_mlp") ? 2 : 1);
  return own + hidden * (3 * width + 2 * read.inputSize);
}

function attentionParameters(read, layer) {
  const hidden = read.whole("hidden_size");
  if (read.layerKind(layer) === "linear_attention") return linearParameters(read);
  const heads = read.whole("num_attention_heads");
  if (read.has("compress_ratios")) return compressedParameters(read, layer);
  if (read.has("kv_lora_rank")) return latentParameters(read);
  const { kv_heads: keys, head_dim: size } = read.keyHeads(layer), width = heads * size;
  const hasKeyValues = read.flag("attention_k_eq_v", false) && read.layerKind(layer) !== "sliding_attention";
  const projections = read.isShared(layer) ? 0 : hasKeyValues ? 1 : 2,
    isGated = read.flag("attn_output_gate", CONFIG_KEYS.gated.includes(read.family.replace(/_text$/, "")));
  return hidden * ((isGated ? 2 * width : width) + projections * keys * size + width);
}

function linearParameters(read) {
  const hidden = read.whole("hidden_size"), heads = read.whole("linear_num_value_heads");
  const keys = read.whole("linear_num_key_heads") * read.whole("linear_key_head_dim"),
    values = heads * read.whole("linear_value_head_dim");
  return (
    hidden * (2 * keys + 2 * values + 2 * heads) +
    values * hidden +
    (2 * keys + values) * read.whole("linear_conv_kernel_dim")
  );
}

function latentParameters(read) {
  const hidden = read.whole("hidden_size"), heads = read.whole("num_attention_heads");
  const width = read.whole("kv_lora_rank"), rope = read.whole("qk_rope_head_dim");
  const plain = read.whole("qk_nope_head_dim"), value = read.whole("v_head_dim"), rank = read.whole("q_lora_rank", 0);
  const queries = rank ? hidden * rank + rank * heads * (plain + rope) : hidden * heads * (plain + rope);
  const index = read.whole("index_n_heads", 0), indexWidth = index ? read.whole("index_head_dim") : 0;
  const indexer = index ? (rank || hidden) * index * indexWidth + hidden * (indexWidth + index) : 0;
  return queries + hidden * (width + rope) + width * heads * (plain + value) + heads * value * hidden + indexer;
}

function compressedParameters(read, layer) {
  const hidden = read.whole("hidden_size"), heads = read.whole("num_attention_heads"), width = read.headDim;
  const rank = read.whole("q_lora_rank"), outRank = read.whole("o_lora_rank"), groups = read.whole("o_groups");
  const main =
    hidden * rank + rank * heads * width + hidden * width + heads * width * outRank + groups * outRank * hidden;
  const ratio = read.numbers("compress_ratios")[layer];
  if (ratio === 0) return main;
  if (ratio > 4) return main + 2 * hidden * width;
  const index = read.whole("index_n_heads"), indexWidth = read.whole("index_head_dim");
  return main + 4 * hidden * width + rank * index * indexWidth + hidden * index + 4 * hidden * indexWidth;
}

const layersOf = (read) => Array.from({ length: read.whole("num_hidden_layers") }, (_, layer) => layer);

function expertParameters(read) {
  const layers = read.numExperts ? layersOf(read).filter((layer) => read.isSparse(layer)).length : 0;
  if (!layers) return null;
  const width = read.whole("moe_intermediate_size", 0) || read.whole("intermediate_size");
  const each = 3 * read.whole("hidden_size") * width, perToken = read.expertsPerToken;
  const always =
    3 *
    read.whole("hidden_size") *
    (read.whole("n_shared_experts", 0) * width + read.whole("shared_expert_intermediate_size", 0));
  if (!(perToken > 0 && perToken < read.numExperts)) {
    throw new InputError(
      `${read.family}: ${perToken} of ${read.numExperts} experts per token is not possible: check num_experts_per_tok`,
    );
  }
  return {
    num_routed: read.numExperts,
    per_token: perToken,
    active: layers * (perToken * each + always),
    resident: layers * (read.numExperts * each + always),
  };
}

function precisionsOf(read) {
  const stored = read.storedFormat, weights = read.isMxfp4 || stored === "float32" ? "bfloat16" : stored;
  const experts = read.isMxfp4 || read.get("expert_dtype") === "fp4" ? "float4" : weights;
  return {
    weights,
    experts,
    attention: "bfloat16",
    kv: read.has("compress_ratios") ? "float8" : "bfloat16",
    indexer: "float8",
  };
}

/** Layers with the same attention, counted together. */
function grouped(groups) {
  const found = new Map();
  for (const group of groups) {
    const key = JSON.stringify(group), known = found.get(key) ?? { ...group, layers: 0 };
    found.set(key, { ...known, layers: known.layers + 1 });
  }
  return [...found.values()];
}

/**
 * {shape, used}: the shape of a parsed config.json, and the part of the config that it was read from. Raises
 * InputError.
 */
export function readConfig(config, formats) {
  if (typeof config !== "object" || config === null || Array.isArray(config))
    throw new InputError("this is no JSON object: paste the model's config.json");
  if (Object.hasOwn(config, "attention") && Object.hasOwn(config, "dense")) {
    const shape = checkedShape(config, formats);
    return { shape, used: shape };
  }
  const read = new ConfigReader(config),
    hidden = read.whole("hidden_size"),
    vocab = read.whole("vocab_size"),
    layers = layersOf(read);
  const shape = {
    name: read.family,
    num_layers: layers.length,
    hidden_size: hidden,
    vocab_size: vocab,
    attention: grouped(layers.map((layer) => layerAttention(read, layer))),
    experts: expertParameters(read),
    dense: hidden * (vocab + layers.length * read.inputSize) + layers.reduce((sum, layer) => sum + layerParameters(read, layer), 0),
    embedding: (read.isTied ? 0 : hidden * vocab) + read.layerTable,
    max_context: read.whole("max_position_embeddings", 0),
    precisions: precisionsOf(read),
  };
  return { shape, used: read.used };
}
