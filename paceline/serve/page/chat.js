/** The page at `/`: a chat that shows how each token came, and one prompt with speculation off and on side by side. */

import { $, make, rate } from "./dom.js";
import { keep, kept as keptTurns } from "./history.js";
import { announce, histogram, Reader, Reply } from "./reply.js";
import { follow, setFollowing, watch } from "./scroll.js";
import { loadModels, request } from "./server.js";
import { FEWEST_TOKENS, speedup } from "./speedup.js";

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
    // A phone's keyboard would cover the answer.
    if (lost && !matchMedia("(pointer: coarse)").matches) $("prompt").focus();
  }
}

function setBusy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  for (const control of document.querySelectorAll("[name=mode], #together")) control.disabled = on;
}

function addTurn(prompt) {
  const asked = make("div", { className: "asked", text: prompt });
  const turn = { prompt, reply: null, element: make("div", { className: "turn" }, asked) };
  turns.push(turn);
  $("chat").append(turn.element);
  return turn;
}

const ask = (prompt) => answer(addTurn(prompt));

/** Keeps what a reload should bring back: turns with an answer, whole or stopped. */
function remember() {
  const whole = turns.filter(({ reply }) => reply && ["done", "stopped"].includes(reply.state));
  const isKept = keep(whole.map(({ prompt, reply }) => ({ prompt, reply: reply.record })));
  $("kept").textContent = isKept ? "" : "This browser has no room for the conversation: a reload deletes it.";
}

/** The conversation of an earlier visit. */
function restore() {
  for (const { prompt, reply } of keptTurns()) {
    const turn = addTurn(prompt);
    turn.reply = Reply.restored(reply);
    turn.element.append(turn.reply.element);
  }
  const last = turns.at(-1);
  if (!last) return;
  offerAgain(last, "Regenerate", "bare again");
  announce(last.reply.speed);
  setFollowing(true);
  follow();
}

const offerAgain = (turn, words, className) => turn.reply.offer(words, () => answer(turn), { className });

/** Answers `turn`, again if it was answered before. Turns that failed are no part of the conversation. */
function answer(turn) {
  if (running) return;
  const kept = turns.slice(0, turns.indexOf(turn)).filter(({ reply }) => reply.state !== "failed" && reply.text.whole);
  const said = kept.flatMap(({ prompt, reply }) =>
    [{ role: "user", content: prompt }, { role: "assistant", content: reply.text.whole }]);
  const body = request([...said, { role: "user", content: turn.prompt }]);
  for (const button of document.querySelectorAll("#chat .again")) button.remove();
  turn.reply?.element.remove();
  turn.reply = new Reply("Answer", { reader: new Reader() });
  turn.element.append(turn.reply.element);
  setFollowing(true);
  follow();
  return busy(async (signal) => {
    const isDone = (await turn.reply.run(body, signal)) === "done";
    offerAgain(turn, isDone ? "Regenerate" : "Try again", isDone ? "bare again" : "again");
    if (isDone && body.speculate !== "off" && turn.reply.meter.tokens >= FEWEST_TOKENS) {
      turn.reply.offer("Measure speed-up", (button) => measure(turn.reply, button), { title: MEASURE });
    }
    if (turns.includes(turn)) remember();  // it may have been deleted meanwhile
  });
}

/**
 * Answers the same request once more without speculation, unseen, and tells how much faster the answer on the page
 * came.
 */
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
      reply.note(speed.doubt ? `No speed-up: ${speed.doubt}.` : speed.why);
      remember();
    } else {
      button.disabled = false;
      button.textContent = "Measure speed-up";
    }
  });
}

