// Every endpoint of OpenAI's client for Node that a replica may offer, at the address given.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const sound = new Uint8Array(3000).fill(7);
const messages = [{ role: "user", content: "hello" }];
const image = { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } };
const tools = [{ type: "function", function: { name: "weather", parameters: {} } }];

const chat = (more) => client.chat.completions.create({ model: "gpt-4o", messages, ...more });

const whole = await chat({ n: 2, logprobs: true, top_logprobs: 1 });
assert.equal(whole.choices.length, 2);
assert.equal(whole.choices[0].logprobs.content[0].token, "hi");
assert.equal((await chat({ tools })).choices[0].message.tool_calls[0].function.name, "weather");
const format = { type: "json_schema", json_schema: { name: "city", schema: {} } };
const structured = await chat({ response_format: format });
assert.deepEqual(JSON.parse(structured.choices[0].message.content), { city: "Paris" });
const seen = await chat({ messages: [{ role: "user", content: [image] }] });
assert.equal(seen.choices[0].message.content, "an image");

let said = "";
let usage = null;
for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
  said += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.deepEqual([said, usage.total_tokens], ["hi", 11]);

const completion = await client.completions.create({ model: "large", prompt: "hello", n: 2 });
assert.equal(completion.choices[1].text, "hi");

const response = await client.responses.create({ model: "large", input: "hello" });
assert.equal(response.output_text, "hi");
const kinds = [];
for await (const event of await client.responses.create({ model: "large", input: "x", stream: true }))
  kinds.push(event.type);
assert.equal(kinds.at(-1), "response.completed");
assert.equal((await client.responses.retrieve("resp_1")).id, "resp_1");
assert.equal((await client.responses.cancel("resp_1")).status, "cancelled");

const embedded = await client.embeddings.create({
  model: "embedder", input: "hello", encoding_format: "float",
});
assert.deepEqual(embedded.data[0].embedding, [0.5, -0.25]);

// The file first, the model after it.
const file = await toFile(sound, "f.wav");
const heard = await client.audio.transcriptions.create({ file, model: "whisper" });
assert.equal(heard.text, "heard 3000 bytes");
const translated = await client.audio.translations.create({ file, model: "whisper" });
assert.equal(translated.text, "translated");
const speech = await client.audio.speech.create({ model: "whisper", input: "x", voice: "alloy" });
assert.equal((await speech.arrayBuffer()).byteLength, 256 * 40);
const drawn = await client.images.generate({ model: "large", prompt: "x" });
assert.equal(drawn.data[0].b64_json, "AAAA");

const stored = await client.files.create({ file, purpose: "batch" });
assert.equal((await client.files.retrieve(stored.id)).id, "file-1");
assert.equal((await (await client.files.content(stored.id)).arrayBuffer()).byteLength, 256 * 40);
assert.equal((await client.files.list()).data.length, 1);
const batch = await client.batches.create({
  input_file_id: stored.id, endpoint: "/v1/chat/completions", completion_window: "24h",
});
assert.equal((await client.batches.retrieve(batch.id)).id, "batch_1");
assert.equal((await client.batches.cancel(batch.id)).status, "cancelling");
assert.equal((await client.files.delete(stored.id)).deleted, true);

const names = (await client.models.list()).data.map((each) => each.id).sort();
assert.deepEqual(names, ["embedder", "gpt-4o", "large", "whisper"]);
assert.equal((await client.models.retrieve("large")).id, "large");

await assert.rejects(client.embeddings.create({ model: "none", input: "x" }), (error) => {
  assert.equal(error.status, 404);
  assert.equal(error.code, "model_not_found");
  return true;
});
await assert.rejects(chat({ temperature: 3 }), OpenAI.BadRequestError);
