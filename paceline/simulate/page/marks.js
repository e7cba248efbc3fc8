// What is drawn upon a chart: rings, words beside points, lines.
import { colour } from "./charts.js";

export function ring(plot, x, y, name, isFull) {
  const { ctx } = plot, left = plot.valToPos(x, "x", true), top = plot.valToPos(y, "y", true);
  ctx.beginPath();
  ctx.arc(left, top, (isFull ? 5 : 4) * devicePixelRatio, 0, 7);
  ctx.fillStyle = isFull ? colour(name) : colour("paper");
  ctx.strokeStyle = colour(isFull ? "paper" : name);
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.fill();
  ctx.stroke();
  return { left, top };
}

const FONT = (ratio) => `600 ${13 * ratio}px system-ui, sans-serif`;

/** Where words begin: to the right of a point where there is room, else to its left; `isMiddle`: over it. */
function beginning({ bbox }, left, wide, isMiddle, ratio) {
  const last = bbox.left + bbox.width - wide, begin = isMiddle ? left - wide / 2 : left + 8 * ratio;
  return isMiddle || begin <= last
    ? Math.min(Math.max(begin, bbox.left), last)
    : Math.max(left - 8 * ratio - wide, bbox.left);
}

/** Words at a point, `y` where they stand, if not above it. `name`: their colour. */
export function label(
  plot,
  { left, top, isMiddle },
  words,
  y = Math.max(top - 12 * devicePixelRatio, plot.bbox.top + 8 * devicePixelRatio),
  name = "ink",
) {
  const { ctx } = plot,
    ratio = devicePixelRatio;
  ctx.save();
  ctx.font = FONT(ratio);
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const wide = ctx.measureText(words).width + 6 * ratio,
    x = beginning(plot, left, wide, isMiddle, ratio);
  ctx.fillStyle = colour("paper");
  ctx.globalAlpha = 0.88;
  ctx.fillRect(x, y - 8 * ratio, wide, 16 * ratio);
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour(name);
  ctx.fillText(words, x + 3 * ratio, y);
  ctx.restore();
}

const LINE_HEIGHT = 17;

/**
 * Words at each of [{left, top, words, name, isMiddle}], none over another or over a point: what would be moves up or
 * down.
 */
export function labels(plot, points) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio, high = LINE_HEIGHT * ratio;
  const taken = points
    .filter(({ isMiddle }) => !isMiddle)
    .map(({ left, top }) => ({ left: left - 6 * ratio, wide: 12 * ratio, y: top, high: 10 * ratio }));
  ctx.save();
  ctx.font = FONT(ratio);
  const widths = new Map(points.map((each) => [each, ctx.measureText(each.words).width + 6 * ratio]));
  ctx.restore();
  for (const each of [...points].sort((one, other) => other.top - one.top)) {
    const wide = widths.get(each), left = beginning(plot, each.left, wide, each.isMiddle, ratio);
    const isFree = (y) =>
      taken.every(
        (other) =>
          left + wide < other.left ||
          other.left + other.wide < left ||
          Math.abs(y - other.y) >= (high + other.high) / 2,
      );
    const shifts = Array.from({ length: 60 }, (_, step) => (step % 2 ? 1 : -1) * Math.ceil(step / 2) * 5 * ratio);
    const low = bbox.top + 0.5 * high,
      most = bbox.top + bbox.height - 0.5 * high,
      wanted = Math.min(Math.max(each.top - 0.7 * high, low), most);
    const y = shifts.map((shift) => wanted + shift).find((at) => at >= low && at <= most && isFree(at)) ?? wanted;
    taken.push({ left, wide, y, high });
    label(plot, each, each.words, y, each.name);
  }
}

export function line(plot, from, to, dash) {
  const { ctx } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.setLineDash(dash.map((each) => each * devicePixelRatio));
  ctx.strokeStyle = colour("edge");
  ctx.lineWidth = devicePixelRatio;
  ctx.stroke();
  ctx.restore();
}

export function plainLine(plot) {
  const { left, width } = plot.bbox, y = plot.valToPos(1, "y", true);
  line(plot, [left, y], [left + width, y], [2, 3]);
}
