import { useEffect, useRef, useState } from "preact/hooks";
import { getJson } from "../api";
import { answer, bodyOf, SettingsError, type Body, type Message } from "../chat";
import { loadConversations, saveConversations, type Column } from "../conversations";
import { CopyAs } from "../copyas";
import type { Live } from "../live";
import { Messages } from "../messages";
import { SettingsForm } from "../settings";
import type { Model, Session } from "../types";

const EXAMPLES = ["What does textwrap.dedent do?", "What does json.dumps do?", "What is itertools.batched for?"];
const SAVE_AFTER_MS = 500;

export function Playground({ session, live }: { session: Session; live: Live }) {
  const [{ settings, columns }, setChats] = useState(() => loadConversations(session.key));
  const [models, setModels] = useState<Model[]>([]);
  const [draft, setDraft] = useState("");
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState<boolean[]>([false, false]);
  const [answers, setAnswers] = useState(0);
  const [fits, setFits] = useState(true);
  const aborts = useRef<(AbortController | null)[]>([null, null]);
  const latest = useRef({ settings, columns });
  latest.current = { settings, columns };
  const services = JSON.stringify(live.fleet?.services.map((service) => [service.models, service.engines]));

  useEffect(() => {
    getJson<{ data: Model[] }>("/v1/models").then(
      (list) => setModels(list.data),
      (error: Error) => setProblem(error.message),
    );
  }, [services]);
  useEffect(() => {
    const timer = setTimeout(() => setFits(saveConversations(session.key, { settings, columns })), SAVE_AFTER_MS);
    return () => clearTimeout(timer);
  }, [settings, columns]);
  useEffect(() => {
    const saveNow = () => void saveConversations(session.key, latest.current);
    addEventListener("pagehide", saveNow);
    return () => {
      removeEventListener("pagehide", saveNow);
      stop();
      saveNow();
    };
  }, []);

  const busy = running.some(Boolean);
  const modelOf = (column: Column) => (models.some((one) => one.id === column.model) ? column.model : (models[0]?.id ?? ""));
  const engineOf = (column: Column) => (session.everything ? column.engine : "");

  function setColumns(change: (all: Column[]) => Column[]) {
    setChats((now) => ({ ...now, columns: change(now.columns) }));
  }

  function change(at: number, part: Partial<Column>) {
    setColumns((all) => all.map((column, index) => (index === at ? { ...column, ...part } : column)));
  }

  /** Returns the body of a column's chat; null, and the reason is shown, if the settings are wrong. */
  function bodyFor(column: Column, messages: Message[]): Body | null {
    try {
      const body = bodyOf(modelOf(column), settings, messages);
      setProblem("");
      return body;
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      setProblem(error.message);
      return null;
    }
  }

  async function run(at: number, messages: Message[]) {
    const column = columns[at]!;
    const body = bodyFor(column, messages);
    if (!body || aborts.current[at]) return;
    const abort = (aborts.current[at] = new AbortController());
    setRunning((all) => all.map((value, index) => value || index === at));
    const update = (message: Message) => change(at, { messages: [...messages, message] });
    update({ role: "assistant", content: "" });
    await answer(body, engineOf(column), session.sees_requests, abort.signal, update);
    aborts.current[at] = null;
    setRunning((all) => all.map((value, index) => value && index !== at));
    setAnswers((number) => number + 1);
  }

  function ask(event?: Event) {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || !models.length || aborts.current.some(Boolean)) return;
    const asked = columns.map((column): Message[] => [...column.messages, { role: "user", content: text }]);
    if (!columns.every((column, at) => bodyFor(column, asked[at]!))) return;
    setDraft("");
    asked.forEach((messages, at) => void run(at, messages));
  }

  function stop() {
    aborts.current.forEach((abort) => abort?.abort());
  }

  function compare(on: boolean) {
    setColumns((all) => (on ? [all[0]!, { ...all[0]!, messages: [] }] : [all[0]!]));
  }

  function present(): Body {
    const [column] = columns;
    const asked: Message[] = draft.trim() ? [{ role: "user", content: draft.trim() }] : [];
    return bodyOf(modelOf(column!), settings, [...column!.messages, ...asked]);
  }

  return (
    <div class="playground">
      <h1 class="visually-hidden">Playground</h1>
      <SettingsForm
        settings={settings}
        onChange={(part) => setChats((now) => ({ ...now, settings: { ...now.settings, ...part } }))}
      />
      <div class="talk" data-answers={answers}>
        <div class="toolbar">
          <button type="button" onClick={() => setColumns((all) => all.map((one) => ({ ...one, messages: [] })))} disabled={busy}>
            New chat
          </button>
          <label class="check">
            <input type="checkbox" checked={columns.length > 1} disabled={busy} onChange={(event) => compare(event.currentTarget.checked)} />
            Side by side
          </label>
          <CopyAs body={present} engine={engineOf(columns[0]!)} needsKey={session.needs_key} onProblem={setProblem} />
        </div>
        <div class={columns.length > 1 ? "columns two" : "columns"}>
          {columns.map((column, at) => (
            <section key={at} class="column" aria-label={columns.length > 1 ? `Chat ${at + 1}` : "Chat"}>
              <div class="toolbar">
                <label>
                  Model{" "}
                  <select value={modelOf(column)} onChange={(event) => change(at, { model: event.currentTarget.value, engine: "" })}>
                    {models.map((model) => (
                      <option key={model.id}>{model.id}</option>
                    ))}
                    {!models.length && <option value="">none is ready yet</option>}
                  </select>
                </label>
                {session.everything && (
                  <label>
                    Engine{" "}
                    <select value={column.engine} onChange={(event) => change(at, { engine: event.currentTarget.value })}>
                      <option value="">the gateway chooses</option>
                      {enginesOf(live, modelOf(column), column.engine).map((name) => (
                        <option key={name}>{name}</option>
                      ))}
                    </select>
                  </label>
                )}
              </div>
              <Messages
                messages={column.messages}
                running={running[at]!}
                links={session.sees_requests}
                onRun={(messages) => void run(at, messages)}
              />
              {!column.messages.length && (
                <div class="examples">
                  <p class="hint">Ask something, for example:</p>
                  {EXAMPLES.map((text) => (
                    <button type="button" key={text} onClick={() => setDraft(text)}>
                      {text}
                    </button>
                  ))}
                </div>
              )}
            </section>
          ))}
        </div>
        {problem && (
          <p class="error" role="alert">
            {problem}
          </p>
        )}
        {!fits && (
          <p class="hint" role="status">
            This chat is longer than the browser stores: it goes when you close the page.
          </p>
        )}
        <form class="ask" onSubmit={ask}>
          <label class="visually-hidden" for="draft">
            Message
          </label>
          <textarea
            id="draft"
            rows={2}
            placeholder="Message (Enter sends, Shift+Enter makes a line)"
            value={draft}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
            }}
          />
          {busy ? (
            <button type="button" class="primary" onClick={stop}>
              Stop
            </button>
          ) : (
            <button type="submit" class="primary" disabled={!draft.trim() || !models.length}>
              Send
            </button>
          )}
        </form>
      </div>
    </div>
  );
}

/** The engines that may answer for a model, and the chosen one also when it has gone. */
function enginesOf(live: Live, model: string, chosen: string): string[] {
  const engines = live.fleet?.engines.filter((engine) => engine.model === model && engine.role !== "prefill") ?? [];
  const names = engines.map((engine) => engine.name);
  return chosen && !names.includes(chosen) ? [...names, chosen] : names;
}
