// Checks of openai-node.
import { createRequire } from "node:module";
import { assert, report } from "./checking.mjs";

const require = createRequire(process.env.CONFORMANCE_MODULES + "/");
const OpenAI = require("openai").default;
const { zodResponseFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");

const client = new OpenAI({ baseURL: process.env.CONFORMANCE_URL + "/v1", apiKey: "any", maxRetries: 0, timeout: 60000 });
const messages = [{ role: "user", content: "What does os.path.join do?" }];
const askParis = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false };

const checks = {
  async chat_whole() {
    const answer = await client.chat.completions.create({ model: "demo", messages, max_tokens: 16 });
    assert(answer.choices[0].message.content && answer.usage.total_tokens > 0, "content and usage");
  },
  async chat_stream() {
    let text = "", finish = null;
    for await (const chunk of await client.chat.completions.create({ model: "demo", messages, max_tokens: 16, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
    }
    assert(text && ["stop", "length"].includes(finish), "text and finish_reason");
  },
  async parse_zod() {
    const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
    const answer = await client.chat.completions.parse({ model: "demo", messages, max_tokens: 200, response_format: zodResponseFormat(Person, "person") });
    const parsed = answer.choices[0].message.parsed;
    assert(typeof parsed.name === "string" && Number.isInteger(parsed.age), JSON.stringify(parsed));
  },
  async run_tools() {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model: "scripted", messages: askParis,
      tools: [{ type: "function", function: { name: "get_weather", description: "weather", parameters, parse: JSON.parse,
        function: ({ city }) => { asked.push(city); return "SUNNY-21"; } } }],
    });
    const last = await runner.finalContent();
    assert(asked.join() === "Paris" && last.includes("sunny"), `${asked} ${last}`);
  },
  async run_tools_stream() {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model: "scripted", messages: askParis, stream: true,
      tools: [zodFunction({ name: "get_weather", parameters: z.object({ city: z.string() }), function: ({ city }) => { asked.push(city); return "SUNNY-21"; } })],
    });
    const last = await runner.finalContent();
    assert(asked.join() === "Paris" && last.includes("sunny"), `${asked} ${last}`);
  },
  async responses_stream() {
    const kinds = [];
    for await (const event of await client.responses.create({ model: "demo", input: "What does os.path.join do?", max_output_tokens: 16, stream: true }))
      kinds.push(event.type);
    assert(kinds[0] === "response.created" && /completed|incomplete/.test(kinds.at(-1)), kinds.join());
  },
  async responses_parse() {
    const { zodTextFormat } = require("openai/helpers/zod");
    const City = z.object({ city: z.string().max(20) });
    const answer = await client.responses.parse({ model: "demo", input: "a city", max_output_tokens: 120, text: { format: zodTextFormat(City, "city") } });
    assert(typeof answer.output_parsed.city === "string", JSON.stringify(answer.output_parsed));
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: "demo", input: "one" });
    assert(answer.data[0].embedding.length > 0, "an embedding");
  },
  async unknown_model() {
    const error = await client.chat.completions.create({ model: "gpt-nothing", messages }).then(() => null, (e) => e);
    assert(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", String(error));
  },
  async abort() {
    const stream = await client.chat.completions.create({ model: "demo", messages, stream: true, max_tokens: 2000, ignore_eos: true });
    for await (const _ of stream) { stream.controller.abort(); break; }
    const answer = await client.chat.completions.create({ model: "demo", messages, max_tokens: 4 });
    assert(answer.choices.length === 1, "the next request is answered");
  },
};

await report(checks);
