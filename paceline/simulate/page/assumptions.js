// The sizes and rates that a prediction was made of, in words.
import { count, duration } from "./charts.js";

const scale = (value, unit) => {
  const [size, prefix] = [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
  ].find(([least]) => value >= least) ?? [1, ""];
  return `${count(value / size)} ${prefix}${unit}`;
};

/** The sizes and rates that the prediction was made of. */
export function numbersOf({ shape, deployment, memory, prediction, overhead }) {
  const { machine, num_gpus: gpus } = deployment, { experts } = shape, gpusOf = gpus > 1 ? `${gpus} × ` : "";
  const rates = Object.entries(machine.flops_per_s).map(([name, rate]) => `${scale(rate, "FLOP/s")} in ${name}`);
  return [
    [
      "machine",
      `${gpusOf}${machine.name}: ${rates.join(", ")}; ${scale(machine.bytes_per_s, "B/s")} of memory ` +
      `traffic${gpus > 1 ? `; ${scale(machine.link_bytes_per_s, "B/s")} between GPUs` : ""}`,
    ],
    [
      "model",
      `${scale(shape.dense, "")} parameters that every token needs, ${shape.num_layers} layers of ${shape.hidden_size}`,
    ],
    ...(experts
      ? [
          [
            "experts",
            `${experts.per_token} of ${experts.num_routed} for each token; ${scale(experts.active, "")} of ` +
            `${scale(experts.resident, "")} parameters`,
          ],
        ]
      : []),
    [
      "stored as",
      Object.entries(deployment.precisions)
        .map(([part, { name, num_bytes: size }]) => `${part} ${name} (${size} B)`)
        .join(", "),
    ],
    ["memory", `${(memory.weights / 1e9).toFixed(1)} GB of weights, ${(memory.cache / 1e9).toFixed(1)} GB of cache`],
    ["a round", `${duration(prediction.round_s)} at the best length, ${duration(prediction.plain_round_s)} plainly`],
    ["overhead", overhead ? `${duration(overhead.seconds)} of every round, ${overhead.source}` : "none"],
  ];
}
