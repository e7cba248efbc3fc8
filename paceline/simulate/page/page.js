// The page: controls to state, state to a prediction, the prediction to figures, charts, commands and a link.
import { batchChart, DRAFTERS, duration, followScheme, lengthChart, make, PARTS, timeChart, times, write } from "./charts.js";
import { Control } from "./controls.js";
import { CurveEditor, curveButtons } from "./editor.js";
import { PLACEHOLDER, serverFlags, simulateCommand } from "./flags.js";
import { best, InputError, memoryNeed, predict, roundParts, roundTimes, speedups, verifyTimes } from "./formulas.js";
import { limitsOf, warningsOf } from "./limits.js";
import { fault, fieldsOf, fromHash, isUsed, PASTED, resolve, standards, suits, toHash } from "./state.js";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const fields = fieldsOf(data);
const LINK_AFTER_MS = 250, SAY_AFTER_MS = 700, LONGEST_LINK = 30_000;
let state = fromHash(fields, location.hash);
let problem = null;

const THREE_DIGITS = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 }), WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const count = (value) => THREE_DIGITS.format(value);
const whole = (value) => (value >= 100 ? WHOLE.format(value) : count(value));
const drafts = (length) => (length === 1 ? "1 draft" : `${length} drafts`);
const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

function later(work, ms) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(work, ms); };
}

// From a problem to what is shown

const BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/** Best speed-up of each drafter at each batch. */
function overBatches({ shape, deployment, acceptance, load, drafters }) {
  const batches = [...new Set([...BATCHES, load.batch])].sort((one, other) => one - other);
  const rows = batches.map((batch) => {
    const there = { ...load, batch }, verify = verifyTimes({ shape, deployment }, there);
    return DRAFTERS.map(({ key }) => best(speedups(acceptance, roundTimes({ shape, deployment, drafter: drafters[key] }, there, verify))));
  });
  return { batches, bests: DRAFTERS.map((_, index) => rows.map((row) => row[index])) };
}

function solve(state) {
  const found = resolve(state, fields, data), { shape, deployment, acceptance, load, drafters } = found;
  const costs = { shape, deployment, drafter: drafters[state.drafter] }, verify = verifyTimes(costs, load);
  const prediction = predict(costs, acceptance, load, verify);
  if (!Number.isFinite(prediction.speedup) || !Number.isFinite(prediction.tokens_per_s)) throw new InputError("these sizes have no finite answer: check them");
  const curves = DRAFTERS.map(({ key }) => speedups(acceptance, roundTimes({ ...costs, drafter: drafters[key] }, load, verify)));
  const parts = verify.map((_, length) => roundParts(costs, load, length, verify[0]));
  return { ...found, prediction, curves, parts, memory: memoryNeed(shape, deployment, load), over: overBatches(found),
    chosen: DRAFTERS.map(({ key }) => key === state.drafter) };
}

const named = () => [DRAFTERS[0].label, DRAFTERS[1].label, `in blocks of ${state.block}`];

function lengthView({ curves, chosen, prediction }) {
  const bests = curves.map(best), lengths = curves[0].map((_, length) => length);
  const shown = (at) => ({ where: at === null ? "at the best of each" : `at ${drafts(at)}`,
    values: at === null ? bests.map(({ length, speedup }) => `${times(speedup)}, ${drafts(length)}`) : curves.map((curve) => times(curve[at])) });
  return { data: [lengths, ...curves], bests, chosen, shown, start: prediction.best_draft_length, names: named(),
    label: `Speed-up by draft length. Best: ${drafts(prediction.best_draft_length)}, ${times(prediction.speedup)}. Arrow keys read it out.` };
}

