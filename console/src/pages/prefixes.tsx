import { useEffect, useState } from "preact/hooks";
import { getJson, postJson } from "../api";
import { age, count, why } from "../format";
import type { Live } from "../live";
import { Table } from "../table";
import type { Explained, PrefixMap, Session } from "../types";

const REFRESH_MS = 5000;
const SCORERS: Record<string, string> = {
  cached_prefix: "Cached prefix",
  queue_wait: "Queue wait",
  decode_slots: "Decode slots",
  cache_room: "Cache room",
};
const FILTERS: Record<string, string> = {
  ready: "not ready",
  role: "computes prompts for others",
  not_attempted: "has failed this request",
  circuit_closed: "its circuit is open",
};

export function PrefixPage({ session, live }: { session: Session; live: Live }) {
  return (
    <>
      <h1>Prefix map</h1>
      <Explain models={modelsOf(live)} />
      {session.everything ? <Map /> : <p class="hint">Which prefixes engines hold tells of other keys' prompts: an administrator's key shows it.</p>}
    </>
  );
}

function modelsOf(live: Live): string[] {
  return [...new Set(live.fleet?.services.flatMap((service) => (service.models.length ? service.models : [service.name])))].sort();
}

function Explain({ models }: { models: string[] }) {
  const [chosen, setChosen] = useState("");
  const [text, setText] = useState("");
  const [told, setTold] = useState<Explained | null>(null);
  const [problem, setProblem] = useState("");
  const model = models.includes(chosen) ? chosen : (models[0] ?? "");
  async function explain(event: Event) {
    event.preventDefault();
    try {
      setTold(await postJson<Explained>("/console/api/explain", { model, ...prompt(text) }));
      setProblem("");
    } catch (error) {
      setTold(null);
      setProblem((error as Error).message);
    }
  }
  return (
    <section class="card">
      <h2>Where would a prompt go?</h2>
      <form class="explain" onSubmit={(event) => void explain(event)}>
        <label>
          Model{" "}
          <select value={model} onChange={(event) => setChosen(event.currentTarget.value)}>
            {models.map((name) => (
              <option key={name}>{name}</option>
            ))}
            {!models.length && <option value="">there is none yet</option>}
          </select>
        </label>
        <label>
          Prompt: a message, or the JSON body of a chat
          <textarea rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        <button type="submit" class="primary" disabled={!text.trim() || !model}>
          Explain
        </button>
      </form>
      <p class="hint">Nothing is sent to an engine. Prefixes are looked up with your own key, since caches of keys are apart.</p>
      {problem && (
        <p class="error" role="alert">
          {problem}
        </p>
      )}
      {told && <Told told={told} />}
    </section>
  );
}

/** A body with messages or a prompt stays what it is; any other text is a user's message. */
function prompt(text: string): object {
  try {
    const body = JSON.parse(text);
    if (typeof body === "object" && body && ("messages" in body || "prompt" in body)) return body;
  } catch {
    // It is a message.
  }
  return { messages: [{ role: "user", content: text }] };
}

