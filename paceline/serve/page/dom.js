/** Elements, numbers and the clipboard. The only place where text gets on the page, and it does so as text. */

export const $ = (id) => document.getElementById(id);

export function make(tag, { text, ...props } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...(text === undefined ? children : [String(text)]));
  return element;
}

export function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A word that is explained while the pointer or the focus is on it. */
export function term(word, meaning) {
  const element = make("button", { type: "button", className: "term", text: word });
  element.dataset.meaning = meaning;
  element.setAttribute("aria-description", meaning);
  return element;
}

export const seconds = (s) =>
  s < 0.0995 ? `${(s * 1000).toFixed(1)} ms` : s < 1 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(2)} s`;
export const rate = (value) => (value ? value.toFixed(1) : "–");

/** A button that puts what `text()` gives on the clipboard and says so for a moment. */
export function copyButton(label, text) {
  const button = make("button", { type: "button", className: "bare", text: "Copy" });
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Browsers have `navigator.clipboard` for https and localhost only; elsewhere a selection is copied. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement,
      box = make("textarea", { value: text, className: "unseen", readOnly: true });
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return done;
  }
}
