// The playground's chats in the browser: this tab's own, else those that any tab saved last.
import { DEFAULTS, type Message, type Settings } from "./chat";
import { load, save } from "./storage";

export interface Column {
  model: string;
  /** The only engine that may answer; "" leaves the choice to the gateway. */
  engine: string;
  messages: Message[];
}

export interface Conversations {
  settings: Settings;
  columns: Column[];
}

export const EMPTY: Column = { model: "", engine: "", messages: [] };
const NAME = "mini-infer-playground";
const ROLES = new Set(["user", "assistant", "tool"]);

/** Chats of keys with different names are apart. */
function nameOf(key: string): string {
  return key ? `${NAME}-${key}` : NAME;
}

export function loadConversations(key: string): Conversations {
  const text = load("sessionStorage", nameOf(key)) ?? load("localStorage", nameOf(key));
  try {
    return conversationsOf(JSON.parse(text ?? ""));
  } catch {
    return { settings: DEFAULTS, columns: [EMPTY] };
  }
}

/** Saves for this tab and for new ones; null forgets. Returns false if the browser's storage holds no more. */
export function saveConversations(key: string, now: Conversations | null): boolean {
  const name = nameOf(key);
  const saved = (text: string) => save("sessionStorage", name, text) && save("localStorage", name, text);
  if (!now) return saved("");
  return saved(JSON.stringify(now)) || saved(JSON.stringify(now, (field, value) => (field === "logprobs" ? undefined : value)));
}

/** Reads what was stored, which other versions and other programs may have written. */
function conversationsOf(found: any): Conversations {
  const settings = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS) as (keyof Settings)[]) {
    const value = found.settings?.[name];
    if (typeof value === typeof DEFAULTS[name]) settings[name] = value as never;
  }
  const columns = (found.columns as any[]).slice(0, 2).map((column) => ({
    model: textOf(column.model),
    engine: textOf(column.engine),
    messages: (column.messages as any[]).flatMap(messageOf),
  }));
  return { settings, columns: columns.length ? columns : [EMPTY] };
}

function messageOf(found: any): Message[] {
  if (!ROLES.has(found?.role)) return [];
  const message: Message = { ...found, content: textOf(found.content) };
  for (const name of ["thinking", "finish", "error", "toolCallId"] as const) {
    if (typeof message[name] !== "string") delete message[name];
  }
  for (const name of ["toolCalls", "logprobs"] as const) if (!Array.isArray(message[name])) delete message[name];
  if (typeof message.stats !== "object") delete message.stats;
  // The page was closed while the answer came.
  if (message.role === "assistant" && !message.finish && !message.error) message.finish = "interrupted";
  return [message];
}

function textOf(value: unknown): string {
  return typeof value === "string" ? value : "";
}
