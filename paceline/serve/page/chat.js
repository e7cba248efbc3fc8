/** The page at `/`: a chat that shows how each token came, and one prompt with speculation off and on side by side. */

import { $, make, rate } from "./dom.js";
import { announce, histogram, Reader, Reply } from "./reply.js";
import { follow, setFollowing, watch } from "./scroll.js";
import { loadModels, request } from "./server.js";

const EXAMPLES = [
  "A baker sells 24 loaves in the morning and half as many in the afternoon. How many is that in a day?",
  "Write a Python function that says whether a word is a palindrome.",
  "Explain in three sentences why the sky is blue.",
];

let running = null;   // the AbortController of the work in progress
let turns = [];
let compared = false;

const MEASURE = "The same request runs once more without speculation, for comparison";

const mode = () => document.querySelector("[name=mode]:checked").value;

async function busy(work) {
  running = new AbortController();
  const mine = running, typing = document.activeElement === $("prompt");
  setBusy(true);
  if (!typing) $("stop").focus();
  try {
    await work(mine.signal);
  } finally {
    running = null;
    const lost = [$("stop"), document.body].includes(document.activeElement);
    setBusy(false);
    if (lost && !matchMedia("(pointer: coarse)").matches) $("prompt").focus();  // a phone's keyboard would cover the answer
  }
}

function setBusy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  for (const control of document.querySelectorAll("[name=mode], #together")) control.disabled = on;
}

function ask(prompt) {
  const asked = make("div", { className: "asked", text: prompt });
  const turn = { prompt, reply: null, element: make("div", { className: "turn" }, asked) };
  turns.push(turn);
  $("chat").append(turn.element);
  return answer(turn);
}

/** Answers `turn`, again if it was answered before. Turns that failed are no part of the conversation. */
function answer(turn) {
  if (running) return;
  const kept = turns.slice(0, turns.indexOf(turn)).filter(({ reply }) => reply.state !== "failed" && reply.text.whole);
  const said = kept.flatMap(({ prompt, reply }) => [{ role: "user", content: prompt }, { role: "assistant", content: reply.text.whole }]);
  const body = request([...said, { role: "user", content: turn.prompt }]);
  for (const button of document.querySelectorAll("#chat .again")) button.remove();
  turn.reply?.element.remove();
  turn.reply = new Reply("Answer", { reader: new Reader() });
  turn.element.append(turn.reply.element);
  setFollowing(true);
  follow();
  return busy(async (signal) => {
    const isDone = (await turn.reply.run(body, signal)) === "done";
    turn.reply.offer(isDone ? "Regenerate" : "Try again", () => answer(turn), { className: isDone ? "bare again" : "again" });
    if (isDone && body.speculate !== "off") turn.reply.offer("Measure speed-up", (button) => measure(turn.reply, button), { title: MEASURE });
  });
}

/** Answers the same request once more without speculation, unseen, and tells how much faster the answer on the page came. */
function measure(reply, button) {
  if (running) return;
  const off = new Reply("Plain decoding");
  button.disabled = true;
  button.textContent = "Measuring plain decoding …";
  return busy(async (signal) => {
    const isDone = (await off.run({ ...reply.body, speculate: "off" }, signal)) === "done";
    const speed = isDone ? measured(reply, off) : null;
    if (speed) {
      button.remove();
      reply.tell(speed);
      reply.note(speed.why);
    } else {
      button.disabled = false;
      button.textContent = "Measure speed-up";
    }
  });
}

/** The measured speed-up of `on` over `off`; null when an answer is too short to have a rate. */
function measured(on, off) {
  if (!on.meter.rate || !off.meter.rate) return null;
  const texts = on.text.whole === off.text.whole ? "Both gave the same text." : "The texts differ: sampled, or a near-tie in 16-bit arithmetic.";
  const why = `Measured: ${rate(off.meter.rate)} tokens/s with plain decoding, ${rate(on.meter.rate)} with speculation. ${texts}`;
  return { factor: on.meter.rate / off.meter.rate, how: "measured", why };
}

