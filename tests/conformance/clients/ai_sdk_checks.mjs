// Checks of Vercel's AI SDK, over chat completions, Responses and completions.
import { createRequire } from "node:module";
import { assert, report } from "./checking.mjs";

const require = createRequire(process.env.CONFORMANCE_MODULES + "/");
const { embed, generateText, isStepCount, stepCountIs, streamText, tool, Output } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = process.env.CONFORMANCE_URL + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "any" });
const compatible = createOpenAICompatible({ name: "here", baseURL, apiKey: "any", includeUsage: true, supportsStructuredOutputs: true });
const prompt = "What does os.path.join do?";
const weather = tool({
  description: "weather", inputSchema: z.object({ city: z.string().max(20) }), execute: async () => "SUNNY-21",
});
const atMost = (steps) => (isStepCount ?? stepCountIs)(steps);

async function whole(model) {
  const answer = await generateText({ model, prompt, maxOutputTokens: 16, temperature: 0, maxRetries: 0 });
  assert(answer.text && answer.usage.totalTokens > 0, JSON.stringify([answer.text, answer.usage]));
}

async function streamed(model) {
  let text = "", failure = null;
  const answer = streamText({ model, prompt, maxOutputTokens: 16, maxRetries: 0, onError: ({ error }) => { failure = error; } });
  for await (const delta of answer.textStream) text += delta;
  if (failure) throw failure;
  assert(text && (await answer.usage).outputTokens > 0, "text and usage");
  assert(["stop", "length"].includes(await answer.finishReason), await answer.finishReason);
}

async function structured(model) {
  const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
  const answer = await generateText({ model, prompt, output: Output.object({ schema }), maxOutputTokens: 200, maxRetries: 0 });
  assert(schema.safeParse(answer.output).success, JSON.stringify(answer.output));
}

async function withTool(model) {
  const answer = await generateText({ model, prompt: "What is the weather in Paris?", tools: { get_weather: weather }, stopWhen: atMost(3), maxRetries: 0 });
  assert(answer.steps[0].toolCalls[0].input.city === "Paris", JSON.stringify(answer.steps[0].toolCalls));
  assert(answer.text.includes("sunny in Paris"), answer.text);
}

const checks = {
  chat_whole: () => whole(compatible("demo")),
  chat_stream: () => streamed(compatible("demo")),
  chat_object: () => structured(compatible("demo")),
  chat_tools: () => withTool(compatible("scripted")),
  openai_chat_stream: () => streamed(openai.chat("demo")),
  responses_whole: () => whole(openai("demo")),
  responses_stream: () => streamed(openai("demo")),
  responses_object: () => structured(openai("demo")),
  responses_tools: () => withTool(openai("scripted")),
  completions_stream: () => streamed(compatible.completionModel("demo")),
  async embeddings() {
    const answer = await embed({ model: compatible.embeddingModel("demo"), value: "one", maxRetries: 0 });
    assert(answer.embedding.length > 0, "an embedding");
  },
  async unknown_model() {
    const error = await generateText({ model: compatible("gpt-nothing"), prompt, maxRetries: 0 }).then(() => null, (e) => e);
    assert(error?.statusCode === 404 && error.message.includes("gpt-nothing"), String(error));
  },
};

await report(checks);
