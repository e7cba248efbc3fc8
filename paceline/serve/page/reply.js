/**
 * One answer on the page: its text, its figures, how many times faster than plain decoding it came, and what went
 * wrong.
 */

import { $, copyButton, drawn, make, rate, seconds, term } from "./dom.js";
import { Answer, origin } from "./answer.js";
import { chunks, Failure } from "./server.js";
import { follow } from "./scroll.js";
import { BUSY, speedup } from "./speedup.js";

const PARTS = [
  ["queue_s", "Queue"],
  ["prefill_s", "Prefill"],
  ["draft_s", "Draft"],
  ["verify_s", "Verify"],
  ["host_s", "Host"],
];
const SOURCES = { ngram: "text lookup", prediction: "the prediction" };
/** So many rounds without drafts say what plain decoding takes. */
const LEAST_PLAIN = 3;

/**
 * Counts and times of one answer as the page sees them. Prefill gives the first token; then each round ends with one
 * of the target's own.
 */
class Meter {
  sent = performance.now();
  first = null;
  last = null;
  tokens = 0;
  #atFirst = 0;
  #drafted = 0;
  #own = 0;
  #open = 0;  // 1 while the last token seen was a drafted one: its round was cut short
  #told = null;

  take(from) {
    this.last = performance.now();
    this.tokens += from?.tokens ?? 1;
    if (this.first === null) [this.first, this.#atFirst] = [this.last, this.tokens];
    if (!from?.tokens) return;
    this.#drafted += from.drafted;
    this.#own += from.tokens - from.drafted;
    this.#open = from.tokens === from.drafted ? 1 : 0;
  }

  /** The server's own figures, once it gives them. */
  settle({ tokens = this.tokens, perRound = this.#told }) { [this.tokens, this.#told] = [tokens, perRound]; }

  /** Tokens per second after the first chunk, so that prefill does not count. */
  get rate() { return this.last > this.first ? (1000 * (this.tokens - this.#atFirst)) / (this.last - this.first) : 0; }
  get wait() { return (this.first - this.sent) / 1000; }
  get total() { return ((this.last ?? this.sent) - this.sent) / 1000; }
  get perRound() {
    const rounds = this.#own + this.#open - 1;
    return this.#told ?? (rounds > 0 ? 1 + this.#drafted / rounds : null);
  }
}

/**
 * What rounds without drafts took in the answers of this tab: each would have brought one token, as every round of
 * plain decoding does.
 */
const plain = { rounds: 0, seconds: 0 };

/**
 * How many times faster than plain decoding an answer came, by the server's own clock; null where too little is known.
 */
function estimate(told, { tokens, perRound }) {
  const spent = told.draft_s + told.verify_s + told.host_s, own = { rounds: told.num_plain, seconds: told.plain_s };
  if (!own.rounds && !plain.rounds || !(spent > 0) || tokens < 2) return null;
  plain.rounds += own.rounds || 0;
  plain.seconds += own.seconds || 0;
  const [from, where] = own.rounds >= LEAST_PLAIN ? [own, "this answer"] : [plain, "this tab's answers"];
  if (from.rounds < LEAST_PLAIN) return null;
  const each = from.seconds / from.rounds;
  const why =
    `${tokens - 1} tokens took ${seconds(spent)} in rounds. Plain decoding takes a round for each: ` +
    `${seconds(each)}, the mean of ` +
    `${from.rounds} rounds without drafts in ${where}.`;
  return speedup(((tokens - 1) * each) / spent, { how: "estimated", why, perRound, numTokens: tokens });
}

const MEANINGS = {
  estimated:
    "Not measured against a second run: this answer's time beside what its tokens would have taken in rounds " +
    "without drafts.",
  measured: "The same request ran twice, with speculation and without; the figure compares their tokens per second.",
};

/** "estimated" or "measured", which says on hover and focus what that means and what it was made of. */
const explained = ({ how, why }) => term(how, `${MEANINGS[how]} ${why}`);

/** Shows a speed-up where it is seen first: at the top of the page. */
export function announce(speed) {
  $("speed").hidden = !speed?.factor;
  if (!speed?.factor) return;
  const factor = make("b", { text: `${speed.factor.toFixed(2)}×` }),
    long = make("span", { className: "long", text: " the speed of" });
  $("speed").replaceChildren(factor, long, " plain decoding, ", explained(speed));
}

/** Reads an answer to screen readers in sentences instead of tokens. */
export class Reader {
  #rest = "";
  constructor() { $("live").replaceChildren(); }
  hear(text) {
    this.#rest += text;
    const end = Math.max(...[". ", "? ", "! ", "\n"].map((mark) => this.#rest.lastIndexOf(mark)));
    if (end >= 40) { Reader.say(this.#rest.slice(0, end + 1)); this.#rest = this.#rest.slice(end + 1); }
  }
  finish(words) { if (this.#rest.trim()) Reader.say(this.#rest); Reader.say(words); }
  static say(text) { $("live").append(make("p", { text })); }
}

/**
 * One answer of the server: text, figures, and whatever went wrong. `state`: waiting, running, done, stopped or
 * failed.
 */
export class Reply {
  state = "waiting";
  meter = new Meter();
  text = new Answer(follow);
  metrics = null;
  speed = null;
  #stats = make("ul", { className: "stats" });
  #timings = null;
  #reason = null;
  #by = "";
  #told = null;
  #isOneOfTwo = false;
  #actions = make("div", { className: "actions" });

  constructor(label, { heading, reader } = {}) {
    this.element = make("article", { className: "reply" }, this.text.element, this.#stats);
    this.element.setAttribute("aria-label", label);
    if (heading) this.element.prepend(make("h2", { text: heading }));
    this.#isOneOfTwo = Boolean(heading);
    this.reader = reader;
    this.#show();
  }

  async run(body, signal) {
    this.body = body;
    this.meter = new Meter();
    this.state = "running";
    this.element.setAttribute("aria-busy", "true");
    this.#show();
    try {
      for await (const chunk of chunks(body, signal)) this.#take(chunk);
      this.state = "done";
    } catch (error) {
      this.state = signal.aborted ? "stopped" : "failed";
      if (this.state === "failed") this.fail(error);
      if (!(error instanceof Failure)) console.error(error);
    }
    this.element.removeAttribute("aria-busy");
    this.#finish();
    return this.state;
  }

  #take(chunk) {
    this.#by = chunk.model ?? this.#by;
    const choice = chunk.choices?.[0];
    if (choice) {
      const text = choice.delta?.content ?? "";
      const from = origin(chunk.paceline);
      if (text || from?.tokens) this.meter.take(from);
      this.text.append(text, from);
      this.reader?.hear(text);
      this.#reason = choice.finish_reason ?? this.#reason;
    }
    if (chunk.usage) this.meter.settle({ tokens: chunk.usage.completion_tokens });
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    if (Number.isFinite(chunk.paceline?.verify_s)) {
      this.#timings = chunk.paceline;
      this.meter.settle({ perRound: chunk.paceline.tokens_per_round });
    }
    this.#show();
    follow();
  }

  #show() {
    const { meter } = this;
    if (meter.first === null) {
      const words = { waiting: "waits its turn", running: "waiting for the first token" };
      this.#stats.replaceChildren(make("li", { text: words[this.state] ?? "no tokens" }));
      return;
    }
    const figures = [
      [rate(meter.rate), "tokens/s"],
      [seconds(meter.wait), "to the first token"],
    ];
    if (meter.perRound) figures.push([meter.perRound.toFixed(2), "tokens per round"]);
    figures.push([meter.tokens, meter.tokens === 1 ? "token" : "tokens"]);
    this.#list({ figures, speed: this.speed, by: [this.#by, this.#sources()].filter(Boolean).join(", ") });
  }

  /** Writes the figures below the answer. `speed` as of `speedup`, or null. */
  #list(told) {
    this.#told = told;
    const { figures, by } = told, speed = this.#isOneOfTwo ? null : told.speed;  // both have the same figures, in line
    const items = figures.map(([value, unit]) => make("li", {}, make("b", { text: value }), ` ${unit}`));
    if (speed?.factor) {
      items.unshift(
        make("li", {}, make("b", { text: `${speed.factor.toFixed(2)}×` }), " plain decoding, ", explained(speed)),
      );
    } else if (speed) {
      items.push(make("li", {}, term(speed.doubt === BUSY ? "machine busy" : "speed-up not told", `${speed.doubt}.`)));
    }
    if (by) items.push(make("li", { className: "by", text: by }));
    this.#stats.replaceChildren(...items);
  }

  /** What `Reply.restored` needs to show it again. */
  get record() {
    return { ...this.text.record, state: this.state, label: this.element.getAttribute("aria-label"), told: this.#told };
  }

  /** An answer of an earlier visit, as `record` has it. */
  static restored(record) {
    const reply = new Reply(record.label ?? "Answer");
    [reply.state, reply.speed] = [record.state, record.told?.speed ?? null];
    reply.text.restore(record);
    if (record.told) reply.#list(record.told);
    reply.#end();
    return reply;
  }

  /** Whose drafts the answer's rounds checked. */
  #sources() {
    if (this.body.speculate === "off") return "plain decoding";
    if (!this.metrics?.rounds_by_source) return "";
    const { drafter, rounds_by_source: counted } = this.metrics,
      own = drafter && !(drafter in counted) ? `drafter ${drafter}, ` : "";
    const rounds = Object.entries(counted).filter(([source]) => source !== "none");
    const words = rounds.map(([source, each]) => `${each.num_rounds} by ${SOURCES[source] ?? source}`);
    return own + (words.length ? `rounds drafted: ${words.join(", ")}` : "no drafts");
  }

  /** Sets how much faster than plain decoding the answer came. */
  tell(speed) {
    this.speed = speed;
    if (this.element.isConnected) announce(speed);
    this.#show();
  }

  #finish() {
    this.text.finish();
    if (this.#timings) this.tell(this.body.speculate === "off" ? null : estimate(this.#timings, this.meter));
    this.#show();
    this.#end();
    if (this.#timings) this.element.append(this.#more());
    const end = { done: "Answer complete", stopped: "Stopped", failed: "The answer failed" }[this.state];
    this.reader?.finish(`${end}. ${this.meter.tokens} tokens, ${rate(this.meter.rate)} tokens per second.`);
    follow();
  }

  /** Below a finished answer: why it ended, and what can be done with it. */
  #end() {
    if (this.state === "stopped") this.note("Stopped.");
    if (this.#reason === "length") this.note("Cut at the token limit; Max tokens under Settings raises it.");
    if (this.text.whole) this.#actions.append(copyButton("Copy answer", () => this.text.whole));
    this.element.append(this.#actions);
  }

  #more() {
    const told = this.#timings;
    const rows = PARTS.filter(([name]) => Number.isFinite(told[name])).map(([name, label]) => [label, told[name]]);
    const served = told.total_s ?? rows.reduce((sum, [, value]) => sum + value, 0);
    rows.push(["Connection and page", Math.max(0, this.meter.total - served)]);
    const most = Math.max(...rows.map(([, value]) => value)) || 1;
    const table = make(
      "table",
      { className: "times" },
      make(
        "tbody",
        {},
        ...rows.map(([label, value]) => {
          const bar = make("i");
          bar.style.width = `${(100 * value) / most}%`;
          return make(
            "tr",
            {},
            make("th", { scope: "row", text: label }),
            make("td", { text: seconds(value) }),
            make("td", {}, bar),
          );
        }),
      ),
    );
    const note = this.speed?.doubt ? `No speed-up: ${this.speed.doubt}.` : this.speed?.why;
    const why = note ? [make("p", { className: "note", text: note })] : [];
    const more = make(
      "details",
      { className: "more" },
      make("summary", { text: "Where the time went" }),
      table,
      ...why,
    );
    more.addEventListener("toggle", () => {
      if (more.open) more.scrollIntoView({ block: "nearest" });
    }); // not under the composer
    return more;
  }

  note(text) {
    this.element.append(make("p", { className: "note", text }));
  }

  fail(error) {
    const box = make("div", {
      className: "error",
      text: error instanceof Failure ? error.message : "The page could not read the answer.",
    });
    box.setAttribute("role", "alert");
    this.element.append(box);
  }

  /** A button below the answer, which is handed to `action`. */
  offer(text, action, { className = "bare", title = "" } = {}) {
    const button = make("button", { type: "button", className, title, text });
    button.addEventListener("click", () => action(button));
    this.#actions.append(button);
    follow();
    return button;
  }
}

/** Rounds by how many drafts they kept: bars in SVG. */
export function histogram(counts) {
  const step = Math.max(18, Math.min(34, 300 / counts.length)), height = 76, most = Math.max(...counts, 1);
  const bars = counts.flatMap((count, kept) => {
    const x = kept * step + step / 2, tall = (height * count) / most;
    const value = drawn("text", { x, y: 14 + height - tall - 4, "text-anchor": "middle" }, String(count));
    const place = drawn("text", { x, y: 14 + height + 14, "text-anchor": "middle" }, String(kept));
    return [
      drawn("rect", { x: x - step * 0.36, y: 14 + height - tall, width: step * 0.72, height: tall, rx: 1.5 }),
      ...(count ? [value] : []),
      place,
    ];
  });
  const width = counts.length * step;
  const words = counts.map((count, kept) => `${kept} kept in ${count}`).join(", ");
  return drawn(
    "svg",
    {
      class: "bars",
      role: "img",
      width,
      height: height + 32,
      viewBox: `0 0 ${width} ${height + 32}`,
      "aria-label": `Rounds by drafts kept: ${words}`,
    },
    ...bars,
    drawn("path", { d: `M0 ${14.5 + height}H${width}` }),
  );
}
