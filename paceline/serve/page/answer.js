/** An answer as it grows: its text, which of its tokens were drafted, and how it looks. */

import { $, make } from "./dom.js";
import { Blocks } from "./markdown.js";

/** What a chunk says of its tokens: how many, how many of them drafted, and, if the server tells, each one's text. */
export function origin(told) {
  if (Array.isArray(told?.tokens)) {
    return {
      tokens: told.tokens.length,
      drafted: told.tokens.filter((token) => token.drafted).length,
      pieces: told.tokens,
    };
  }
  return Number.isFinite(told?.tokens) ? { tokens: told.tokens, drafted: told.drafted ?? 0, pieces: null } : null;
}

/** Where `piece` begins in `text`, which may end before it does; -1 if nowhere. */
function begin(text, piece) {
  if (!piece || piece.includes("\ufffd")) return -1;
  for (let length = piece.length; length > 0; length -= 1) {
    const at = length === piece.length ? text.indexOf(piece) : text.length - length;
    if (at >= 0 && text.startsWith(piece.slice(0, length), at)) return at;
  }
  return -1;
}

/** An answer's text with the origin of each token, shown as Markdown soon after it has come. */
export class Answer {
  element = make("div", { className: "answer" });
  whole = "";
  #blocks = new Blocks(this.element, (text, at) => this.#painted(text, at));
  #marks = [];  // what stands up to `end` of the text, where an earlier one ended
  #pieces = [];  // tokens whose text has not come yet
  #drafted = false;
  #placed = 0;
  #due = 0;
  #took = 0;
  #isPlain = false;

  /** `shown` is called after each time that the text was brought on the page. */
  constructor(shown) { this.shown = shown; }

  append(text, from) {
    this.whole += text;
    if (from?.pieces) {
      this.#pieces.push(...from.pieces);
      this.#place(text);
    } else if (from?.tokens) {
      this.#share(text, from.drafted, from.tokens);
    } else {
      this.#write(text, {});
    }
    // To lay out a long answer takes its time: it gets a fifth of all.
    if (text) this.#due ||= setTimeout(() => this.#show(false), Math.max(16, 4 * this.#took));
  }

  finish() {
    clearTimeout(this.#due);
    this.#show(true);
  }

  /** What `restore` needs to show it again: the text, and which parts of it were drafted. */
  get record() { return { text: this.whole, marks: this.#marks }; }

  restore({ text, marks }) {
    [this.whole, this.#marks, this.#placed] = [text, marks, text.length];
    if (marks.some(({ share }) => share !== undefined)) $("shares").hidden = false;
    this.finish();
  }

  #show(isWhole) {
    const began = performance.now();
    this.#due = 0;
    try {
      if (!this.#isPlain) this.#blocks.show(this.whole, isWhole);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.#isPlain = true;  // thousands of quotes in one another: marked's stack does not reach so far
    }
    if (this.#isPlain) this.element.replaceChildren(this.whole);
    this.#took = performance.now() - began;
    this.shown();
  }

  /** The nodes of `text`, which stands at `at` of the whole. */
  #painted(text, at) {
    const nodes = [], end = at + text.length;
    let low = 0, high = this.#marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#marks[middle].end > at) high = middle; else low = middle + 1;
    }
    for (let from = at; from < end; low += 1) {
      const mark = this.#marks[low] ?? { end, props: {} };
      const until = Math.min(mark.end, end), part = this.whole.slice(from, until);
      const span = mark.props.className ? make("span", { ...mark.props, text: part }) : part;
      if (mark.share !== undefined) span.style.setProperty("--share", mark.share);
      nodes.push(span);
      from = until;
    }
    return nodes;
  }

  /**
   * Shares `text` out to the tokens waiting for it. A token alone may read differently: half a character, no space, a
   * special token.
   */
  #place(text) {
    while (text && this.#pieces.length) {
      const places = this.#pieces.map((piece) => begin(text, piece.text));
      const next = places.findIndex((at) => at >= 0), at = next < 0 ? text.length : places[next];
      if (next === 0) {
        const { text: own, drafted } = this.#pieces.shift(), end = at + own.length;
        if (end > text.length) this.#pieces.unshift({ text: own.slice(text.length - at), drafted });
        this.#token(text.slice(0, end), drafted);
        text = text.slice(end);
      } else {
        const odd = this.#pieces.splice(0, next < 0 ? Infinity : next),
          drafted = odd.filter((piece) => piece.drafted).length;
        if (drafted % odd.length === 0) this.#token(text.slice(0, at), drafted > 0);
        else this.#share(text.slice(0, at), drafted, odd.length);
        text = text.slice(at);
      }
    }
    this.#write(text, {});
  }

  #token(text, drafted) {
    // no line under the gap before a run of drafts
    const bare = drafted && !this.#drafted ? text.length - text.trimStart().length : 0;
    this.#write(text.slice(0, bare), {});
    this.#write(text.slice(bare), { className: drafted ? "drafted" : "own" });
    this.#drafted = drafted;
  }

  #share(text, drafted, tokens) {
    if (text) $("shares").hidden = false;
    this.#write(text, { className: "chunk", title: `${drafted} of ${tokens} tokens drafted` }, drafted / tokens);
  }

  #write(text, props, share) {
    this.#placed += text.length;
    if (text) this.#marks.push({ end: this.#placed, props, share });
  }
}