function compare(prompt) {
  const body = request([{ role: "user", content: prompt }]);
  if (body.temperature > 0 && body.seed === undefined) body.seed = Math.floor(Math.random() * 2 ** 31);  // or two draws would be compared
  const off = new Reply("Answer with speculation off", { heading: "Speculation off" });
  const on = new Reply("Answer with speculation on", { heading: "Speculation on" });
  const plain = { ...body, speculate: "off" };
  const drafted = { ...body, speculate: body.speculate === "off" ? "auto" : body.speculate };
  compared = true;
  setFollowing(false);
  $("live").replaceChildren();
  $("verdict").hidden = true;
  $("pair").replaceChildren(off.element, on.element);
  scrollTo(0, 0);
  return busy(async (signal) => {
    const runs = $("together").checked
      ? await Promise.all([off.run(plain, signal), on.run(drafted, signal)])
      : [await off.run(plain, signal), off.state === "done" && await on.run(drafted, signal)];
    if (runs.every((state) => state === "done")) judge(off, on, body);
    else (off.state === "done" ? on : off).offer("Try again", () => compare(prompt), { className: "again" });
  });
}

function judge(off, on, body) {
  const [a, b] = [off.text.whole, on.text.whole];
  let place = 0;
  while (place < a.length && a[place] === b[place]) place += 1;
  const why = body.temperature > 0
    ? "Sampled answers follow one distribution and may differ, even at one seed."
    : "At temperature 0 only near-ties in 16-bit arithmetic should do that.";
  const speed = measured(on, off), speedup = speed ? `${speed.factor.toFixed(2)}×` : "–";
  if (speed) on.tell(speed);
  const cell = (title, value, detail) => make("div", {}, make("h2", { text: title }), make("strong", { text: value }), make("p", { text: detail }));
  const seed = body.seed === undefined ? "" : ` Seed ${body.seed} for both.`;
  $("verdict").replaceChildren(
    cell("Speed-up of decoding", speedup, `${rate(off.meter.rate)} → ${rate(on.meter.rate)} tokens/s`),
    a === b ? cell("Texts", "Identical", `${a.length} characters.${seed}`) : cell("Texts", "Different", `From character ${place + 1} on. ${why}${seed}`),
    ...(on.metrics?.acceptance_histogram?.length ? [kept(on.metrics)] : []),
  );
  $("verdict").hidden = false;
  Reader.say(`Both done. Speed-up ${speedup}, from ${rate(off.meter.rate)} to ${rate(on.meter.rate)} tokens per second. Texts ${a === b ? "identical" : "different"}.`);
}

function kept(metrics) {
  const share = metrics.draft_acceptance_rate;
  const caption = Number.isFinite(share) ? `${(100 * share).toFixed(0)}% of drafts kept` : "";
  return make("figure", {}, make("h2", { text: "Rounds by drafts kept" }), histogram(metrics.acceptance_histogram), make("figcaption", { text: caption }));
}

// ---- the page itself ----

watch(() => mode() === "chat");

function lay() {
  const comparing = mode() === "compare";
  document.body.classList.toggle("wide", comparing);
  $("chat").hidden = comparing;
  $("compare").hidden = !comparing;
  $("welcome").hidden = comparing ? compared : turns.length > 0;
  $("send").textContent = comparing ? "Compare" : "Send";
}

function submit(prompt) {
  if (running || !prompt.trim()) return;
  if (!$("fields").checkValidity()) {
    $("settings").open = true;
    $("fields").reportValidity();
    return;
  }
  $("prompt").value = "";
  const work = mode() === "compare" ? compare(prompt) : ask(prompt);
  lay();
  return work;
}

function clear() {
  running?.abort();
  if (mode() === "chat") {
    turns = [];
    $("chat").replaceChildren();
    announce(null);
  } else {
    compared = false;
    $("pair").replaceChildren();
    $("verdict").hidden = true;
  }
  $("live").replaceChildren();
  lay();
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit($("prompt").value); });
$("fields").addEventListener("submit", (event) => event.preventDefault());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit($("prompt").value);
});
addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("colours").addEventListener("change", () => document.body.classList.toggle("uncoloured", !$("colours").checked));
for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", lay);
$("examples").append(...EXAMPLES.map((text) => make("button", { type: "button", text, onclick: () => submit(text) })));
lay();
loadModels();