function Told({ told }: { told: Explained }) {
  const scorers = [...new Set(told.engines.flatMap((engine) => Object.keys(engine.scores)))];
  const chosen = told.chosen[0];
  return (
    <div class="told" role="status">
      <p>
        <strong>{count(told.cached_tokens)}</strong> of <strong>{count(told.prompt_tokens)}</strong> prompt tokens are cached
        {told.exact ? "" : " (the number of tokens is estimated: no tokenizer is known here)"}
        {chosen && (
          <>
            {" "}
            where it would go: <strong>{told.chosen.join(" or ")}</strong>, since {why(told.reason)}.
          </>
        )}
        {told.prefill && ` Its prompt would be computed by ${told.prefill} (${told.prefill_reason}).`}
      </p>
      {told.engines.length > 0 && (
        <Table
          label="Scores of engines"
          caption="Every engine's weighted scores; the highest total wins"
          columns={["Engine", "Cached", "Shared", "Queued tokens", ...scorers.map((name) => SCORERS[name] ?? name), "Total", "Behind the best"]}
        >
          {told.engines.map((engine) =>
            engine.filtered_by ? (
              <tr key={engine.engine}>
                <th scope="row">{engine.engine}</th>
                <td colSpan={5 + scorers.length}>left out: {FILTERS[engine.filtered_by] ?? engine.filtered_by}</td>
              </tr>
            ) : (
              <tr key={engine.engine} class={told.chosen.includes(engine.engine) ? "best" : ""}>
                <th scope="row">{engine.engine}</th>
                <td>{cachedByTier(engine.cached_tokens, engine.facts)}</td>
                <td>{count(engine.facts.shared_tokens ?? 0)}</td>
                <td>{count(engine.facts.queued_tokens ?? 0)}</td>
                {scorers.map((name) => (
                  <td key={name}>{(engine.scores[name] ?? 0).toFixed(6)}</td>
                ))}
                <td>{engine.total.toFixed(6)}</td>
                <td>{engine.behind_s ? `${(1000 * engine.behind_s).toFixed(1)} ms` : "best"}</td>
              </tr>
            ),
          )}
        </Table>
      )}
    </div>
  );
}

function cachedByTier(tokens: number, facts: Record<string, number>): string {
  const slower = [
    facts.host_tokens ? `${count(facts.host_tokens)} in main memory` : "",
    facts.disk_tokens ? `${count(facts.disk_tokens)} on disk` : "",
  ].filter(Boolean);
  return slower.length ? `${count(tokens)} (${slower.join(", ")})` : count(tokens);
}

function Map() {
  const [map, setMap] = useState<PrefixMap | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let stopped = false;
    async function refresh() {
      try {
        const found = await getJson<PrefixMap>("/console/api/prefixes");
        if (!stopped) setMap(found);
        setProblem("");
      } catch (error) {
        setProblem((error as Error).message);
      }
    }
    void refresh();
    const timer = setInterval(() => void refresh(), REFRESH_MS);
    return () => {
      stopped = true;
      clearInterval(timer);
    };
  }, []);
  if (problem) return <p class="error">{problem}</p>;
  if (!map) return <p class="hint">Reading the index…</p>;
  const most = Math.max(1, ...map.engines.map((engine) => engine.cached_tokens));
  return (
    <section>
      <h2>What engines have cached</h2>
      <ul class="caches">
        {map.engines.map((engine) => (
          <li key={engine.name}>
            <span>{engine.name}</span>
            <meter min={0} max={most} value={engine.cached_tokens} aria-label={`Cached tokens of ${engine.name}`} />
            <span>
              {count(engine.cached_tokens)} tokens
              {engine.guessed_tokens > 0 && `, ${count(engine.guessed_tokens)} of them expected`} · {count(engine.conversations)} conversations ·{" "}
              known: {engine.index}
            </span>
          </li>
        ))}
      </ul>
      <Table
        label="Prefixes"
        columns={["Prefix", "Grows from", "Tokens", "Conversations", ...map.engines.map((engine) => engine.name)]}
        caption={`Prefixes by the tokens that sharing them saves: ${count(map.shared)} are shared. Each is named by its last block's key; no text is known here.`}
        empty="No block is cached yet: prompts of at least 16 tokens leave some."
      >
        {map.prefixes.map((prefix) => (
          <tr key={prefix.id}>
            <th scope="row">
              <code>{prefix.id}</code>
            </th>
            <td>{prefix.parent ? <code>{prefix.parent}</code> : "–"}</td>
            <td>{count(prefix.tokens)}</td>
            <td>{prefix.conversations}</td>
            {map.engines.map((engine) => {
              const held = prefix.engines[engine.name];
              return <td key={engine.name}>{held ? `${held.conversations}, used ${age(held.age_s)}` : ""}</td>;
            })}
          </tr>
        ))}
      </Table>
    </section>
  );
}
