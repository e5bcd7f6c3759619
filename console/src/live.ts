// Follows the gateway's event stream: the fleet every few seconds, and requests as they end.
import { useEffect, useState } from "preact/hooks";
import { eventsOf, isRefusal, request } from "./api";
import type { Fleet, RequestRow, Sample } from "./types";

const MOST_REQUESTS = 1000;
const MOST_SAMPLES = 150;
const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15000;

export interface Live {
  fleet: Fleet | null;
  requests: RequestRow[];
  connected: boolean;
  error: string;
}

const NOTHING: Live = { fleet: null, requests: [], connected: false, error: "" };

/** `onRefused` is called when the key is no longer valid, and `onAgain` before each connection but the first. */
export function useLive(onRefused: () => void, onAgain: () => void): Live {
  const [live, setLive] = useState<Live>(NOTHING);
  useEffect(() => {
    const abort = new AbortController();
    void follow(abort.signal, setLive, onRefused, onAgain);
    return () => abort.abort();
  }, []);
  return live;
}

type Update = (change: (live: Live) => Live) => void;

async function follow(signal: AbortSignal, update: Update, onRefused: () => void, onAgain: () => void): Promise<void> {
  let pauseMs = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      const response = await request("/console/api/events", { signal });
      let first = true;
      for await (const event of eventsOf(response)) {
        pauseMs = FIRST_PAUSE_MS;
        if (event.name === "fleet") {
          const fleet = JSON.parse(event.data) as Fleet;
          const isFirst = first;
          first = false;
          update((live) => ({
            ...live,
            requests: isFirst ? [] : live.requests,
            fleet: isFirst ? fleet : grown(live.fleet, fleet),
            connected: true,
            error: "",
          }));
        } else if (event.name === "requests") {
          const rows = JSON.parse(event.data) as RequestRow[];
          update((live) => ({ ...live, requests: [...rows, ...live.requests].slice(0, MOST_REQUESTS) }));
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (isRefusal(error)) return onRefused();
      update((live) => ({ ...live, error: String((error as Error).message) }));
    }
    update((live) => ({ ...live, connected: false }));
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2);
    if (!signal.aborted) onAgain();
  }
}

/** Appends the newest samples to the series that this page has. */
function grown(before: Fleet | null, fleet: Fleet): Fleet {
  const histories = new Map<string, Sample[]>(before?.engines.map((engine) => [engine.name, engine.history]));
  const engines = fleet.engines.map((engine) => ({
    ...engine,
    history: [...(histories.get(engine.name) ?? []), ...(engine.now ? [engine.now] : [])].slice(-MOST_SAMPLES),
  }));
  return { ...fleet, engines };
}
