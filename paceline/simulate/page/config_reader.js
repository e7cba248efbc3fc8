// The keys of a pasted config.json under their many names, as paceline.simulate.costs.catalogue reads them.
import CONFIG_KEYS from "../costs/config_keys.json" with { type: "json" };
import { InputError } from "./formulas.js";

const QUANTIZATION = ["quant_method", "quant_algo", "bits", "load_in_4bit"];
const LARGEST = 1e9;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isTrue = (value) =>
  Boolean(Array.isArray(value) ? value.length : isObject(value) ? Object.keys(value).length : value);

/** The language model's part of a config.json; remembers which keys were read. */
export class ConfigReader {
  #inner;
  #outer;
  #seen = new Set();

  constructor(config) {
    this.#outer = config;
    this.#inner = [config.text_config, config.llm_config].find(isTrue) ?? config;
    if (!isObject(this.#inner))
      throw new InputError("this is no config.json of a model: it must be a JSON object with hidden_size and so on");
    for (const [family, reason] of Object.entries(CONFIG_KEYS.not_read)) {
      if (this.family.startsWith(family))
        throw new InputError(`${this.family} has ${reason}, which is not read: paste its shape instead`);
    }
    if (this.whole("num_hidden_layers") > CONFIG_KEYS.max_layers)
      throw new InputError(`num_hidden_layers is above ${CONFIG_KEYS.max_layers}: check the config.json`);
  }

  /** Own keys of the inner config, or of the outer one. */
  get(name, inner = true) {
    const config = inner ? this.#inner : this.#outer;
    this.#seen.add(name);
    return Object.hasOwn(config, name) ? config[name] : undefined;
  }

  /** What was read, small enough for a link. */
  get used() {
    const config = {};
    for (const name of [...this.#seen].sort()) {
      const value = this.get(name) ?? this.get(name, false);
      if (value === undefined || name === "quantization_config") continue;
      config[name] = name === "tie_word_embeddings" ? this.isTied : value;
    }
    const known = Object.entries(this.#quantization).filter(([name]) => QUANTIZATION.includes(name));
    return known.length ? { ...config, quantization_config: Object.fromEntries(known) } : config;
  }

  get family() {
    return String(this.get("model_type") ?? this.get("model_type", false) ?? "model");
  }

  has(name) {
    return isTrue(this.get(name));
  }

  /** A whole number; a key that is null counts as missing; 0 is valid only if it is also the standard. */
  whole(name, standard, within) {
    const value = [name, ...(CONFIG_KEYS.other_names[name] ?? [])]
      .map((key) => (within ? within[key] : this.get(key)))
      .find((each) => each != null);
    if (value === undefined) {
      if (standard === undefined)
        throw new InputError(
          `${this.family}: the config has no ${name}, which a prediction needs: paste a complete config.json`,
        );
      return standard;
    }
    if (!Number.isInteger(value) || value < (standard === 0 ? 0 : 1) || value > LARGEST) {
      throw new InputError(
        `${this.family}: ${name} is ${JSON.stringify(value)}, which is no size: check the config.json`,
      );
    }
    return value;
  }

  flag(name, standard) {
    const value = this.get(name);
    return value == null ? standard : isTrue(value);
  }

  /** A list with an entry for each layer, at least. */
  numbers(name) {
    const values = this.get(name),
      layers = this.whole("num_hidden_layers");
    if (
      !Array.isArray(values) ||
      values.length < layers ||
      !values.every((value) => Number.isInteger(value) && value >= 0)
    ) {
      throw new InputError(`${this.family}: ${name} must list a whole number for each of ${layers} layers`);
    }
    return values;
  }

  get headDim() {
    const hidden = this.whole("hidden_size"), heads = this.whole("num_attention_heads");
    const size = this.whole("head_dim", Math.floor(hidden / heads));
    if (size) return size;
    throw new InputError(
      `${this.family}: ${heads} heads in a hidden_size of ${hidden}, which is not possible: check the config.json`,
    );
  }

  get #differsByLayer() {
    return CONFIG_KEYS.by_layer.some((family) => this.family.startsWith(family));
  }

  /** Key heads of a layer and their size, as they are in a shape. */
  keyHeads(layer) {
    const kv_heads = this.whole("num_key_value_heads", this.whole("num_attention_heads")), head_dim = this.headDim;
    if (!this.#differsByLayer || this.layerKind(layer) !== "full_attention") return { kv_heads, head_dim };
    const changed = this.get("per_layer_config");
    if (isObject(changed)) {
      const entry = Object.entries(changed).find(([key]) => /^\d+$/.test(key) && Number(key) === layer)?.[1];
      const own = isObject(entry) ? entry : {};
      return {
        kv_heads: this.whole("num_key_value_heads", kv_heads, own),
        head_dim: this.whole("head_dim", head_dim, own),
      };
    }
    const hasOwn = this.flag("attention_k_eq_v", false);
    return {
      kv_heads: hasOwn ? this.whole("num_global_key_value_heads", kv_heads) : kv_heads,
      head_dim: this.whole("global_head_dim", 2 * head_dim),
    };
  }

  /** Whether a layer reads the keys and values of an earlier one. */
  isShared(layer) {
    return layer >= this.whole("num_hidden_layers") - this.whole("num_kv_shared_layers", 0);
  }

  get inputSize() {
    return this.whole("hidden_size_per_layer_input", 0);
  }

  get layerTable() {
    if (!this.inputSize) return 0;
    const rows = this.whole("vocab_size_per_layer_input", this.whole("vocab_size"));
    return rows * this.whole("num_hidden_layers") * this.inputSize;
  }

  get isTied() {
    const value = [this.get("tie_word_embeddings", false), this.get("tie_word_embeddings")].find(
      (each) => each !== undefined,
    );
    return value == null ? CONFIG_KEYS.tied.some((family) => this.family.startsWith(family)) : isTrue(value);
  }

  layerKind(layer) {
    const kinds = this.get("layer_types"), layers = this.whole("num_hidden_layers");
    if (this.#differsByLayer && layer === layers - 1) return "full_attention";
    if (isTrue(kinds)) {
      if (!Array.isArray(kinds) || kinds.length < layers)
        throw new InputError(`${this.family}: layer_types must list the type of each of ${layers} layers`);
      const kind = String(kinds[layer]);
      if (CONFIG_KEYS.layer_kinds.includes(kind)) return kind;
      if (!this.has("compress_ratios"))
        throw new InputError(
          `${this.family}: layer type ${JSON.stringify(kind)} is not known: choose from ` +
          `${CONFIG_KEYS.layer_kinds.join(", ")}`,
        );
      return "full_attention";
    }
    if (this.has("linear_num_value_heads"))
      return (layer + 1) % this.whole("full_attention_interval", 4) === 0 ? "full_attention" : "linear_attention";
    return this.#slides(layer) ? "sliding_attention" : "full_attention";
  }

  #slides(layer) {
    if (!this.has("sliding_window") || !this.flag("use_sliding_window", true)) return false;
    const pattern = Object.entries(CONFIG_KEYS.patterns).find(([family]) => this.family.startsWith(family));
    if (pattern) return (layer + 1) % this.whole("sliding_window_pattern", pattern[1]) !== 0;
    return !(this.family.startsWith("qwen") && layer < this.whole("max_window_layers", 0));
  }

  #first(names) {
    return names.find((name) => this.has(name));
  }

  get numExperts() {
    const name = this.#first(CONFIG_KEYS.experts);
    return name ? this.whole(name) : 0;
  }

  get expertsPerToken() {
    return this.whole(this.#first(CONFIG_KEYS.per_token) ?? CONFIG_KEYS.per_token[0]);
  }

  isSparse(layer) {
    if (!this.numExperts || layer < this.whole("first_k_dense_replace", 0)) return false;
    if (!this.flag("enable_moe_block", true)) return false;
    const dense = this.get("mlp_only_layers");
    if (isTrue(dense) && !Array.isArray(dense))
      throw new InputError(`${this.family}: mlp_only_layers must be a list of layers`);
    if (isTrue(dense) && dense.includes(layer)) return false;
    const step = this.whole("decoder_sparse_step", 0) || this.whole("interleave_moe_layer_step", 0) || 1;
    return (layer + 1) % step === 0;
  }

  get #quantization() {
    const found = [this.get("quantization_config", false), this.get("quantization_config")].find(isTrue);
    return isObject(found) ? found : {};
  }

  get storedFormat() {
    const { quant_method: method = "", quant_algo: algo = "", bits, load_in_4bit: inFour } = this.#quantization;
    if (["fp8", "fbgemm_fp8", "modelopt"].includes(method) || String(algo).toLowerCase().includes("fp8"))
      return "float8";
    if (["gptq", "awq"].includes(method) || isTrue(inFour)) return bits === 8 ? "int8" : "int4";
    const told = [this.get("dtype"), this.get("torch_dtype"), this.get("torch_dtype", false)].find(
      (value) => value !== undefined,
    );
    return ["float32", "float16", "bfloat16"].includes(told) ? told : "bfloat16";
  }

  get isMxfp4() {
    return this.#quantization.quant_method === "mxfp4";
  }
}