function batchView({ over: { batches, bests }, chosen, load, prediction }) {
  const here = batches.indexOf(load.batch), curves = bests.map((row) => row.map(({ speedup }) => speedup));
  const shown = (at) => ({ where: `at batch ${batches[at ?? here]}`,
    values: bests.map((row) => `${times(row[at ?? here].speedup)}, ${drafts(row[at ?? here].length)}`) });
  return { data: [batches, ...curves], chosen, shown, start: here, names: named(), now: { batch: load.batch, speedup: prediction.speedup },
    label: `Best speed-up by batch. ${times(prediction.speedup)} at ${load.batch}. Arrow keys read it out.` };
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

function showWords({ prediction, shape, deployment, told }) {
  const isBlock = state.drafter === "block";
  const flags = serverFlags({ model: state.model === PASTED ? "YOUR-MODEL" : data.models[state.model].hub, method: state.method || (isBlock ? "dflash" : "mtp"),
    drafter: state.drafter_name || PLACEHOLDER, num_drafted: prediction.best_draft_length, batch: state.batch, num_gpus: state.gpus,
    has_8bit_cache: deployment.precisions.kv.name === "float8" });
  for (const [server, command] of Object.entries(flags)) writeCommand($(`${server}-flags`), command);
  writeCommand($("command"), simulateCommand(state, told, data));
  $("command-note").hidden = state.model !== PASTED;
  for (const part of Object.keys(shape.precisions)) controls.get(part).input.options[0].text = `${shape.precisions[part]}, stored`;
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
const editor = new CurveEditor($("editor"), (chances) => setCurve(chances));

function showControls() {
  for (const [name, control] of controls) {
    control.show(isUsed(name, state) && (!problem || suits(name, problem.shape)));
    control.complain(isUsed(name, state) ? fault(fields[name], state[name]) : "");
  }
  $("curve-buttons").hidden = state.acceptance !== "curve";
  $("to-curve").hidden = state.acceptance === "curve" || !problem;
}

function showProblem() {
  lengths.show(lengthView(problem));
  batches.show(batchView(problem));
  rounds.show(timeView(problem));
  editor.show(problem.acceptance, Math.max(problem.acceptance.kind === "constant" ? 0 : problem.acceptance.conditional.length, Math.min(state.max_draft, 32)), state.acceptance === "curve");
  showFigures(problem);
  showWords(problem);
  sentences($("warnings"), warningsOf(problem));
  sentences($("limits"), limitsOf(problem, data));
}

function showFault(error) {
  for (const each of [lengths, batches, rounds]) each.show(null);
  editor.hide();
  for (const id of FIGURES) figure(id, NaN, "–", "");
  showSensitivity([]);
  for (const id of ["paceline-flags", "vllm-flags", "sglang-flags", "command"]) writeCommand($(id), "");
  $("memory-bar").hidden = true;
  sentences($("warnings"), []);
  write($("fault"), error.message);
}

function redraw() {
  try {
    problem = solve(state);
    write($("fault"), "");
    showProblem();
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    problem = null;
    showFault(error);
  }
  $("fault").hidden = problem !== null;
  showControls();
  rememberSoon();
  saySoon();
}

// Link, spoken summary, copying

function remember() {
  if (!problem) return;
  const hash = toHash(fields, { ...state, config: problem.used });
  if (hash.length > LONGEST_LINK) return;
  if (hash !== location.hash) history.replaceState(null, "", hash);
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

async function copy(button, text) {
  const isDone = await copied(text);
  button.focus();
  button.dataset.words ??= button.textContent;
  write(button, isDone ? "Copied" : "Select it by hand");
  write($("live"), button.textContent);
  setTimeout(() => write(button, button.dataset.words), 1600);
}

// Beginning

function fill() {
  for (const [name, control] of controls) control.fill(state[name]);
}

function setCurve(chances) {
  state.acceptance = "curve";
  state.curve = chances;
  for (const name of ["acceptance", "curve"]) controls.get(name).fill(state[name]);
  redraw();
}

function restore(found) {
  state = found;
  fill();
  redraw();
}

for (const place of document.querySelectorAll("[data-field]")) {
  const name = place.dataset.field;
  controls.set(name, new Control(name, fields[name], place, (value) => { state[name] = value; redraw(); }));
}
$("curve-buttons").append(...curveButtons(() => state.curve, setCurve, 64));
$("to-curve").addEventListener("click", () => { setCurve(editor.chances); controls.get("acceptance").input.focus(); });
$("reset").addEventListener("click", () => restore(standards(fields)));
$("inputs").addEventListener("submit", (event) => event.preventDefault());
$("copy-link").addEventListener("click", () => { remember(); copy($("copy-link"), location.href); });
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button, $(button.dataset.copies).textContent));
// The event's own address: remember() may have written over location.hash before the event arrives.
addEventListener("hashchange", (event) => restore(fromHash(fields, new URL(event.newURL).hash)));
followScheme(() => {});
write($("about"), `paceline ${data.version}. ${data.unavailable}`);
restore(state);
