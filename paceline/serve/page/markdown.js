/**
 * Markdown as elements. marked's lexer reads it; every text of its tree becomes a text node, so that no HTML comes of
 * what a model
 * writes: tags are shown, images are links, and links go to http, https and mailto addresses only.
 */

import { lexer } from "./vendor/marked.esm.js";
import { copyButton, make } from "./dom.js";

/**
 * Quotes and lists inside one another beyond this are shown as written: a browser lays out no page a thousand levels
 * deep.
 */
const DEEPEST = 24;
const SAFE = new Set(["http:", "https:", "mailto:"]);
const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
/**
 * A last line that its next character may turn into something else: a fence, a rule, an underlined heading, a table's
 * second row.
 */
const UNSETTLED = /(?:^|\n)[ \t]*(?:[-=|: \t]+|`{1,2}|~{1,2})$/;

/** An answer's blocks on the page. `paint(text, at)` gives the nodes of `text`, which stands at `at` of the source. */
export class Blocks {
  #shown = [];  // { raw, node } of each block; a space has no node

  constructor(element, paint) { [this.element, this.paint] = [element, paint]; }

  /** Shows `source`; blocks that did not change stay as they are, with what is selected in them. */
  show(source, isWhole) {
    const tokens = lexer(isWhole ? source : source.replace(UNSETTLED, ""));
    const keeps = !isWhole || !Object.keys(tokens.links).length;  // an address given below changes links above
    let at = 0;
    tokens.forEach((token, place) => {
      const old = this.#shown[place];
      if (!keeps || old?.raw !== token.raw) {
        const made = new Writer(token.raw, at, this.paint).block(token, 0),
          node = made instanceof DocumentFragment ? make("p", {}, made) : made;
        this.#shown[place] = { raw: token.raw, node: this.#put(node, old?.node, place) };
      }
      at += token.raw.length;
    });
    for (const { node } of this.#shown.splice(tokens.length)) node?.remove();
  }

  #put(node, old, place) {
    if (node?.className === "code" && old?.className === "code") {
      // its button keeps the focus, its text the place it was scrolled to
      for (const part of [".language", "code"])
        old.querySelector(part).replaceChildren(...node.querySelector(part).childNodes);
      return old;
    }
    old?.remove();
    if (node) {
      const before = this.#shown.slice(0, place).findLast((each) => each.node)?.node;
      if (before) before.after(node); else this.element.prepend(node);
    }
    return node;
  }
}

/** Makes the elements of one block; follows in its source which place each text comes from. */
class Writer {
  #at = 0;

  constructor(source, start, paint) { [this.source, this.start, this.paint] = [source, start, paint]; }

  /** The element of a token; null for one that shows nothing. */
  block(token, depth) {
    if (token.type === "space" || token.type === "def") return null;
    // -1 inside quotes and lists, whose lines begin with other signs
    const at = this.source.indexOf(token.raw, this.#at);
    if (at >= 0) this.#at = at;
    const node = depth > DEEPEST ? make("p", {}, ...this.#text(token.raw.trim())) : this.#made(token, depth);
    if (at >= 0) this.#at = at + token.raw.length;
    return node;
  }

  #blocks(tokens, depth) { return tokens.map((token) => this.block(token, depth + 1)).filter(Boolean); }

  #made(token, depth) {
    const inside = () => this.#blocks(token.tokens ?? [], depth);
    switch (token.type) {
      case "heading":
        return make(`h${Math.min(6, token.depth + 2)}`, {}, ...inside());
      case "code":
        return this.#code(token);
      case "hr":
      case "br":
        return make(token.type);
      case "list":
        return this.#list(token, depth);
      case "table":
        return this.#table(token, depth);
      case "checkbox":
        return make("span", { text: token.checked ? "☑ " : "☐ " });
      case "codespan":
        return make("code", {}, ...this.#text(token.text));
      case "link":
        return this.#link(token, inside);
      case "image":
        return this.#link(token, () => [`image: ${token.text || "without a description"}`]);
      case "html":
        return token.block ? make("p", {}, ...this.#text(token.text.trimEnd())) : this.#span(this.#text(token.text));
      case "text":
      case "escape":
        return this.#span(token.tokens ? inside() : this.#decoded(token.text));
      default:
        return make(TAGS[token.type] ?? "span", {}, ...(TAGS[token.type] ? inside() : this.#text(token.raw)));
    }
  }

  #span(nodes) {
    const fragment = document.createDocumentFragment();
    fragment.append(...nodes);
    return fragment;
  }

  #text(text) {
    return text.split(/(\n)/).flatMap((line) => {
      const at = line.trim() ? this.source.indexOf(line, this.#at) : -1;
      if (at < 0) return [line];
      this.#at = at + line.length;
      return this.paint(line, this.start + at);
    });
  }

  #decoded(text) {
    return text.split(/(&(?:amp|lt|gt|quot|nbsp|#39);)/).flatMap((part) => {
      const nodes = this.#text(part);
      if (!ENTITIES[part]) return nodes;
      return [
        nodes[0].cloneNode ? Object.assign(nodes[0].cloneNode(), { textContent: ENTITIES[part] }) : ENTITIES[part],
      ];
    });
  }

  #code(token) {
    if (/^ {0,3}[`~]{3}/.test(token.raw)) this.#at += token.raw.split("\n", 1)[0].length;
    const code = make("code", {}, ...this.#text(token.text));
    const pre = make("pre", { tabIndex: 0 }, code);
    const language = make("span", { className: "language" }, token.lang?.match(/\S+/)?.[0] ?? "text");
    return make(
      "div",
      { className: "code" },
      make(
        "div",
        { className: "bar" },
        language,
        copyButton("Copy code", () => code.textContent),
      ),
      pre,
    );
  }

  #list(token, depth) {
    const items = token.items.map((item) => {
      const at = this.source.indexOf(item.raw, this.#at);
      if (at >= 0) this.#at = at + item.raw.match(/^\s*(?:[-+*]|\d+[.)])?/)[0].length;
      const made = make("li", { className: item.task ? "task" : "" }, ...this.#blocks(item.tokens, depth));
      if (at >= 0) this.#at = at + item.raw.length;
      return made;
    });
    return token.ordered ? make("ol", { start: Number(token.start) || 0 }, ...items) : make("ul", {}, ...items);
  }

  #table(token, depth) {
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell, column) => {
      const made = make(tag, {}, ...this.#blocks(cell.tokens, depth));
      if (tag === "th") made.scope = "col";
      if (token.align[column]) made.style.textAlign = token.align[column];
      return made;
    }));
    const head = make("thead", {}, row(token.header, "th"));
    return make(
      "div",
      { className: "table", tabIndex: 0 },
      make("table", {}, head, make("tbody", {}, ...token.rows.map((cells) => row(cells, "td")))),
    );
  }

  #link(token, inside) {
    const address = URL.canParse(token.href) ? new URL(token.href) : null;  // what is relative is nobody's page here
    if (!SAFE.has(address?.protocol)) return make("span", {}, ...this.#text(token.raw));
    return make(
      "a",
      { href: address.href, title: address.href, target: "_blank", rel: "noopener noreferrer nofollow" },
      ...inside(),
    );
  }
}
