/** The server: its models, and the chunks of an answer. */

import { $, make } from "./dom.js";

/** An error meant for the reader. */
export class Failure extends Error {}

const storage = (() => { try { return sessionStorage; } catch { return null; } })();  // refused where cookies are
$("key").value = storage?.getItem("paceline-key") ?? "";
$("key").addEventListener("change", () => { storage?.setItem("paceline-key", $("key").value.trim()); loadModels(); });

function call(path, options = {}) {
  const key = $("key").value.trim(), drafter = $("whose").value;
  const headers = {
    ...options.headers, ...(key && { Authorization: `Bearer ${key}` }),
    ...(options.method === "POST" && drafter && { "X-Paceline-Drafter": drafter }),
  };
  return fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
}

async function refusal(response) {
  const said = await response.json().then((body) => body?.error?.message ?? body?.detail, () => null);
  const after = response.headers.get("Retry-After");
  const help = {
    401: " Enter the API key under Settings.",
    429: ` The server is busy: try again ${after ? `in ${after} s` : "soon"}.`,
  };
  const what = typeof said === "string" ? said : `The server answered ${response.status} without saying why.`;
  return new Failure(what.replace(/[^.!?]$/, "$&.") + (help[response.status] ?? ""));
}

/** The data of each server-sent event of `stream`; a line may come in pieces. */
async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r\n|\n/);
      rest = parts.pop();
      for (const line of parts) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) { yield data.join("\n"); data = []; }
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // whoever stops listening hangs up
  }
}

/** The chunks of one answer, until [DONE]. Throws Failure for anything else, unless `signal` stopped it. */
export async function* chunks(body, signal) {
  let response, ended = false;
  try {
    response = await call("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
  } catch {
    throw new Failure("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  try {
    for await (const data of lines(response.body)) {
      if (data === "[DONE]") { ended = true; continue; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message ?? "The server reported an error without a message.");
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure) throw error;
    throw new Failure(
      error instanceof SyntaxError
        ? "The server sent something that is not JSON."
        : "The connection was lost while the answer came.",
    );
  }
  if (!ended) throw new Failure("The connection ended before the answer was complete.");
}

/** Fills in which model answers, and whose drafts it checks; again after two seconds while the model loads. */
export async function loadModels() {
  try {
    const response = await call("v1/models");
    if (response.status === 503) setTimeout(loadModels, 2000);
    if (!response.ok) throw await refusal(response);
    const models = (await response.json()).data, names = models.map((model) => model.id);
    $("model").replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
    $("model").hidden = names.length < 2;
    $("server").textContent = names.length < 2 ? names.join() : "";
    offerDrafters(models[0]?.drafters ?? []);
    const drafter = models[0]?.drafter, mocked = models[0]?.lossless === false;
    $("mocked").textContent = !mocked ? "" : `lossless: false. Acceptance is mocked (${models[0].mocked}): `
      + "how fast answers come is real, what they say means nothing.";
    $("promise").hidden = mocked;
    const word = drafter?.includes(",") ? "drafters" : "drafter";
    $("drafter").textContent = !drafter ? "" : drafter === "none" ? "no drafter" : `${word} ${drafter}`;
  } catch (error) {
    $("server").textContent = error instanceof Failure ? error.message : "No server answers here.";
    $("drafter").textContent = "";
  }
}

/** Lets the reader choose where several drafters are loaded; one chosen before stays chosen while it is there. */
function offerDrafters(names) {
  const chosen = $("whose").value;
  const options = names.map((name) => make("option", { value: name, text: name }));
  $("whose").replaceChildren(make("option", { value: "", text: "chosen by the server" }), ...options);
  $("whose").value = names.includes(chosen) ? chosen : "";
  $("whose-field").hidden = names.length < 2;
}

/** A request with what stands under Settings. */
export function request(messages) {
  const system = $("system").value.trim();
  const speculate = $("speculate").value;
  return {
    ...($("model").value && { model: $("model").value }),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    max_tokens: Number($("limit").value),
    ...($("seed").value !== "" && { seed: Number($("seed").value) }),
    speculate: Number(speculate) || speculate,
    stream: true, stream_options: { include_usage: true }, paceline_timings: true, return_metrics: true,
  };
}
