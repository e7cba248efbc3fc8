// The drafters as cards of one radio group: each says its best speed-up, and the chosen one is what the fields set and
// the figures tell of.
import { DRAFTERS, drawSwatch, make, times, write } from "./charts.js";

/**
 * The cards in `place`: `fill(kind)` chooses one, `tell(kind, best, fault)` writes its figures, `changed(kind)` is
 * called with a person's choice.
 */
export class Cards {
  constructor(place, changed) {
    this.place = place;
    this.cards = new Map(DRAFTERS.map((drafter) => [drafter.key, this.#card(drafter, changed)]));
    place.append(...[...this.cards.values()].map(({ element }) => element));
  }

  #card(drafter, changed) {
    const { key, label } = drafter, words = key === "ideal" ? `${label}: the ceiling` : label;
    const input = make("input", { type: "radio", name: "drafter", id: `drafter-${key}`, value: key });
    const swatch = make("canvas", { className: "swatch" }),
      figure = make("data", { id: `best-${key}` }),
      note = make("span", { className: "note", id: `best-${key}-note` });
    input.addEventListener("change", () => changed(key));
    const element = make(
      "label",
      { className: "card" },
      input,
      make("span", { className: "name" }, swatch, words),
      figure,
      note,
    );
    return { element, input, swatch, figure, note, drafter };
  }

  fill(chosen) {
    for (const [key, { input }] of this.cards) input.checked = key === chosen;
  }

  /** `best`: {length, speedup}, or null with what is at fault. */
  tell(key, best, fault = "") {
    const { figure, note } = this.cards.get(key);
    figure.value = best ? String(best.speedup) : "";
    write(figure, best ? times(best.speedup) : "–");
    write(note, best ? `${best.length} ${best.length === 1 ? "draft" : "drafts"}` : fault);
  }

  show() {}

  complain() {}

  recolour() {
    for (const { swatch, drafter } of this.cards.values()) drawSwatch(swatch, drafter);
  }
}
