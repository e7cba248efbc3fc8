// What was recorded or measured, as text that a person pastes: JSON of `paceline bench decode`, `evaluate`,
// `generate`, a training
// run's heldout.json, lines of traces; or plain numbers. Nothing here touches the page.
import { InputError } from "./formulas.js";

const NUMBER = /^-?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?$/i;
const MOST_SHOWN = 200;

export const parseNumber = (written) => (NUMBER.test(written.trim()) ? Number(written) : NaN);
export const parseList = (written) => written.split(/[\s,;]+/).filter(Boolean).map(parseNumber);

const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isAmount = (value) => typeof value === "number" && Number.isFinite(value) && value >= 0;

/**
 * The objects of a pasted JSON, of JSON lines, or of a command's output whose last lines are JSON. Raises InputError.
 */
function objectsOf(pasted) {
  let fault;
  try { return [JSON.parse(pasted)].flat().filter(isRecord); } catch (error) { fault = error.message; }
  const found = pasted.split("\n").flatMap((line) => {
    try {
      return line.trim().startsWith("{") ? [JSON.parse(line)] : [];
    } catch (error) {
      fault = error.message;
      return [];
    }
  });
  if (!found.length)
    throw new InputError(
      `this is not JSON (${fault}): paste the whole output of a run with --json, or its results.json`,
    );
  return found;
}

/** The rows of a run: those of all its prompt sets; of a file that has none, itself. */
function rowsOf(object) {
  const sets = isRecord(object.sets)
    ? Object.values(object.sets)
        .filter(isRecord)
        .flatMap(({ results }) => results ?? [])
    : [];
  return (Array.isArray(object.results) ? object.results : sets.length ? sets : [object]).filter(isRecord);
}

const histogramOf = ({ accepted_histogram: counts }) =>
  Array.isArray(counts) && counts.length > 1 && counts.every(isAmount) ? counts : null;

/**
 * Counts of rounds: of a run the setting with the most tokens a round, of several lines their sum. Raises InputError.
 */
function countsOf(pasted) {
  const objects = objectsOf(pasted);
  const known = objects
    .map(
      (object) =>
        rowsOf(object)
          .filter(histogramOf)
          .sort((one, other) => (other.tokens_per_round ?? 0) - (one.tokens_per_round ?? 0))[0],
    )
    .filter(Boolean);
  if (!known.length)
    throw new InputError(
      "this JSON has no accepted_histogram of a drafter: paste what paceline bench decode or evaluate prints with " +
      "--json, or a training run's heldout.json",
    );
  const all = known.map(histogramOf), longest = all.reduce((most, counts) => Math.max(most, counts.length), 0);
  return Array.from({ length: longest }, (_, place) => all.reduce((sum, counts) => sum + (counts[place] ?? 0), 0));
}

const READ = ["drafter", "batch", "temperature", "tokens_per_round", "speedup", "accepted_histogram"];
const kept = (row) =>
  Object.fromEntries(READ.filter((name) => Object.hasOwn(row, name)).map((name) => [name, row[name]]));

/** Of a pasted run what is read of it, small enough for a link; other text as it is. */
export function compact(pasted) {
  if (!/[{"]/.test(pasted)) return pasted;
  try {
    return objectsOf(pasted)
      .map((object) =>
        JSON.stringify({ ...(object.model && { model: String(object.model) }), results: rowsOf(object).map(kept) }),
      )
      .join("\n");
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return pasted;
  }
}

/** {kind, values} of what was pasted: numbers, or a run's JSON. Raises InputError. */
export function readRecorded(pasted) {
  if (!pasted.trim())
    throw new InputError(
      "paste a run's JSON: what paceline bench decode or evaluate prints with --json; or counts such as 20, 10, 5",
    );
  const [, kind = "histogram", rest] = /^\s*(?:(survival|histogram|conditional)\s*:)?([^]*)$/i.exec(pasted);
  const isJson = /[{"]/.test(pasted), values = isJson ? [] : parseList(rest.replace(/[[\]]/g, " "));
  if (isJson) return { kind: "histogram", values: countsOf(pasted) };
  if (!values.length || values.some(Number.isNaN)) {
    throw new InputError(
      "recorded acceptance cannot be read: paste counts such as 20, 10, 5, or survival: .77, .57, .42, or a run's JSON",
    );
  }
  return { kind: kind.toLowerCase(), values };
}

/**
 * Measured settings of a pasted run but for plain decoding, as paceline.bench.pages.speedup_chart reads them: {label, batch,
 * tokens_per_round, speedup, is_mocked}.
 */
export function readPoints(pasted) {
  if (!/[{"]/.test(pasted)) return [];
  return objectsOf(pasted).flatMap((object) => rowsOf(object).flatMap((row) => {
    const { tokens_per_round: kept, speedup, batch, temperature, drafter } = row;
    if (drafter === "none" || !isAmount(kept) || kept < 1 || !isAmount(speedup) || !isAmount(batch)) return [];
    const is_mocked = drafter === undefined,
      heat = isAmount(temperature) && temperature ? `, T=${Number(temperature.toPrecision(6))}` : "";
    const model = object.model ? ` (${object.model})` : "";
    return [
      {
        label: `${is_mocked ? "mocked" : drafter}${heat}${model}`.slice(0, MOST_SHOWN),
        batch,
        tokens_per_round: kept,
        speedup,
        is_mocked,
      },
    ];
  }));
}
