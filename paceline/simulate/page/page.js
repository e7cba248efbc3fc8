// The page: controls to state, state to a prediction, the prediction to figures, charts, commands and a link.
import { isShown, SENTENCES, stateOf } from "./argument.js";
import { numbersOf } from "./assumptions.js";
import { Cards } from "./cards.js";
import { batchChart, followScheme, lengthChart, timeChart } from "./charts.js";
import { count, DRAFTERS, duration, make, times, write } from "./charts.js";
import { Columns } from "./columns.js";
import { Control } from "./controls.js";
import { CurveEditor, curveButtons } from "./editor.js";
import { PLACEHOLDER, serverFlags, simulateCommand } from "./flags.js";
import { best, between, InputError, slope } from "./formulas.js";
import { fitOf, limitsOf, warningsOf } from "./limits.js";
import { solve } from "./problem.js";
import { fault, fieldFor, fieldsOf, fromHash, isUsed, ownOf, PASTED, standards, suits, toHash } from "./state.js";
import { Tabs } from "./tabs.js";
import { pointRow, tokensChart, tokensView } from "./tokens.js";
import { copied, later, sentences, writeCommand } from "./tools.js";
import { batchView, drafts, lengthView, measuredPoints, timeView, watchView } from "./views.js";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const fields = fieldsOf(data);
const LINK_AFTER_MS = 250, SAY_AFTER_MS = 700, LONGEST_LINK = 30_000;
let state = location.hash.length > 1 ? fromHash(fields, location.hash) : opening();
let problem = null;

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const whole = (value) => (value >= 100 ? WHOLE.format(value) : count(value));
const signed = (value, digits) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

/** The state of a page that was opened without a link. */
function opening() {
  return stateOf(SENTENCES.find((each) => each.key === "common"), fields, standards(fields));
}

// From a problem to what is shown

function named() {
  return DRAFTERS.map(({ key, label }) =>
    key === "block" && state["block.block"] > 1 ? `in blocks of ${state["block.block"]}` : label,
  );
}

const chosenName = () => named()[DRAFTERS.findIndex(({ key }) => key === state.drafter)];

// Speed-up over the acceptance length

function showNoTokens() {
  tokens.show(null);
  $("points").tBodies[0].replaceChildren();
  for (const id of ["slopes", "points-note", "results-fault"]) write($(id), "");
  $("results-fault").hidden = true;
}

function showTokens() {
  const { points, elsewhere, fault } = measuredPoints(problem.load, state, data.measured),
    view = tokensView(problem, points, state.drafter),
    at = (x) => between(view.curve, x);
  tokens.show(view);
  const rows = [
    ...view.predicted.map((each) => ({ ...each, label: `${each.label}, predicted` })),
    ...view.measured.map((each) => ({ ...each, label: each.row })),
  ];
  $("points").tBodies[0].replaceChildren(...rows.map((each) => {
    const [name, ...words] = pointRow(each, at);
    return make("tr", {}, make("th", { scope: "row", text: name }), ...words.map((text) => make("td", { text })));
  }));
  const other = elsewhere.length
    ? ` Points at batch ${elsewhere.join(", ")} are left out: set the batch to see them.`
    : "";
  const note = data.measured[state.measured]?.note ?? "";
  write($("points-note"), `${note}${other}`.trim());
  const slopes = [
    ["mocked", points.filter((each) => each.is_mocked)],
    ["drafters", points.filter((each) => !each.is_mocked)],
  ]
    .map(([name, found]) => [name, slope(found.map((each) => [each.tokens_per_round, each.speedup]))])
    .filter(([, found]) => found !== null);
  write(
    $("slopes"),
    slopes.length
      ? `slopes through (1, 1): ${slopes.map(([name, found]) => `${name} ${found.toFixed(2)}`).join(", ")}`
      : "",
  );
  write($("results-fault"), fault);
  $("results-fault").hidden = !fault;
}

/** What only an open tab needs. */
function showTab() {
  tabs.show(state.tab);
  columns.show(state.tab === "watch");
  if (state.tab === "tokens") {
    if (problem?.prediction) showTokens();
    else showNoTokens();
  }
  if (state.tab === "watch") columns.plan(problem?.prediction ? watchView(problem, chosenName()) : null);
}

// Figures

function figure(id, value, text, note) {
  const element = $(id);
  element.value = Number.isFinite(value) ? String(value) : "";
  write(element, text);
  if (note !== undefined) write($(`${id}-note`), note);
}

/** Beside the large figures: that the model does not fit, and what the figures are then. */
function showFit({ memory, deployment: { machine, num_gpus } }) {
  $("fit").hidden = memory.fits;
  if (memory.fits) return;
  const gigabytes = (bytes) => (bytes / 1e9).toFixed(0),
    machines = `${num_gpus === 1 ? "one" : num_gpus} ${machine.name}`;
  write(
    $("fit-note"),
    `${gigabytes(memory.weights + memory.cache)} GB in ${machines} of ${gigabytes(memory.memory)} GB. ` +
      `The figures are the rates of ${machines}, as if it did`,
  );
}

