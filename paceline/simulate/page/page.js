// The page: controls to state, state to a prediction, the prediction to figures, charts, commands and a link.
import { isShown, SENTENCES, stateOf } from "./argument.js";
import { numbersOf } from "./assumptions.js";
import { Cards } from "./cards.js";
import { batchChart, count, DRAFTERS, duration, followScheme, lengthChart, make, PARTS, timeChart, times, write } from "./charts.js";
import { Columns } from "./columns.js";
import { Control } from "./controls.js";
import { CurveEditor, curveButtons } from "./editor.js";
import { PLACEHOLDER, serverFlags, simulateCommand } from "./flags.js";
import { best, between, InputError, slope, survival } from "./formulas.js";
import { limitsOf, warningsOf } from "./limits.js";
import { solve } from "./problem.js";
import { readPoints } from "./results.js";
import { fault, fieldFor, fieldsOf, fromHash, isUsed, ownOf, PASTED, standards, suits, toHash } from "./state.js";
import { Tabs } from "./tabs.js";
import { pointRow, tokensChart, tokensView } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const fields = fieldsOf(data);
const LINK_AFTER_MS = 250, SAY_AFTER_MS = 700, LONGEST_LINK = 30_000;
let state = fromHash(fields, location.hash);
let problem = null;

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const whole = (value) => (value >= 100 ? WHOLE.format(value) : count(value));
const drafts = (length) => (length === 1 ? "1 draft" : `${length} drafts`);
const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

function later(work, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(work, ms); };
}

// From a problem to what is shown

function named() {
  return DRAFTERS.map(({ key, label }) => (key === "block" && state["block.block"] > 1 ? `in blocks of ${state["block.block"]}` : label));
}

const none = (curve, values) => curve ?? values.map(() => null);

function lengthView({ curves, chosen, prediction, load }) {
  const bests = curves.map((curve) => curve && best(curve)), lengths = Array.from({ length: load.max_draft + 1 }, (_, length) => length);
  const shown = (at) => ({ where: at === null ? "at the best of each" : `at ${drafts(at)}`,
    values: at === null ? bests.map((found) => (found ? `${times(found.speedup)}, ${drafts(found.length)}` : "–")) : curves.map((curve) => (curve ? times(curve[at]) : "–")) });
  const told = prediction ? ` Best: ${drafts(prediction.best_draft_length)}, ${times(prediction.speedup)}.` : "";
  return { data: [lengths, ...curves.map((curve) => none(curve, lengths))], bests, chosen, shown, start: prediction?.best_draft_length ?? 0, names: named(),
    label: `Speed-up by draft length.${told} Arrow keys read it out.` };
}

function batchView({ over: { batches, bests }, chosen, load, prediction }) {
  const here = batches.indexOf(load.batch), curves = bests.map((row) => row.map((found) => found?.speedup ?? null));
  const shown = (at) => ({ where: `at batch ${batches[at ?? here]}`,
    values: bests.map((row) => row[at ?? here]).map((found) => (found ? `${times(found.speedup)}, ${drafts(found.length)}` : "–")) });
  const told = prediction ? ` ${times(prediction.speedup)} at ${load.batch}.` : "";
  return { data: [batches, ...curves], chosen, shown, start: here, names: named(), now: { batch: load.batch, speedups: curves.map((curve) => curve[here]) },
    label: `Best speed-up by batch.${told} Arrow keys read it out.` };
}

function timeView({ parts, prediction }) {
  const lengths = parts.map((_, length) => length), keys = PARTS.map(({ key }) => key).reverse();
  const own = keys.map((key) => parts.map((each) => each[key]));
  const sums = own.map((_, index) => lengths.map((length) => own.slice(index).reduce((sum, row) => sum + row[length], 0)));
  const shown = (at) => {
    const length = at ?? prediction.best_draft_length, whole = sums[0][length];
    return { where: `${drafts(length)}: ${duration(whole)} a round${at === null ? ", the best" : ""}`,
      values: own.map((row) => (row[length] ? `${((100 * row[length]) / whole).toFixed(1)}%, ${duration(row[length])}` : "none")) };
  };
  return { data: [lengths, ...sums], whole: sums[0], best: prediction.best_draft_length, start: prediction.best_draft_length, shown,
    label: `Time of a round by part and draft length. ${duration(prediction.round_s)} at the best. Arrow keys read it out.` };
}

// Speed-up over tokens a round

