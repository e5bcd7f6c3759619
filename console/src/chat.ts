// One chat request: its body out of the settings and the conversation, and its answer as it streams in.
import { ApiError, eventsOf, getJson, request } from "./api";
import type { RequestDetail } from "./types";

export interface Settings {
  system: string;
  temperature: string;
  topP: string;
  maxTokens: string;
  seed: string;
  thinking: "" | "none" | "medium";
  tools: string;
  toolChoice: string;
  schema: string;
  logprobs: boolean;
}

export const DEFAULTS: Settings = {
  system: "",
  temperature: "",
  topP: "",
  maxTokens: "",
  seed: "",
  thinking: "",
  tools: "",
  toolChoice: "auto",
  schema: "",
  logprobs: false,
};

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  top: { token: string; logprob: number }[];
}

export interface Stats {
  promptTokens?: number;
  cachedTokens?: number;
  completionTokens?: number;
  firstTokenS?: number;
  tokensPerS?: number;
  engine?: string;
  reason?: string;
  requestId?: string;
}

export interface Message {
  role: "user" | "assistant" | "tool";
  content: string;
  thinking?: string;
  toolCalls?: ToolCall[];
  toolCallId?: string;
  logprobs?: TokenLogprob[];
  stats?: Stats;
  finish?: string;
  error?: string;
}

export type Body = Record<string, unknown>;

export class SettingsError extends Error {}

/** Returns the body of a chat. Throws SettingsError, which names the field at fault. */
export function bodyOf(model: string, settings: Settings, messages: Message[]): Body {
  const body: Body = { model, messages: [...system(settings), ...messages.filter((one) => !one.error).map(wire)] };
  number(body, "temperature", settings.temperature);
  number(body, "top_p", settings.topP);
  number(body, "max_tokens", settings.maxTokens);
  number(body, "seed", settings.seed);
  if (settings.thinking) body.reasoning_effort = settings.thinking;
  if (settings.tools.trim()) {
    body.tools = toolsOf(settings.tools);
    if (settings.toolChoice !== "auto") body.tool_choice = settings.toolChoice;
  }
  if (settings.schema.trim()) {
    const schema = json("JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs) {
    body.logprobs = true;
    body.top_logprobs = 5;
  }
  return body;
}

function system(settings: Settings): Body[] {
  return settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
}

function wire(message: Message): Body {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  if (!message.toolCalls?.length) return { role: message.role, content: message.content };
  const calls = message.toolCalls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role: "assistant", content: message.content || null, tool_calls: calls };
}

/** Accepts a list of tools as the API has it, one tool, or bare functions with a name and parameters. */
function toolsOf(text: string): unknown[] {
  const value = json("Tools", text);
  const list = Array.isArray(value) ? value : [value];
  return list.map((tool) => {
    if (typeof tool !== "object" || tool === null) throw new SettingsError("Tools: each must be a JSON object");
    return "function" in tool ? tool : { type: "function", function: tool };
  });
}

function json(what: string, text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingsError(`${what}: this is no JSON: ${(error as Error).message}`);
  }
}

function number(body: Body, name: string, text: string): void {
  if (!text.trim()) return;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingsError(`${name}: ${text} is no number`);
  body[name] = value;
}

const MAX_TOOL_CALLS = 128;
const UPDATE_EVERY_MS = 30;

/** Passes on the latest of many updates, at most one in `UPDATE_EVERY_MS`: a page need not be drawn for every token. */
function paced(update: (message: Message) => void) {
  let timer = 0;
  let latest: Message;
  return {
    update(message: Message) {
      latest = message;
      timer ||= window.setTimeout(() => {
        timer = 0;
        update({ ...latest });
      }, UPDATE_EVERY_MS);
    },
    end(message: Message) {
      clearTimeout(timer);
      update({ ...message });
    },
  };
}

/**
 * Streams an answer; calls `onUpdate` with the message so far. Returns when it is whole, stopped, or broken.
 *
 * With `explains`, it looks up afterwards which engine answered and why.
 */
export async function answer(
  body: Body,
  engine: string,
  explains: boolean,
  signal: AbortSignal,
  onUpdate: (message: Message) => void,
): Promise<void> {
  const message: Message = { role: "assistant", content: "", stats: {} };
  const shown = paced(onUpdate);
  const began = performance.now();
  let lastToken = began;
  let pieces = 0;
  let isWhole = false;
  try {
    const response = await request("/v1/chat/completions", {
      method: "POST",
      signal,
      headers: engine ? { "x-mini-infer-engine": engine } : {},
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    });
    message.stats!.requestId = response.headers.get("x-request-id") ?? undefined;
    for await (const event of eventsOf(response)) {
      if (event.data === "[DONE]") {
        isWhole = true;
        break;
      }
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new ApiError(chunk.error.code ?? 0, chunk.error.message ?? "the stream broke");
      const choice = chunk.choices?.[0];
      if (choice && take(message, choice)) {
        lastToken = performance.now();
        pieces += 1;
        message.stats!.firstTokenS ??= (lastToken - began) / 1000;
      }
      if (chunk.usage) takeUsage(message.stats!, chunk.usage);
      shown.update(message);
    }
    if (!isWhole) throw new Error("the connection ended before the answer did");
  } catch (error) {
    if (!signal.aborted) message.error = (error as Error).message;
    else message.finish = "stopped";
  }
  const tokens = message.stats!.completionTokens ?? pieces;
  const tookS = (lastToken - began) / 1000 - (message.stats!.firstTokenS ?? 0);
  if (tokens > 1 && tookS > 0) message.stats!.tokensPerS = (tokens - 1) / tookS;
  shown.end(message);
  if (explains && message.stats!.requestId) await explain(message, onUpdate);
}

/** Adds a chunk's choice to the message. Returns true if it has a part of the answer. */
function take(message: Message, choice: any): boolean {
  const delta = choice.delta ?? {};
  const thought: string = delta.reasoning ?? delta.reasoning_content ?? "";
  if (thought) message.thinking = (message.thinking ?? "") + thought;
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    message.toolCalls = [...(message.toolCalls ?? [])];
    const at = call.index ?? message.toolCalls.length;
    if (!(at <= message.toolCalls.length && at < MAX_TOOL_CALLS)) continue;
    const known = message.toolCalls[at] ?? { id: "", name: "", arguments: "" };
    message.toolCalls[at] = {
      id: call.id ?? known.id,
      name: call.function?.name ?? known.name,
      arguments: known.arguments + (call.function?.arguments ?? ""),
    };
  }
  const logprobs = choice.logprobs?.content ?? [];
  if (logprobs.length) {
    const tokens = logprobs.map((one: any) => ({ token: one.token, logprob: one.logprob, top: one.top_logprobs ?? [] }));
    message.logprobs = [...(message.logprobs ?? []), ...tokens];
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}

function takeUsage(stats: Stats, usage: any): void {
  stats.promptTokens = usage.prompt_tokens;
  stats.completionTokens = usage.completion_tokens;
  stats.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
}

/** Looks up which engine answered and why, where this key may know. */
async function explain(message: Message, update: (message: Message) => void): Promise<void> {
  try {
    const { request: row } = await getJson<RequestDetail>(`/console/api/requests/${message.stats!.requestId}`);
    const { engine, reason } = row;
    update({ ...message, stats: { ...message.stats, engine, reason, cachedTokens: message.stats!.cachedTokens ?? row.cached_tokens } });
  } catch {
    // It is already forgotten, or another replica has it: the answer is there without it.
  }
}
