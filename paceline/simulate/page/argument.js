// The sentences of the argument for speculation, each a load that shows it. What drafters were set to is put back, but
// for "yours".
import { standards } from "./state.js";

/** In the order of the page. `set`: what differs from the fields' standard values. */
export const SENTENCES = [
  {
    key: "opening",
    label: "The walk-through",
    set: {},
    text:
      "DeepSeek-V4-Pro on a B200, 32 sequences of 4,096 tokens: drafting token by token brings a fifth, in blocks " +
      "three times the speed. As published: rates of one B200, no traffic between GPUs. The model itself needs " +
      "several.",
  },
  {
    key: "common",
    label: "Qwen3-8B on an H100",
    set: {
      model: "Qwen3-8B",
      hardware: "H100",
      batch: 8,
      overhead: "rate",
      plain_rate: 163,
      "autoregressive.chance": 0.65,
      "block.chance": 0.7,
    },
    text:
      "A model and a GPU that many have, eight streams of 4,096 tokens. Drafts of a general drafter, seven of ten " +
      "accepted: one fitted to your traffic can reach nine of ten. What a round loses to launches and the host is solved " +
      "from one stream's plain rate, here the 163 tokens/s that paceline measured: enter your own server's.",
  },
  {
    key: "moe",
    label: "Mixture of experts, 8 streams",
    set: { model: "DeepSeek-V4-Flash", batch: 8 },
    text:
      "At 4 to 8 sequences every draft makes the target read experts that nothing else needs, so drafting token by " +
      "token brings nothing; with one sequence or with a hundred it pays again.",
  },
  {
    key: "dense",
    label: "Dense model, 128 streams",
    set: { model: "Qwen3.5-27B-FP8", batch: 128 },
    text:
      "A dense model reads all its weights for one token as for many, so the speed-up stays level while arithmetic " +
      "is idle, and only falls with the batch after that.",
  },
  {
    key: "long",
    label: "Long context",
    set: { model: "Qwen3.5-27B-FP8", batch: 64, context: 32768 },
    text:
      "A cache is read once a round, not once a draft: the longer the context, the less a checked draft adds, and " +
      "the higher the best speed-up.",
  },
  {
    key: "small",
    label: "One stream",
    set: { model: "Qwen3.5-27B", batch: 1, overhead: "rate", plain_rate: 75 },
    text:
      "One stream leaves the arithmetic idle and pays launches and the host in every round (75 tokens/s plainly, as " +
      "published): a round that keeps several tokens pays them once.",
  },
  {
    key: "mocked",
    label: "Published measurements",
    set: {
      model: "Qwen3.5-27B",
      batch: 1,
      context: 6144,
      overhead: "rate",
      plain_rate: 75,
      drafter: "autoregressive",
      tab: "tokens",
      measured: "published",
    },
    text:
      "One B200, one stream, acceptance set by hand: 75, 140, 268 and 422 tokens/s were published at acceptance " +
      "lengths of 1, 2, 4 and 8. With an overhead solved from the 75 alone the roofline lies within 10% of each.",
  },
  {
    key: "watch",
    label: "Replay of a 122B model",
    set: {
      model: "Qwen3.5-122B-A10B",
      weights: "float8",
      experts: "float8",
      batch: 1,
      context: 2048,
      overhead: "rate",
      plain_rate: 250,
      tab: "watch",
    },
    text:
      "Qwen3.5-122B-A10B on one B200 in 8 bits, from 250 tokens/s plainly. Published with a block drafter: over " +
      "1,000, on a B200 node whose number of GPUs and number format were not published.",
  },
];

/** The state that shows a sentence; pasted runs and a pasted drafter stay. */
export function stateOf({ set }, fields, state) {
  const kept = Object.entries(state).filter(([name]) => name === "runs" || name.startsWith("yours."));
  return { ...standards(fields), ...Object.fromEntries(kept), ...set };
}

/** Whether the state is still the one a sentence set. */
export const isShown = (sentence, fields, state) =>
  Object.entries(stateOf(sentence, fields, state)).every(
    ([name, value]) => name === "tab" || String(state[name]) === String(value),
  );