/** {points, elsewhere, fault}: built-in and pasted settings of this batch, and the batches of the others. */
function measuredPoints({ batch }) {
  const pasted = [];
  let fault = "";
  for (const text of [state.runs, state["yours.recorded"]]) {
    try { pasted.push(...readPoints(text)); } catch (error) {
      if (!(error instanceof InputError)) throw error;
      fault ||= error.message;
    }
  }
  const all = [...(data.measured[state.measured]?.points ?? []), ...pasted], points = all.filter((each) => each.batch === batch);
  return { points, elsewhere: [...new Set(all.filter((each) => each.batch !== batch).map((each) => each.batch))], fault };
}

function showNoTokens() {
  tokens.show(null);
  $("points").tBodies[0].replaceChildren();
  for (const id of ["slopes", "points-note", "results-fault"]) write($(id), "");
  $("results-fault").hidden = true;
}

function showTokens() {
  const { points, elsewhere, fault } = measuredPoints(problem.load), view = tokensView(problem, points, state.drafter), at = (x) => between(view.curve, x);
  tokens.show(view);
  const rows = [...view.predicted.map((each) => ({ ...each, label: `${each.label}, predicted` })), ...view.measured.map((each) => ({ ...each, label: each.row }))];
  $("points").tBodies[0].replaceChildren(...rows.map((each) => {
    const [name, ...words] = pointRow(each, at);
    return make("tr", {}, make("th", { scope: "row", text: name }), ...words.map((text) => make("td", { text })));
  }));
  const other = elsewhere.length ? ` Points at batch ${elsewhere.join(", ")} are left out: set the batch to see them.` : "";
  const note = data.measured[state.measured]?.note ?? "";
  write($("points-note"), `${note}${other}`.trim());
  const slopes = [["mocked", points.filter((each) => each.is_mocked)], ["drafters", points.filter((each) => !each.is_mocked)]]
    .map(([name, found]) => [name, slope(found.map((each) => [each.tokens_per_round, each.speedup]))]).filter(([, found]) => found !== null);
  write($("slopes"), slopes.length ? `slopes through (1, 1): ${slopes.map(([name, found]) => `${name} ${found.toFixed(2)}`).join(", ")}` : "");
  write($("results-fault"), fault);
  $("results-fault").hidden = !fault;
}

/** What the third tab replays: one sequence, plainly and with the chosen drafter. */
function watchView({ prediction: p, acceptance, load }) {
  const length = p.best_draft_length, each = (rate) => count(rate / load.batch);
  return { plain_s: p.plain_round_s, round_s: p.round_s, survival: survival(acceptance, length), name: named()[DRAFTERS.findIndex(({ key }) => key === state.drafter)],
    note: `Predicted${load.batch === 1 ? "" : ` for one of ${load.batch} sequences`}: ${each(p.plain_tokens_per_s)} → ${each(p.tokens_per_s)} tokens/s, ${times(p.speedup)}. No model runs; the text is the same on both sides.` };
}

/** What only an open tab needs. */
function showTab() {
  tabs.show(state.tab);
  columns.show(state.tab === "watch");
  if (state.tab === "tokens") {
    if (problem?.prediction) showTokens();
    else showNoTokens();
  }
  if (state.tab === "watch") columns.plan(problem?.prediction ? watchView(problem) : null);
}

// Figures

function figure(id, value, text, note) {
  const element = $(id);
  element.value = Number.isFinite(value) ? String(value) : "";
  write(element, text);
  if (note !== undefined) write($(`${id}-note`), note);
}

function showFigures({ prediction: p, load, memory }) {
  figure("best", p.best_draft_length, String(p.best_draft_length), p.best_draft_length ? `${p.best_draft_length === 1 ? "draft" : "drafts"} a round` : "drafts: decode plainly");
  figure("speedup", p.speedup, times(p.speedup), "speed-up over plain decoding");
  figure("rate", p.tokens_per_s, whole(p.tokens_per_s), `tokens/s, plain ${whole(p.plain_tokens_per_s)}`);
  figure("each", p.tokens_per_s / load.batch, count(p.tokens_per_s / load.batch), "tokens/s of each sequence");
  figure("tokens", p.tokens_per_round, p.tokens_per_round.toFixed(2), `tokens a round of ${duration(p.round_s)}`);
  const point = p.sensitivity.find(({ points }) => points === 0.01);
  figure("point", point.gain, `${signed(100 * point.gain, 1)}%`, "for one more point of acceptance");
  showMemory(memory);
  showSensitivity(p.sensitivity);
}

