// The acceptance curve: chances by place as points that are dragged or moved by keys, and the survival that follows.
import { make } from "./charts.js";
import { survival } from "./formulas.js";

const WIDE = 340, HIGH = 176, LEFT = 34, RIGHT = 12, TOP = 10, BOTTOM = 30, FINEST = 0.01;

function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const round = (chance) => Math.min(Math.max(Math.round(chance / FINEST) * FINEST, 0), 1);
const tidy = (chance) => Number(round(chance).toFixed(2));
const yOf = (chance) => TOP + (1 - chance) * (HIGH - TOP - BOTTOM);
const percent = (chance) => `${(100 * chance).toFixed(chance * 100 % 1 ? 1 : 0)}%`;

/** The editor in `place`; `changed(chances)` after each move of a point. */
export class CurveEditor {
  #points = []; #held = null; #current = 0; #chances = []; #isOpen = false;

  constructor(place, changed) {
    this.changed = changed;
    this.svg = drawn("svg", {
      viewBox: `0 0 ${WIDE} ${HIGH}`,
      class: "editor",
      role: "group",
      "aria-label": "Chances by place",
    });
    this.back = drawn("g", { "aria-hidden": "true" });
    this.fades = drawn("polyline", { class: "survival", fill: "none" });
    this.line = drawn("polyline", { class: "chances", fill: "none" });
    this.handles = drawn("g", {});
    this.svg.append(this.back, this.fades, this.line, this.handles);
    place.append(this.svg);
    this.#drawBack();
    this.svg.addEventListener("pointermove", (event) => this.#drag(event));
    for (const name of ["pointerup", "pointercancel"]) this.svg.addEventListener(name, () => { this.#held = null; });
  }

  #drawBack() {
    for (const chance of [0, 0.25, 0.5, 0.75, 1]) {
      this.back.append(drawn("line", { x1: LEFT, x2: WIDE - RIGHT, y1: yOf(chance), y2: yOf(chance), class: "rule" }),
        drawn("text", { x: LEFT - 6, y: yOf(chance) + 4, "text-anchor": "end" }, String(chance)));
    }
    this.back.append(
      drawn("text", { x: (LEFT + WIDE) / 2, y: HIGH - 2, "text-anchor": "middle" }, "place of the draft"),
    );
    this.ticks = drawn("g", {});
    this.back.append(this.ticks);
  }

  #x(index) {
    return LEFT + 10 + (index * (WIDE - LEFT - RIGHT - 20)) / Math.max(this.#chances.length - 1, 1);
  }

  /** Draw these chances; `isOpen`: points can be moved. `places` of an unending curve are drawn. */
  show(acceptance, places, isOpen) {
    const count = isOpen ? acceptance.conditional.length : Math.max(places, 2);
    this.#chances = isOpen
      ? [...acceptance.conditional]
      : Array.from(
          { length: count },
          (_, index) => acceptance.conditional[Math.min(index, acceptance.conditional.length - 1)],
        );
    this.#current = Math.min(this.#current, count - 1);
    this.#isOpen = isOpen;
    this.svg.classList.toggle("open", isOpen);
    const at = (values) =>
      values.map((value, index) => `${this.#x(index).toFixed(1)},${yOf(value).toFixed(1)}`).join(" ");
    this.line.setAttribute("points", at(this.#chances));
    this.fades.setAttribute("points", at(survival(acceptance, count)));
    this.#number(count);
    this.#place(count);
  }

  /** The current chances, as far as drawn. */
  get chances() { return this.#chances.map(tidy); }

  hide() {
    this.#number(0);
    this.#place(0);
    for (const each of [this.line, this.fades]) each.setAttribute("points", "");
  }

  #number(count) {
    const step = Math.ceil(count / 16);
    const places = Array.from({ length: count }, (_, index) => index).filter((index) => index % step === 0);
    this.ticks.replaceChildren(
      ...places.map((index) =>
        drawn(
          "text",
          { x: this.#x(index).toFixed(1), y: HIGH - BOTTOM + 14, "text-anchor": "middle" },
          String(index + 1),
        ),
      ),
    );
  }

  #place(count) {
    while (this.#points.length > count) this.#points.pop().remove();
    while (this.#points.length < count) this.#points.push(this.#handle(this.#points.length));
    this.#points.forEach((point, index) => {
      const chance = this.#chances[index];
      point.setAttribute("transform", `translate(${this.#x(index).toFixed(1)} ${yOf(chance).toFixed(1)})`);
      point.setAttribute("aria-valuenow", chance);
      point.setAttribute("aria-valuetext", `${percent(chance)} stand`);
      if (this.#isOpen) point.setAttribute("tabindex", index === this.#current ? 0 : -1);
      else point.removeAttribute("tabindex");
      point.setAttribute("aria-disabled", String(!this.#isOpen));
    });
  }

  #handle(index) {
    const point = drawn("g", {
      class: "point",
      role: "slider",
      "aria-valuemin": 0,
      "aria-valuemax": 1,
      "aria-orientation": "vertical",
      "aria-label": `Chance of draft ${index + 1}`,
    });
    point.append(drawn("circle", { class: "hit", r: 11 }), drawn("circle", { class: "dot", r: 4.5 }));
    point.addEventListener("pointerdown", (event) => this.#hold(event, index));
    point.addEventListener("keydown", (event) => this.#key(event, index));
    this.handles.append(point);
    return point;
  }

  #hold(event, index) {
    if (!this.#isOpen) return;
    event.preventDefault();
    this.#held = index;
    this.#focus(index);
    this.svg.setPointerCapture(event.pointerId);
  }

  #drag(event) {
    if (this.#held === null) return;
    const box = this.svg.getBoundingClientRect(), y = ((event.clientY - box.top) * HIGH) / box.height;
    this.#set(this.#held, 1 - (y - TOP) / (HIGH - TOP - BOTTOM));
  }

  #key(event, index) {
    if (!this.#isOpen || event.ctrlKey || event.altKey || event.metaKey) return;
    const now = this.#chances[index],
      to = { ArrowUp: now + 0.01, ArrowDown: now - 0.01, PageUp: now + 0.1, PageDown: now - 0.1, Home: 0, End: 1 }[
        event.key
      ];
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (to === undefined && side === undefined) return;
    event.preventDefault();
    if (to !== undefined) this.#set(index, to);
    else this.#focus(Math.min(Math.max(index + side, 0), this.#points.length - 1));
  }

  #focus(index) {
    this.#current = index;
    this.#points.forEach((point, each) => point.setAttribute("tabindex", each === index ? 0 : -1));
    this.#points[index].focus();
  }

  #set(index, chance) {
    const chances = [...this.#chances];
    chances[index] = tidy(chance);
    if (chances[index] !== this.#chances[index]) this.changed(chances);
  }
}

/** Buttons that lengthen and shorten a curve. */
export function curveButtons(get, set, most) {
  const longer = make("button", { type: "button", text: "Add a place" }),
    shorter = make("button", { type: "button", text: "Remove the last" });
  longer.addEventListener("click", () => { if (get().length < most) set([...get(), get()[get().length - 1]]); });
  shorter.addEventListener("click", () => { if (get().length > 1) set(get().slice(0, -1)); });
  return [longer, shorter];
}
