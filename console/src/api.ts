// Talks to the gateway. The key lives in sessionStorage: it goes with the tab, and no other page reads it.
import { load, save } from "./storage";

const KEY = "mini-infer-key";
let key = load("sessionStorage", KEY) ?? "";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export function storedKey(): string {
  return key;
}

export function storeKey(given: string): void {
  key = given;
  save("sessionStorage", KEY, given);
}

/** True for an error by which the gateway refuses the key. */
export function isRefusal(error: unknown): boolean {
  return error instanceof ApiError && error.status === 401;
}

export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (init.body) headers.set("content-type", "application/json");
  const response = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

async function messageOf(response: Response): Promise<string> {
  try {
    return String((await response.json()).error.message);
  } catch {
    return `the server answered ${response.status}`;
  }
}

export async function getJson<T>(path: string): Promise<T> {
  return (await request(path)).json() as Promise<T>;
}

export async function postJson<T>(path: string, body: unknown): Promise<T> {
  return (await request(path, { method: "POST", body: JSON.stringify(body) })).json() as Promise<T>;
}

export interface ServerEvent {
  name: string;
  data: string;
}

/** Yields the server-sent events of a response. `fetch` is used because EventSource cannot send a key. */
export async function* eventsOf(response: Response): AsyncGenerator<ServerEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
      rest = parts.pop()!;
      for (const part of parts) {
        const lines = part.split("\n");
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        const name = lines.find((line) => line.startsWith("event:"))?.slice(6).trim() ?? "message";
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
