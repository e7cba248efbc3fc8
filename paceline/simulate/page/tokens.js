// Speed-up over acceptance length: what rounds would bring for nothing, what the chosen load makes of it, drafters, and
// what was measured.
import { best, keptCurve, slope, tokensPerRound } from "./formulas.js";
import { axis, chart, colour, DRAFTERS, labels, ring, times } from "./charts.js";

const FEWEST_KEPT = 8, MOST_KEPT = 64;
const LINES = [
  { key: "toy", label: "rounds for nothing: y = x", name: "edge", dash: [6, 5], width: 1.25 },
  { key: "load", label: "roofline, this load", name: "part1", dash: [], width: 2.25 },
];

/** A measured point: a square, hollow where acceptance was mocked. */
function square(plot, x, y, isHollow) {
  const { ctx } = plot,
    left = plot.valToPos(x, "x", true),
    top = plot.valToPos(y, "y", true),
    half = 4.5 * devicePixelRatio;
  ctx.fillStyle = isHollow ? colour("paper") : colour("ink");
  ctx.strokeStyle = colour("ink");
  ctx.lineWidth = 1.75 * devicePixelRatio;
  ctx.fillRect(left - half, top - half, 2 * half, 2 * half);
  ctx.strokeRect(left - half, top - half, 2 * half, 2 * half);
  return { left, top };
}

/** What stands at the end of a line that leaves the chart, or does not. */
function endOf(plot, pairs, words, name) {
  const { left, top } = plot.bbox,
    seen = pairs.filter(([x, y]) => plot.valToPos(x, "x", true) >= left && plot.valToPos(y, "y", true) >= top);
  const [x, y] = seen[Math.max(seen.length - 2, 0)];
  return { left: plot.valToPos(x, "x", true), top: plot.valToPos(y, "y", true), words, name };
}

function marks(plot, { curve, predicted, measured, most }) {
  const found = [endOf(plot, curve.map(([x]) => [x, x]), "y = x", "soft"), endOf(plot, curve, "roofline", "part1")];
  for (const { kind, tokens_per_round: x, speedup, label: words } of predicted) {
    if (x > most) continue;
    const { name } = DRAFTERS.find(({ key }) => key === kind);
    found.push({ ...ring(plot, x, speedup, name, true), words, name });
  }
  for (const { tokens_per_round: x, speedup, is_mocked, label: words } of measured)
    found.push({ ...square(plot, x, speedup, is_mocked), words, name: "ink" });
  labels(plot, found);
}

/** The chart in `place`; its view: {data, curve, predicted, measured, most, shown, start, label}. */
export const tokensChart = (place) =>
  chart(place, {
    title: "Speed-up over acceptance length",
    series: LINES,
    room: 14,
    marks,
    axes: [
      axis("acceptance length", { incrs: [1, 2, 4, 8, 16] }),
      axis("speed-up over plain decoding", { size: 40, values: (_, splits) => splits.map((split) => `${split}×`) }),
    ],
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, Math.max(high || 1, 1)] } },
  });

/**
 * A point's row of the table: its name, acceptance length, speed-up; of a measured one also the curve's there, and how
 * far it is off.
 */
export function pointRow({ label, tokens_per_round: kept, speedup, is_mocked }, curveAt) {
  const told = [label, kept.toFixed(2), times(speedup)];
  if (is_mocked === undefined) return [...told, "", ""];
  const there = curveAt(kept), off = 100 * (speedup / there - 1);
  return [...told, times(there), `${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(0)}%`];
}

/** The best of each drafter, by acceptance length. */
function predictedPoints({ curves, drafters }) {
  return DRAFTERS.flatMap(({ key, label }, index) => {
    if (!curves[index]) return [];
    const { length, speedup } = best(curves[index]);
    return [{ kind: key, label, tokens_per_round: tokensPerRound(drafters[key].acceptance, length), speedup }];
  });
}

/**
 * What the chart and its table show; `points`: measured settings of this batch, `chosen`: the drafter whose cost the
 * curve has.
 */
export function tokensView(problem, points, chosen) {
  const { shape, deployment, drafter, load } = problem, predicted = predictedPoints(problem);
  const near = [...points, ...predicted.filter(({ kind }) => kind !== "ideal" || kind === chosen)];
  const most = Math.min(Math.max(FEWEST_KEPT, ...near.map((each) => Math.ceil(each.tokens_per_round))), MOST_KEPT);
  const curve = keptCurve({ shape, deployment, drafter }, load, most), kept = curve.map(([x]) => x), own = slope(curve);
  const measured = points.map((each, index) => ({
    ...each,
    row: `${index + 1}: ${each.label}`,
    label: String(index + 1),
  }));
  const shown = (at) => ({
    where:
      at === null
        ? `slope of the roofline: ${own.toFixed(2)} for one more token a round`
        : `at an acceptance length of ${kept[at]}`,
    values: at === null ? ["slope 1.00", `slope ${own.toFixed(2)}`] : [times(kept[at]), times(curve[at][1])],
  });
  return { data: [kept, kept, curve.map(([, y]) => y)], curve, predicted, measured, shown, start: 0, most,
    label: `Speed-up over acceptance length. The roofline's slope is ${own.toFixed(2)}. Arrow keys read it out.` };
}