/** Rows stay, so that a redraw lays out little. */
function showSensitivity(changes) {
  const body = $("sensitivity").tBodies[0];
  if (body.rows.length !== changes.length) {
    body.replaceChildren(...changes.map(() => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td"))));
  }
  changes.forEach(({ points, speedup, gain, best_draft_length: length }, row) => {
    const words = [`${signed(100 * points, 0)} points`, times(speedup), `${signed(100 * gain, 1)}%`, drafts(length)];
    words.forEach((text, cell) => write(body.rows[row].cells[cell], text));
  });
}

function showMemory({ weights, cache, memory, fits }) {
  const needed = weights + cache, gigabytes = (bytes) => (bytes < 1e9 ? (bytes / 1e9).toFixed(2) : count(bytes / 1e9));
  figure("memory", needed, `${gigabytes(needed)} GB`, `${memory ? `of ${gigabytes(memory)} GB: ${fits ? "fits" : "does not fit"}. ` : ""}Weights ${gigabytes(weights)} GB, cache ${gigabytes(cache)} GB`);
  $("memory-bar").hidden = !memory;
  $("memory-bar").classList.toggle("over", !fits);
  $("memory-bar").firstElementChild.style.width = `${Math.min(100, (100 * needed) / (memory || needed))}%`;
}

const FIGURES = ["best", "speedup", "rate", "each", "tokens", "point", "memory"];

function showWords({ prediction, deployment, drafter, told }) {
  const flags = serverFlags({ model: state.model === PASTED ? "YOUR-MODEL" : data.models[state.model].hub, method: state.method || (drafter.block ? "dflash" : "mtp"),
    drafter: state.drafter_name || PLACEHOLDER, num_drafted: prediction.best_draft_length, batch: state.batch, num_gpus: state.gpus,
    has_8bit_cache: deployment.precisions.kv.name === "float8" });
  for (const [server, command] of Object.entries(flags)) writeCommand($(`${server}-flags`), command);
  writeCommand($("command"), simulateCommand(state, ownOf(state, state.drafter), told, data));
  $("command-note").hidden = state.model !== PASTED;
}

function showNumbers(problem) {
  $("numbers").tBodies[0].replaceChildren(...numbersOf(problem).map(([name, text]) => make("tr", {}, make("th", { scope: "row", text: name }), make("td", { text }))));
}

/** Word by word, so that lines break between words and not after a hyphen. */
function writeCommand(element, command) {
  if (element.textContent !== command) element.replaceChildren(...command.split(" ").flatMap((text, index) => [index ? " " : "", make("span", { text })]));
}

function sentences(list, found) {
  if ([...list.children].map((item) => item.textContent).join("\n") === found.join("\n")) return;
  list.replaceChildren(...found.map((text) => make("li", { text })));
}

// Drawing

const controls = new Map();
const lengths = lengthChart($("length-chart")), batches = batchChart($("batch-chart")), rounds = timeChart($("time-chart"));
const tokens = tokensChart($("tokens-chart")), columns = new Columns($("panel-watch"), data.passage);
const tabs = new Tabs($("tabs"), (tab) => { state.tab = tab; showTab(); rememberSoon(); });
const editor = new CurveEditor($("editor"), (chances) => setCurve(chances));

function showControls() {
  const isCurve = own("acceptance") === "curve";
  for (const [name, control] of controls) {
    const field = fieldFor(name, state), isHere = isUsed(field, state);
    control.show(isHere && (!problem || suits(name, problem.shape)));
    control.complain(isHere ? fault(fields[field], state[field]) : "");
  }
  for (const part of Object.keys(problem?.shape.precisions ?? {})) controls.get(part).input.options[0].text = `${problem.shape.precisions[part]}, stored`;
  for (const place of document.querySelectorAll(".whose")) write(place, named()[DRAFTERS.findIndex(({ key }) => key === state.drafter)]);
  $("curve-buttons").hidden = !isCurve;
  $("to-curve").hidden = isCurve || !problem?.prediction;
  SENTENCES.forEach((sentence) => $(`say-${sentence.key}`).setAttribute("aria-pressed", String(isShown(sentence, fields, state))));
  write($("sentence"), SENTENCES.find((sentence) => isShown(sentence, fields, state))?.text ?? "");
}

/** What holds of every drafter that can be predicted, whichever is chosen. */
function showAll() {
  const bests = problem.curves.map((curve) => curve && best(curve));
  lengths.show(lengthView(problem));
  batches.show(batchView(problem));
  DRAFTERS.forEach(({ key }, index) => cards.tell(key, bests[index], state[`${key}.recorded`]?.trim() || key !== "yours" ? "see its fields" : "paste a run"));
  sentences($("warnings"), warningsOf(problem));
}

function showChosen() {
  const { acceptance } = problem, places = acceptance.kind === "constant" ? 0 : acceptance.conditional.length;
  rounds.show(timeView(problem));
  editor.show(acceptance, Math.max(places, Math.min(state.max_draft, 32)), own("acceptance") === "curve");
  showFigures(problem);
  showWords(problem);
  sentences($("limits"), limitsOf(problem, data));
  if ($("assumptions").open) showNumbers(problem);
}

function showNothing() {
  for (const chart of [lengths, batches]) chart.show(null);
  for (const { key } of DRAFTERS) cards.tell(key, null);
  sentences($("warnings"), []);
}

function showFault(error) {
  rounds.show(null);
  editor.hide();
  for (const id of FIGURES) figure(id, NaN, "–", "");
  showSensitivity([]);
  for (const id of ["paceline-flags", "vllm-flags", "sglang-flags", "command"]) writeCommand($(id), "");
  $("memory-bar").hidden = true;
  write($("fault"), error.message);
}

function solved() {
  try {
    return { problem: solve(state, fields, data), error: null };
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return { problem: null, error };
  }
}

function redraw() {
  const found = solved(), error = found.error ?? found.problem.error;
  problem = found.problem;
  if (problem) showAll();
  else showNothing();
  if (error) showFault(error);
  else showChosen();
  if (!error) write($("fault"), "");
  $("fault").hidden = !error;
  showControls();
  showTab();
  rememberSoon();
  saySoon();
}

// Link, spoken summary, copying

/** Why the address is not that of what is shown; "" when it is. */
function remember() {
  if (!problem?.prediction) return "Nothing to link";
  const hash = toHash(fields, { ...state, config: problem.used });
  if (hash.length > LONGEST_LINK) return "Too long";
  if (hash !== location.hash) history.replaceState(null, "", hash);
  return "";
}

const rememberSoon = later(remember, LINK_AFTER_MS);
const saySoon = later(() => {
  const { prediction } = problem ?? {};
  write($("live"), prediction ? `Best: ${drafts(prediction.best_draft_length)}, ${times(prediction.speedup)}` : "");
}, SAY_AFTER_MS);

async function copied(text) {
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

/** `why`: what stands against it, said in place of copying. */
async function copy(button, text, why = "") {
  const isDone = !why && await copied(text);
  button.focus();
  button.dataset.words ??= button.textContent;
  write(button, why || (isDone ? "Copied" : "Select it by hand"));
  write($("live"), button.textContent);
  setTimeout(() => write(button, button.dataset.words), 1600);
}

// Beginning

const own = (name) => state[`${state.drafter}.${name}`];

/** A field that the chosen drafter lacks keeps what it shows: it is hidden. */
function fill(names = controls.keys()) {
  for (const name of names) {
    const value = state[fieldFor(name, state)];
    if (value !== undefined) controls.get(name).fill(value);
  }
}

function setCurve(chances) {
  state[`${state.drafter}.acceptance`] = "curve";
  state[`${state.drafter}.curve`] = chances;
  fill(["acceptance", "curve"]);
  redraw();
}

function choose(kind) {
  state.drafter = kind;
  fill();
  redraw();
}

function restore(found) {
  state = found;
  fill();
  redraw();
}

const cards = new Cards($("cards"), choose);
controls.set("drafter", cards);
for (const place of document.querySelectorAll("[data-field]")) {
  const name = place.dataset.field;
  controls.set(name, new Control(name, fields[fieldFor(name, state)] ?? fields[`block.${name}`], place, (value) => { state[fieldFor(name, state)] = value; redraw(); }));
}
for (const sentence of SENTENCES) {
  const button = make("button", { type: "button", id: `say-${sentence.key}`, text: sentence.label });
  button.addEventListener("click", () => restore(stateOf(sentence, fields, state)));
  $("argument").append(button);
}
$("show-assumptions").addEventListener("click", () => {
  if (problem?.prediction) showNumbers(problem);
  $("assumptions").showModal();
});
$("curve-buttons").append(...curveButtons(() => own("curve"), setCurve, 64));
$("to-curve").addEventListener("click", () => { setCurve(editor.chances); controls.get("acceptance").input.focus(); });
$("reset").addEventListener("click", () => restore(standards(fields)));
$("inputs").addEventListener("submit", (event) => event.preventDefault());
$("copy-link").addEventListener("click", () => { copy($("copy-link"), location.href, remember()); });
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button, $(button.dataset.copies).textContent));
// The event's own address: remember() may have written over location.hash before the event arrives.
addEventListener("hashchange", (event) => restore(fromHash(fields, new URL(event.newURL).hash)));
cards.recolour();
followScheme(() => cards.recolour());
write($("about"), `paceline ${data.version}. ${data.unavailable}`);
restore(state);