function showFigures(problem) {
  const { prediction: p, load, memory } = problem;
  showFit(problem);
  figure(
    "best",
    p.best_draft_length,
    String(p.best_draft_length),
    p.best_draft_length ? `${p.best_draft_length === 1 ? "draft" : "drafts"} a round` : "drafts: decode plainly",
  );
  figure("speedup", p.speedup, times(p.speedup), "speed-up over plain decoding");
  figure("rate", p.tokens_per_s, whole(p.tokens_per_s), `tokens/s, plain ${whole(p.plain_tokens_per_s)}`);
  figure("each", p.tokens_per_s / load.batch, count(p.tokens_per_s / load.batch), "tokens/s of each sequence");
  const tokens = `acceptance length, rounds of ${duration(p.round_s)}`;
  figure("tokens", p.tokens_per_round, p.tokens_per_round.toFixed(2), tokens);
  const point = p.sensitivity.find(({ points }) => points === 0.01);
  figure("point", point.gain, `${signed(100 * point.gain, 1)}%`, "for one more point of acceptance");
  showMemory(memory);
  showSensitivity(p.sensitivity);
}

/** Rows stay, so that a redraw lays out little. */
function showSensitivity(changes) {
  const body = $("sensitivity").tBodies[0];
  if (body.rows.length !== changes.length) {
    body.replaceChildren(
      ...changes.map(() => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td"))),
    );
  }
  changes.forEach(({ points, speedup, gain, best_draft_length: length }, row) => {
    const words = [`${signed(100 * points, 0)} points`, times(speedup), `${signed(100 * gain, 1)}%`, drafts(length)];
    words.forEach((text, cell) => write(body.rows[row].cells[cell], text));
  });
}

function showMemory({ weights, cache, memory, fits }) {
  const needed = weights + cache, gigabytes = (bytes) => (bytes < 1e9 ? (bytes / 1e9).toFixed(2) : count(bytes / 1e9));
  figure(
    "memory",
    needed,
    `${gigabytes(needed)} GB`,
    `${memory ? `of ${gigabytes(memory)} GB: ${fits ? "fits" : "does not fit"}. ` : ""}Weights ` +
    `${gigabytes(weights)} GB, cache ${gigabytes(cache)} GB`,
  );
  $("memory-bar").hidden = !memory;
  $("memory-bar").classList.toggle("over", !fits);
  $("memory-bar").firstElementChild.style.width = `${Math.min(100, (100 * needed) / (memory || needed))}%`;
}

const FIGURES = ["best", "speedup", "rate", "each", "tokens", "point", "memory"];

/** The servers' commands; of what does not fit none, as none of them would run. */
function showWords(problem) {
  const { prediction, deployment, drafter, told } = problem, fit = fitOf(problem);
  const model = state.model === PASTED ? { hub: "YOUR-MODEL", has_decoder: true } : data.models[state.model];
  const flags = serverFlags({
    model: model.hub,
    has_decoder: model.has_decoder,
    method: state.method || (drafter.block ? "dflash" : "mtp"),
    drafter: state.drafter_name || PLACEHOLDER,
    num_drafted: prediction.best_draft_length,
    batch: state.batch,
    num_gpus: state.gpus,
    has_8bit_cache: deployment.precisions.kv.name === "float8",
  });
  for (const [server, command] of Object.entries(flags)) writeCommand($(`${server}-flags`), fit ? `# ${fit}` : command);
  writeCommand($("command"), simulateCommand(state, ownOf(state, state.drafter), told, data));
  $("command-note").hidden = state.model !== PASTED;
}

function showNumbers(problem) {
  $("numbers").tBodies[0].replaceChildren(
    ...numbersOf(problem).map(([name, text]) =>
      make("tr", {}, make("th", { scope: "row", text: name }), make("td", { text })),
    ),
  );
}

// Drawing

const controls = new Map();
const lengths = lengthChart($("length-chart")),
  batches = batchChart($("batch-chart")),
  rounds = timeChart($("time-chart"));
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
  for (const part of Object.keys(problem?.shape.precisions ?? {}))
    controls.get(part).input.options[0].text = `${problem.shape.precisions[part]}, stored`;
  for (const place of document.querySelectorAll(".whose"))
    write(place, chosenName());
  $("curve-buttons").hidden = !isCurve;
  $("to-curve").hidden = isCurve || !problem?.prediction;
  SENTENCES.forEach((sentence) =>
    $(`say-${sentence.key}`).setAttribute("aria-pressed", String(isShown(sentence, fields, state))),
  );
  write($("sentence"), SENTENCES.find((sentence) => isShown(sentence, fields, state))?.text ?? "");
}

/** What holds of every drafter that can be predicted, whichever is chosen. */
function showAll() {
  const bests = problem.curves.map((curve) => curve && best(curve));
  lengths.show(lengthView(problem, named()));
  batches.show(batchView(problem, named()));
  DRAFTERS.forEach(({ key }, index) =>
    cards.tell(
      key,
      bests[index],
      state[`${key}.recorded`]?.trim() || key !== "yours" ? "see its fields" : "paste a run",
    ),
  );
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
  $("fit").hidden = true;
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
  controls.set(
    name,
    new Control(name, fields[fieldFor(name, state)] ?? fields[`block.${name}`], place, (value) => {
      state[fieldFor(name, state)] = value;
      redraw();
    }),
  );
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
$("reset").addEventListener("click", () => restore(opening()));
$("inputs").addEventListener("submit", (event) => event.preventDefault());
$("copy-link").addEventListener("click", () => { copy($("copy-link"), location.href, remember()); });
for (const button of document.querySelectorAll("[data-copies]"))
  button.addEventListener("click", () => copy(button, $(button.dataset.copies).textContent));
// The event's own address: remember() may have written over location.hash before the event arrives.
addEventListener("hashchange", (event) => restore(fromHash(fields, new URL(event.newURL).hash)));
cards.recolour();
followScheme(() => cards.recolour());
write($("about"), `paceline ${data.version}. ${data.unavailable}`);
restore(state);
