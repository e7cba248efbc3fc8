// The charts: lines and stacked bars by uPlot, with a legend that reads out the values at the cursor, or at the best.
import { best } from "./formulas.js";
import { label, labels, line, plainLine, ring } from "./marks.js";

const colours = new Map();
const scheme = matchMedia("(prefers-color-scheme: dark)");

/** A colour of the style sheet, looked up once for each colour scheme. */
export function colour(name) {
  if (!colours.has(name))
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** The only way text gets on the page: as text. */
export function make(tag, { text, ...props } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...(text === undefined ? children : [String(text)]));
  return element;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Fills that differ without colour

const HATCHES = {
  plain: () => {},
  rising: (c) => {
    c.moveTo(-1, 9);
    c.lineTo(9, -1);
    c.moveTo(-1, 1);
    c.lineTo(1, -1);
    c.moveTo(7, 9);
    c.lineTo(9, 7);
  },
  falling: (c) => {
    c.moveTo(-1, -1);
    c.lineTo(9, 9);
    c.moveTo(7, -1);
    c.lineTo(9, 1);
    c.moveTo(-1, 7);
    c.lineTo(1, 9);
  },
  level: (c) => {
    c.moveTo(0, 4);
    c.lineTo(8, 4);
  },
  upright: (c) => {
    c.moveTo(4, 0);
    c.lineTo(4, 8);
  },
  dots: (c) => {
    for (const [x, y] of [
      [2, 2],
      [6, 6],
    ]) {
      c.moveTo(x + 1, y);
      c.arc(x, y, 1, 0, 7);
    }
  },
};
const tiles = new Map();

function tile(ctx, name, hatch) {
  const key = `${name} ${hatch} ${devicePixelRatio}`;
  if (!tiles.has(key)) {
    const canvas = make("canvas", { width: 8 * devicePixelRatio, height: 8 * devicePixelRatio }),
      c = canvas.getContext("2d");
    c.scale(devicePixelRatio, devicePixelRatio);
    c.fillStyle = colour(name);
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = colour("paper");
    c.lineWidth = 1.4;
    c.beginPath();
    HATCHES[hatch](c);
    c.stroke();
    tiles.set(key, ctx.createPattern(canvas, "repeat"));
  }
  return tiles.get(key);
}

// One chart

export function drawSwatch(canvas, { name, hatch, dash = [], width = 2 }) {
  const ratio = devicePixelRatio, c = Object.assign(canvas, { width: 26 * ratio, height: 12 * ratio }).getContext("2d");
  if (hatch) {
    c.fillStyle = tile(c, name, hatch);
    c.fillRect(0, 0, canvas.width, canvas.height);
    return;
  }
  c.scale(ratio, ratio);
  c.strokeStyle = colour(name);
  c.lineWidth = width;
  c.setLineDash(dash);
  c.beginPath();
  c.moveTo(0, 6);
  c.lineTo(26, 6);
  c.stroke();
}

export const axis = (label, more) => ({
  label,
  labelSize: 18,
  labelGap: 0,
  labelFont: "12px system-ui, sans-serif",
  font: "12px system-ui, sans-serif",
  gap: 4,
  size: 26,
  stroke: () => colour("soft"),
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { show: false },
  ...more,
});

/** A uPlot in `place`, a legend beneath, arrow keys that move its cursor. `shown(index)`: the legend's values there. */
class Chart {
  constructor(place, { title, series, axes, scales, marks, room }) {
    this.place = place;
    this.series = series;
    this.at = null;
    this.where = make("p", { className: "where" });
    this.outputs = series.map(() => make("output"));
    this.swatches = series.map(() => make("canvas", { className: "swatch" }));
    this.names = series.map(({ label }) => make("span", { text: label }));
    const legend = make(
      "ul",
      { className: "legend" },
      ...series.map((_, index) => make("li", {}, this.swatches[index], this.names[index], this.outputs[index])),
    );
    this.box = make("div", { className: "plot", tabIndex: 0 });
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-roledescription", "chart");
    place.append(make("h3", { text: title }), this.box, make("div", { className: "readout" }, this.where, legend));
    this.plot = new uPlot(
      {
        ...this.#size(),
        series: [{}, ...series.map((one) => this.#seriesOf(one))],
        scales,
        axes,
        padding: [room ?? 10, 14, 0, 0],
        legend: { show: false },
        select: { show: false },
        cursor: { drag: { x: false, y: false, setScale: false }, y: false, points: { size: 7 } },
        hooks: {
          draw: [
            (plot) => {
              if (this.view) marks(plot, this.view);
            },
          ],
          setCursor: [(plot) => this.#moved(plot.cursor.idx)],
        },
      },
      [[], ...series.map(() => [])],
      this.box,
    );
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("focus", () => this.where.parentElement.setAttribute("aria-live", "polite"));
    this.box.addEventListener("blur", () => {
      this.where.parentElement.removeAttribute("aria-live");
      this.#moved(null);
    });
    new ResizeObserver(() => this.plot.setSize(this.#size())).observe(this.box);
    this.recolour();
  }

  #size() {
    return { width: Math.max(this.box.clientWidth, 120), height: this.box.clientHeight || 220 };
  }

  #seriesOf({ name, hatch, dash, width }) {
    if (!hatch) return { stroke: () => colour(name), dash, width, points: { show: false } };
    return {
      paths: uPlot.paths.bars({ size: [0.82, 46] }),
      fill: (plot) => tile(plot.ctx, name, hatch),
      width: 0,
      points: { show: false },
    };
  }

  #moved(index) {
    this.at = index ?? null;
    if (this.view) this.#read();
  }

  #key(event) {
    if (!this.view || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = this.view.data[0].length - 1, now = this.at ?? this.view.start;
    if (event.key === "Escape") return this.#moved(null);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key],
      index = Math.min(Math.max(to, 0), last);
    this.plot.setCursor({ left: this.plot.valToPos(this.view.data[0][index], "x"), top: 0 }, false);
    return this.#moved(index);
  }

  #read() {
    const { where, values } = this.view.shown(this.at);
    write(this.where, where);
    values.forEach((value, index) => write(this.outputs[index], value));
  }

  /**
   * `view`: {data, drawn, start, shown, label, names?}, or null for an empty chart. `drawn`: what uPlot gets when it
   * is not the data.
   */
  show(view) {
    this.view = view;
    if (!view) {
      this.plot.setData([[], ...this.series.map(() => [])]);
      write(this.where, "");
      for (const output of this.outputs) write(output, "–");
      this.box.setAttribute("aria-label", "empty chart");
      return;
    }
    if (this.at !== null && this.at >= view.data[0].length) this.at = null;
    view.names?.forEach((name, index) => write(this.names[index], name));
    view.chosen?.forEach((isChosen, index) => this.names[index].classList.toggle("chosen", isChosen));
    this.plot.setData(view.drawn ?? view.data);
    this.box.setAttribute("aria-label", view.label);
    this.#read();
  }

  recolour() {
    this.series.forEach((one, index) => drawSwatch(this.swatches[index], one));
    this.plot.redraw(false);
  }
}

const charts = [];

export function chart(...args) {
  charts.push(new Chart(...args));
  return charts[charts.length - 1];
}

/** Calls `also` too when the colour scheme changes. */
export function followScheme(also) {
  scheme.addEventListener("change", () => {
    colours.clear();
    tiles.clear();
    for (const each of charts) each.recolour();
    also();
  });
}

export const DRAFTERS = [
  { key: "ideal", label: "ideal", name: "soft", dash: [2, 3], width: 1.75 },
  { key: "autoregressive", label: "token by token", name: "token", dash: [8, 4], width: 2 },
  { key: "block", label: "in blocks", name: "accent", dash: [], width: 2.25 },
  { key: "yours", label: "yours", name: "own", dash: [12, 3, 2, 3], width: 2.25 },
];
export const PARTS = [
  { key: "projections", label: "projections", name: "part1", hatch: "plain" },
  { key: "experts", label: "experts", name: "part2", hatch: "rising" },
  { key: "attention", label: "attention", name: "part3", hatch: "dots" },
  { key: "collectives", label: "between GPUs", name: "part4", hatch: "level" },
  { key: "drafter", label: "drafter", name: "part5", hatch: "falling" },
  { key: "host", label: "overhead", name: "part6", hatch: "upright" },
];

const THREE_DIGITS = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
export const count = (value) => THREE_DIGITS.format(value);
export const times = (value) => `${value.toFixed(2)}×`;
const fromZero = (_, __, high) => [0, 1.12 * Math.max(high || 1, 1)];
const speedAxes = (bottom, more) => [
  axis(bottom, more),
  axis(null, { size: 40, values: (_, splits) => splits.map((split) => `${split}×`) }),
];

/** Rings at a point of each curve that there is, full for the chosen one, with words. */
const rings = (plot, points, chosen) => points.flatMap((point, index) => {
  if (!point) return [];
  const { name } = DRAFTERS[index];
  return [{ ...ring(plot, point.x, point.speedup, name, chosen[index]), name, words: point.words }];
});

/** The name of each curve over its highest point. */
const names = (plot, batches, curves) => curves.flatMap((curve, index) => {
  if (curve[0] === null) return [];
  const at = best(curve).length, { name, label: words } = DRAFTERS[index];
  return [
    {
      left: plot.valToPos(batches[at], "x", true),
      top: plot.valToPos(curve[at], "y", true),
      name,
      words,
      isMiddle: true,
    },
  ];
});

/** Speed-up by draft length. */
export const lengthChart = (place) =>
  chart(place, {
    title: "Speed-up by draft length",
    series: DRAFTERS,
    axes: speedAxes("drafts in a round", { incrs: [1, 2, 4, 8, 16] }),
    room: 14,
    scales: { x: { time: false }, y: { range: fromZero } },
    marks: (plot, { bests, chosen }) => {
      plainLine(plot);
      const words = ({ speedup, length }, index) => `${DRAFTERS[index].label}: ${times(speedup)} at ${length}`;
      labels(
        plot,
        rings(
          plot,
          bests.map((found, index) => found && { x: found.length, speedup: found.speedup, words: words(found, index) }),
          chosen,
        ),
      );
    },
  });

/** Speed-up at the best length of each batch. */
export const batchChart = (place) =>
  chart(place, {
    title: "Best speed-up by batch",
    series: DRAFTERS,
    room: 18,
    axes: speedAxes("sequences decoding together", {
      space: 34,
      values: (_, splits) => splits.map((split) => (split >= 1024 ? `${split / 1024}k` : String(split ?? ""))),
    }),
    scales: { x: { time: false, distr: 3, log: 2 }, y: { range: fromZero } },
    marks: (plot, { data: [batches, ...curves], now, chosen }) => {
      plainLine(plot);
      const { top, height } = plot.bbox,
        x = plot.valToPos(now.batch, "x", true);
      line(plot, [x, top], [x, top + height], [1, 0]);
      const values = rings(
        plot,
        now.speedups.map(
          (speedup, index) => speedup && { x: now.batch, speedup, words: chosen[index] ? times(speedup) : "" },
        ),
        chosen,
      );
      labels(plot, [...values.filter(({ words }) => words), ...names(plot, batches, curves)]);
    },
  });

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
export const unitOf = (seconds) => UNITS.find(([size]) => seconds >= size) ?? UNITS[2];

export function duration(seconds) {
  const [size, unit] = unitOf(seconds);
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

/** Time of a round by part and draft length. uPlot draws the sums, the whole first. */
export const timeChart = (place) =>
  chart(place, {
    title: "Where a round's time goes",
    series: [...PARTS].reverse(),
    axes: [
      axis("drafts in a round", { incrs: [1, 2, 4, 8, 16], grid: { show: false } }),
      axis(null, { size: 58, values: (_, splits) => splits.map((split) => (split ? duration(split) : "0")) }),
    ],
    scales: {
      x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] },
      y: { range: (_, __, high) => [0, 1.12 * (high || 1)] },
    },
    marks: (plot, { best, whole }) => {
      const left = plot.valToPos(best, "x", true),
        top = plot.valToPos(whole[best], "y", true);
      label(plot, { left, top }, "best", plot.bbox.top + 8 * devicePixelRatio);
      line(plot, [left, plot.bbox.top], [left, top], [1, 0]);
    },
  });
