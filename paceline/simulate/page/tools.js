// What the page does with elements, timers and the clipboard, whatever it shows.
import { make } from "./charts.js";

/** A function that does `work` once, `ms` after it was last called. */
export function later(work, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(work, ms); };
}

/** Word by word, so that lines break between words and not after a hyphen. */
export function writeCommand(element, command) {
  if (element.textContent !== command)
    element.replaceChildren(...command.split(" ").flatMap((text, index) => [index ? " " : "", make("span", { text })]));
}

export function sentences(list, found) {
  if ([...list.children].map((item) => item.textContent).join("\n") === found.join("\n")) return;
  list.replaceChildren(...found.map((text) => make("li", { text })));
}

export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}
