// Two columns of text that fill as fast as it is predicted: plain decoding, and the chosen drafter at its best length.
import { make, write } from "./charts.js";
import { tokenTimes, usualSpeed } from "./watch.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const PER_SECOND = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** The replay in `place`. `plan(view)` sets what is replayed; it plays while shown, unless motion is unwelcome. */
export class Columns {
  #sides = []; #end = 0; #at = 0; #speed = 1; #last = null; #frame = 0; #isPlaying = false; #isShown = false; #key = "";

  constructor(place, pieces) {
    this.pieces = pieces;
    this.columns = ["plain", "best"].map((key) => this.#column(key));
    this.play = make("button", { type: "button", id: "watch-play", text: "Play" });
    this.restart = make("button", { type: "button", id: "watch-restart", text: "Restart" });
    this.pace = make(
      "select",
      { id: "watch-speed" },
      ...[1, 0.5, 0.25, 0.1].map((speed) =>
        make("option", { value: speed, text: speed === 1 ? "as it would be" : `${speed}× as fast` }),
      ),
    );
    const label = make("label", { text: "Shown", htmlFor: "watch-speed" });
    this.bar = make("progress", { max: 1, value: 0 });
    this.bar.setAttribute("aria-label", "Time of the replay");
    this.note = make("p", { className: "where", id: "watch-note" });
    place.append(make("div", { className: "actions" }, this.play, this.restart, label, this.pace), this.bar, this.note,
      make("div", { className: "columns" }, ...this.columns.map(({ box }) => box)));
    this.play.addEventListener("click", () => this.#toggle());
    this.restart.addEventListener("click", () => { this.#at = 0; this.#begin(); });
    this.pace.addEventListener("change", () => { this.#speed = Number(this.pace.value); });
  }

  #column(key) {
    const title = make("h3"),
      figure = make("p", { className: "where", id: `watch-${key}` }),
      text = make("p", { className: "stream", id: `watch-${key}-text` });
    return { title, figure, text, box: make("section", {}, title, figure, text), shown: 0 };
  }

  /**
   * `view`: {plain_s, round_s, survival, name, note}: seconds of a plain and of a drafted round; null: nothing to
   * watch.
   */
  plan(view) {
    const key = JSON.stringify(view);
    if (key === this.#key) return;
    this.#key = key;
    const count = this.pieces.length;
    this.#sides = view
      ? [
          tokenTimes([], { first_s: view.plain_s, round_s: view.plain_s }, count),
          tokenTimes(view.survival, { first_s: view.plain_s, round_s: view.round_s }, count),
        ]
      : [];
    this.#end = Math.max(0, ...this.#sides.map((side) => side[side.length - 1].at_s));
    this.#speed = usualSpeed(this.#end);
    this.pace.value = String(this.#speed);
    write(this.note, view?.note ?? "");
    this.columns.forEach(({ title }, index) => write(title, view ? ["plain decoding", view.name][index] : "–"));
    this.#at = still.matches ? this.#end : 0;
    this.#stop();
    this.#draw();
    if (this.#isShown && !still.matches && view) this.#begin();
  }

  /** While its tab is open. */
  show(isShown) {
    const isNew = isShown && !this.#isShown;
    this.#isShown = isShown;
    if (!isShown) this.#stop();
    else if (isNew && !still.matches && this.#at < this.#end) this.#begin();
  }

  #toggle() {
    if (this.#isPlaying) return this.#stop();
    if (this.#at >= this.#end) this.#at = 0;
    return this.#begin();
  }

  #begin() {
    if (!this.#sides.length) return;
    this.#isPlaying = true;
    this.#last = null;
    write(this.play, "Pause");
    this.#draw();
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame((now) => this.#step(now));
  }

  #stop() {
    this.#isPlaying = false;
    write(this.play, "Play");
  }

  #step(now) {
    if (!this.#isPlaying) return;
    if (this.#last !== null) this.#at += (this.#speed * (now - this.#last)) / 1000;
    this.#last = now;
    if (this.#at >= this.#end) {
      this.#at = this.#end;
      this.#stop();
    }
    this.#draw();
    if (this.#isPlaying) this.#frame = requestAnimationFrame((then) => this.#step(then));
  }

  #draw() {
    this.bar.value = this.#end ? this.#at / this.#end : 0;
    this.columns.forEach((column, index) => this.#fill(column, this.#sides[index] ?? []));
  }

  /** Writes what has come by now; tokens that came with the last round are marked. */
  #fill(column, side) {
    let count = side.findIndex(({ at_s }) => at_s > this.#at + 1e-12);
    if (count < 0) count = side.length;
    const spent = Math.min(this.#at, side[side.length - 1]?.at_s ?? 0);
    write(
      column.figure,
      side.length
        ? `${count} of ${side.length} tokens, ${spent.toFixed(2)} s, ` +
          `${spent ? PER_SECOND.format(count / spent) : 0} tokens/s`
        : "–",
    );
    if (count === column.shown && column.text.childElementCount) return;
    column.shown = count;
    const from = count && count < side.length ? side.findIndex(({ round }) => round === side[count - 1].round) : count;
    const word = (first, last) => this.pieces.slice(first, last).join("");
    column.text.replaceChildren(
      make("span", { text: word(0, from) }),
      make("span", { className: "fresh", text: word(from, count) }),
    );
  }
}