/** The measured speed-up of `on` over `off`; null when an answer is too short to have a rate. */
function measured(on, off) {
  if (!on.meter.rate || !off.meter.rate) return null;
  const isSame = on.text.whole === off.text.whole;
  const texts = isSame ? "Both gave the same text." : "The texts differ: sampled, or a near-tie in 16-bit arithmetic.";
  const rates = `${rate(off.meter.rate)} tokens/s with plain decoding, ${rate(on.meter.rate)} with speculation`;
  const numTokens = Math.min(on.meter.tokens, off.meter.tokens), { perRound } = on.meter;
  return speedup(on.meter.rate / off.meter.rate, {
    how: "measured",
    why: `Measured: ${rates}. ${texts}`,
    perRound,
    numTokens,
  });
}

function compare(prompt) {
  const body = request([{ role: "user", content: prompt }]);
  // Without one seed for both, two draws would be compared.
  if (body.temperature > 0 && body.seed === undefined) body.seed = Math.floor(Math.random() * 2 ** 31);
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
  const speed = measured(on, off), factor = speed?.factor ? `${speed.factor.toFixed(2)}×` : "–";
  const rates = `${rate(off.meter.rate)} → ${rate(on.meter.rate)} tokens/s`;
  if (speed) on.tell(speed);
  const cell = (title, value, detail, className = "") =>
    make(
      "div",
      {},
      make("h2", { text: title }),
      make("strong", { text: value, className }),
      make("p", { text: detail }),
    );
  const seed = body.seed === undefined ? "" : ` Seed ${body.seed} for both.`;
  $("verdict").replaceChildren(
    cell("Speed-up of decoding", factor, speed?.doubt ? `${speed.doubt}. ${rates}` : rates, tone(speed?.factor)),
    a === b ? cell("Texts", "Identical", `${a.length} characters.${seed}`)
      : cell("Texts", "Different", `From character ${place + 1} on. ${why}${seed}`),
    ...(numRounds(on.metrics) >= FEWEST_ROUNDS ? [histogramOf(on.metrics)] : []),
  );
  $("verdict").hidden = false;
  Reader.say(`Both done. Speed-up ${speed?.doubt || factor}, ${rates}. Texts ${a === b ? "identical" : "different"}.`);
}

/** Bars of fewer rounds say nothing. */
const FEWEST_ROUNDS = 10;

const numRounds = (metrics) => (metrics?.acceptance_histogram ?? []).reduce((sum, count) => sum + count, 0);

/** The colour of a speed-up, as reports have it: green for a gain, amber for a cost, none between them. */
const tone = (factor) => (factor >= 1.1 ? "good" : factor < 0.97 ? "cost" : "");

function histogramOf(metrics) {
  const share = metrics.draft_acceptance_rate;
  const caption = Number.isFinite(share) ? `${(100 * share).toFixed(0)}% of drafts kept` : "";
  const bars = histogram(metrics.acceptance_histogram);
  return make("figure", {}, make("h2", { text: "Rounds by drafts kept" }), bars, make("figcaption", { text: caption }));
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
  $("clear").textContent = comparing ? "Clear" : "Clear chat";
  $("clear").title = comparing ? "" : "Deletes it here and from this browser's storage, where a reload finds it";
}

function closeSettings() {
  const isInside = $("settings").contains(document.activeElement);
  $("settings").open = false;
  if (isInside) $("settings").firstElementChild.focus();
}

function submit(prompt) {
  if (running || !prompt.trim()) return;
  if (!$("fields").checkValidity()) {
    $("settings").open = true;
    $("fields").reportValidity();
    return;
  }
  $("prompt").value = "";
  $("settings").open = false;
  const work = mode() === "compare" ? compare(prompt) : ask(prompt);
  lay();
  return work;
}

function clear() {
  running?.abort();
  if (mode() === "chat") {
    turns = [];
    remember();
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
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("settings").open) closeSettings();
  else running?.abort();
});
addEventListener("pointerdown", (event) => { if (!$("settings").contains(event.target)) $("settings").open = false; });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("colours").addEventListener("change", () => document.body.classList.toggle("uncoloured", !$("colours").checked));
for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", lay);
$("examples").append(...EXAMPLES.map((text) => make("button", { type: "button", text, onclick: () => submit(text) })));
restore();
lay();
loadModels();
