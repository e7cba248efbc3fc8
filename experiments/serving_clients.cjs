// OpenAI's client for Node, unmodified: one streamed answer with its usage, twice the same, and an error in OpenAI's shape.
//   NODE_PATH=FOLDER/node_modules node experiments/serving_clients.cjs URL MODEL
const assert = require("node:assert/strict");
const { OpenAI, NotFoundError } = require("openai");

async function main(url, model) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.PACELINE_API_KEY ?? "none", maxRetries: 0 });
  const request = {
    model,
    messages: [{ role: "user", content: "Why is the sky blue?" }],
    max_tokens: 24,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  };
  const ask = async () => {
    const answer = { text: "", reasons: [], usages: [], chunks: 0 };
    for await (const chunk of await client.chat.completions.create(request)) {
      answer.chunks += 1;
      for (const choice of chunk.choices) {
        answer.text += choice.delta.content ?? "";
        if (choice.finish_reason) answer.reasons.push(choice.finish_reason);
      }
      if (chunk.usage) answer.usages.push(chunk.usage);
    }
    return answer;
  };
  const [first, second] = [await ask(), await ask()];
  console.log(JSON.stringify(first));
  assert.ok(first.text.length > 0, "there was no text");
  assert.equal(first.text, second.text, "a greedy answer changed");
  assert.ok(["stop", "length"].includes(first.reasons[0]) && first.reasons.length === 1, "one finish reason was due");
  assert.equal(first.usages.length, 1, "one usage was due");
  const { prompt_tokens, completion_tokens, total_tokens } = first.usages[0];
  assert.ok(completion_tokens > 0 && completion_tokens <= request.max_tokens, "completion_tokens is wrong");
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
  await assert.rejects(client.chat.completions.create({ ...request, model: "no such model" }), NotFoundError);
}

main(process.argv[2], process.argv[3]).catch((error) => {
  console.error(error);
  process.exit(1);
});
