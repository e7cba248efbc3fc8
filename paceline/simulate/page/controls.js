// Fields as labelled controls. A number has a box for exact values and a slider; both say the same.
import { make } from "./charts.js";
import { parsed, written } from "./state.js";

const wide = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 6 });

/** A field's controls in `place`: `fill(value)` shows a value, `changed(value)` is called with what a person sets. */
export class Control {
  constructor(name, field, place, changed) {
    Object.assign(this, { name, field, place, changed });
    this.input = this.#input();
    this.input.id = name;
    this.input.name = name;
    this.fault = make("small", { className: "fault", id: `${name}-fault` });
    const label = make("label", { text: field.label, htmlFor: name });
    const order = field.kind === "flag" ? [this.input, label] : [label, this.input];
    place.classList.add(field.kind, ...(field.isLong ? ["long"] : []));
    place.append(
      ...order,
      ...(field.kind === "number" ? [this.#slider()] : []),
      ...(field.hint ? [make("small", { text: field.hint, id: `${name}-hint` })] : []),
      this.fault,
    );
    this.input.setAttribute("aria-describedby", field.hint ? `${name}-hint ${name}-fault` : `${name}-fault`);
    this.input.addEventListener("input", () => changed(this.#read()));
  }

  #input() {
    const { kind, options, isLong, placeholder = "", most } = this.field;
    if (kind === "menu") return make("select", {}, ...options.map(([value, text]) => make("option", { value, text })));
    if (kind === "flag") return make("input", { type: "checkbox" });
    const more = { placeholder, autocomplete: "off", spellcheck: false };
    if (isLong) return make("textarea", { rows: 3, ...more });
    return make("input", {
      type: "text",
      inputMode: kind === "number" ? "decimal" : "text",
      ...(most ? { maxLength: most } : {}),
      ...more,
    });
  }

  #slider() {
    const { stops, min, max, step, top = max, label } = this.field;
    this.slider = make("input", {
      type: "range",
      id: `${this.name}-slider`,
      ...(stops ? { min: 0, max: stops.length - 1, step: 1 } : { min, max: top, step }),
    });
    this.slider.setAttribute("aria-label", `${label}, slider`);
    this.slider.addEventListener("input", () => {
      const value = stops ? stops[this.slider.value] : Number(this.slider.value);
      this.input.value = String(value);
      this.#speak(value);
      this.changed(value);
    });
    return this.slider;
  }

  #speak(value) {
    this.slider.setAttribute("aria-valuetext", wide(value));
  }

  #read() {
    const value = this.field.kind === "flag" ? this.input.checked : parsed(this.field, this.input.value);
    if (this.slider && !Number.isNaN(value)) this.#slide(value);
    return value;
  }

  #slide(value) {
    const { stops } = this.field, far = (stop) => Math.abs(Math.log(stop / Math.max(value, 1e-9)));
    this.slider.value = String(
      stops ? stops.reduce((near, stop, index) => (far(stop) < far(stops[near]) ? index : near), 0) : value,
    );
    this.#speak(value);
  }

  fill(value) {
    if (this.field.kind === "flag") this.input.checked = value;
    else this.input.value = Array.isArray(value) ? value.join(", ") : Number.isNaN(value) ? "" : written(value);
    if (this.slider) this.#slide(value);
  }

  show(isShown) {
    this.place.hidden = !isShown;
  }

  complain(fault) {
    if (this.fault.textContent === fault) return;
    this.fault.textContent = fault;
    if (fault) this.input.setAttribute("aria-invalid", "true");
    else this.input.removeAttribute("aria-invalid");
  }
}
