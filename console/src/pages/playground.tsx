import { useEffect, useRef, useState } from "preact/hooks";
import { getJson } from "../api";
import { answer, bodyOf, DEFAULTS, SettingsError, type Message, type Settings, type Stats, type TokenLogprob } from "../chat";
import { copyText } from "../clipboard";
import { count, seconds, why } from "../format";
import type { Live } from "../live";
import { Code, Markdown } from "../markdown";
import { snippet, type Language } from "../snippets";
import type { Model, Session } from "../types";

const STORED = "mini-infer-playground";
const EXAMPLES = ["What does textwrap.dedent do?", "What does json.dumps do?", "What is itertools.batched for?"];

interface Column {
  model: string;
  /** The only engine that may answer; "" leaves the choice to the gateway. */
  engine: string;
  messages: Message[];
}

interface Stored {
  settings: Settings;
  columns: Column[];
}

const EMPTY: Column = { model: "", engine: "", messages: [] };

function stored(): Stored {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? "") as Stored;
    return { settings: { ...DEFAULTS, ...found.settings }, columns: found.columns.slice(0, 2) };
  } catch {
    return { settings: DEFAULTS, columns: [EMPTY] };
  }
}

export function Playground({ session, live }: { session: Session; live: Live }) {
  const [settings, setSettings] = useState<Settings>(() => stored().settings);
  const [columns, setColumns] = useState<Column[]>(() => stored().columns);
  const [models, setModels] = useState<Model[]>([]);
  const [draft, setDraft] = useState("");
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState<boolean[]>([false, false]);
  const [answers, setAnswers] = useState(0);
  const aborts = useRef<(AbortController | null)[]>([null, null]);
  const services = JSON.stringify(live.fleet?.services.map((service) => [service.models, service.engines]));

  useEffect(() => {
    getJson<{ data: Model[] }>("/v1/models").then(
      (list) => setModels(list.data),
      (error: Error) => setProblem(error.message),
    );
  }, [services]);
  useEffect(() => {
    try {
      localStorage.setItem(STORED, JSON.stringify({ settings, columns }));
    } catch {
      // A conversation that is too long for the browser's storage goes with the page.
    }
  }, [settings, columns]);

  const busy = running.some(Boolean);
  const modelOf = (column: Column) => (models.some((one) => one.id === column.model) ? column.model : (models[0]?.id ?? ""));

  function change(at: number, part: Partial<Column>) {
    setColumns((all) => all.map((column, index) => (index === at ? { ...column, ...part } : column)));
  }

  async function run(at: number, messages: Message[]) {
    const column = columns[at]!;
    let body;
    try {
      body = bodyOf(modelOf(column), settings, messages);
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      setProblem(error.message);
      return;
    }
    setProblem("");
    const abort = (aborts.current[at] = new AbortController());
    setRunning((all) => all.map((value, index) => value || index === at));
    const update = (message: Message) => change(at, { messages: [...messages, message] });
    update({ role: "assistant", content: "" });
    await answer(body, column.engine, abort.signal, update);
    setRunning((all) => all.map((value, index) => value && index !== at));
    setAnswers((number) => number + 1);
  }

  function ask(event?: Event) {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || busy) return;
    setDraft("");
    columns.forEach((column, at) => void run(at, [...column.messages, { role: "user", content: text }]));
  }

  function stop() {
    aborts.current.forEach((abort) => abort?.abort());
  }

  function compare(on: boolean) {
    setColumns((all) => (on ? [all[0]!, { ...all[0]!, messages: [] }] : [all[0]!]));
  }

  return (
    <div class="playground">
      <h1 class="visually-hidden">Playground</h1>
      <SettingsForm settings={settings} onChange={(part) => setSettings((all) => ({ ...all, ...part }))} />
      <div class="talk" data-answers={answers}>
        <div class="toolbar">
          <button type="button" onClick={() => setColumns((all) => all.map((one) => ({ ...one, messages: [] })))} disabled={busy}>
            New chat
          </button>
          <label class="check">
            <input type="checkbox" checked={columns.length > 1} disabled={busy} onChange={(event) => compare(event.currentTarget.checked)} />
            Side by side
          </label>
          <CopyAs body={() => bodyOf(modelOf(columns[0]!), settings, [...columns[0]!.messages, ...(draft.trim() ? [{ role: "user" as const, content: draft.trim() }] : [])])} session={session} onProblem={setProblem} />
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
                      {live.fleet?.engines
                        .filter((engine) => engine.model === modelOf(column) && engine.role !== "prefill")
                        .map((engine) => <option key={engine.name}>{engine.name}</option>)}
                    </select>
                  </label>
                )}
              </div>
              <Messages
                messages={column.messages}
                running={running[at]!}
                onRun={(messages) => void run(at, messages)}
                session={session}
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

function Messages(props: {
  messages: Message[];
  running: boolean;
  onRun: (messages: Message[]) => void;
  session: Session;
}) {
  const { messages, running, onRun } = props;
  const end = useRef<HTMLDivElement>(null);
  const [editing, setEditing] = useState<number | null>(null);
  useEffect(() => {
    if (messages.length) end.current?.scrollIntoView({ block: "nearest" });
  }, [messages]);
  return (
    <div class="messages" role="log" aria-label="Conversation" aria-busy={running} tabIndex={0}>
      {messages.map((message, at) => {
        const isLast = at === messages.length - 1;
        return (
          <article key={at} class={`message ${message.role}`}>
            <h2 class="who">{message.role === "user" ? "You" : message.role === "tool" ? "Result of the tool" : "Model"}</h2>
            {editing === at ? (
              <Edit
                text={message.content}
                onDone={(text) => {
                  setEditing(null);
                  if (text !== null) onRun([...messages.slice(0, at), { role: "user", content: text }]);
                }}
              />
            ) : (
              <Shown message={message} running={running && isLast} />
            )}
            {message.role === "assistant" && message.stats && <StatsLine stats={message.stats} finish={message.finish} />}
            {!running && editing === null && (
              <div class="actions">
                {message.role === "user" && (
                  <button type="button" class="small" onClick={() => setEditing(at)}>
                    Edit
                  </button>
                )}
                {message.role === "assistant" && isLast && (
                  <button type="button" class="small" onClick={() => onRun(messages.slice(0, at))}>
                    Regenerate
                  </button>
                )}
              </div>
            )}
            {!running && isLast && Boolean(message.toolCalls?.length) && (
              <ToolAnswers message={message} onAnswer={(results) => onRun([...messages, ...results])} />
            )}
          </article>
        );
      })}
      <div ref={end} />
    </div>
  );
}

function Shown({ message, running }: { message: Message; running: boolean }) {
  return (
    <>
      {message.thinking && (
        <details class="thinking" open={running && !message.content}>
          <summary>Thinking</summary>
          <div class="plain">{message.thinking}</div>
        </details>
      )}
      {message.logprobs?.length ? (
        <Logprobs tokens={message.logprobs} />
      ) : message.role === "user" ? (
        <div class="plain">{message.content}</div>
      ) : message.role === "tool" ? (
        <pre tabIndex={0}>{message.content}</pre>
      ) : isJson(message.content) ? (
        <Code text={message.content} language="json" />
      ) : (
        <Markdown text={message.content} />
      )}
      {message.toolCalls?.map((call, at) => (
        <div class="tool-call" key={at}>
          Calls <strong>{call.name}</strong>
          <pre tabIndex={0}>{call.arguments}</pre>
        </div>
      ))}
      {running && (
        <span class="caret" role="status" aria-label="The model is answering">
          ▍
        </span>
      )}
      {message.error && (
        <p class="error" role="alert">
          {message.error}
        </p>
      )}
    </>
  );
}

function isJson(text: string): boolean {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function Logprobs({ tokens }: { tokens: TokenLogprob[] }) {
  return (
    <div class="logprobs plain">
      {tokens.map((one, at) => {
        const others = one.top.map((other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)} %`);
        const level = one.logprob > -0.1 ? "sure" : one.logprob > -1.2 ? "likely" : "unsure";
        return (
          <span key={at} class={`token ${level}`} title={`${(100 * Math.exp(one.logprob)).toFixed(1)} %\n${others.join("\n")}`}>
            {one.token}
          </span>
        );
      })}
    </div>
  );
}

function StatsLine({ stats, finish }: { stats: Stats; finish?: string }) {
  const parts: string[] = [];
  if (stats.promptTokens !== undefined) {
    parts.push(`${count(stats.promptTokens)} prompt tokens, ${count(stats.cachedTokens ?? 0)} cached`);
  }
  if (stats.completionTokens !== undefined) parts.push(`${count(stats.completionTokens)} tokens`);
  if (stats.firstTokenS !== undefined) parts.push(`first after ${seconds(stats.firstTokenS)}`);
  if (stats.tokensPerS !== undefined) parts.push(`${count(stats.tokensPerS)} tokens/s`);
  if (finish && finish !== "stop") parts.push(`ended: ${finish}`);
  return (
    <p class="stats">
      {parts.join(" · ")}
      {stats.engine && (
        <>
          {" · "}
          <span class="engine">{stats.engine}</span>
          {stats.reason && `, since ${why(stats.reason)}`}
        </>
      )}
      {stats.requestId && (
        <>
          {" · "}
          <a href={`#/requests?id=${encodeURIComponent(stats.requestId)}`}>timeline</a>
        </>
      )}
    </p>
  );
}

function Edit({ text, onDone }: { text: string; onDone: (text: string | null) => void }) {
  const [value, setValue] = useState(text);
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => field.current?.focus(), []);
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        onDone(value);
      }}
    >
      <textarea ref={field} aria-label="Edit the message" rows={3} value={value} onInput={(event) => setValue(event.currentTarget.value)} />
      <div class="actions">
        <button type="submit" class="small primary">
          Send again
        </button>
        <button type="button" class="small" onClick={() => onDone(null)}>
          Cancel
        </button>
      </div>
    </form>
  );
}

function ToolAnswers({ message, onAnswer }: { message: Message; onAnswer: (results: Message[]) => void }) {
  const calls = message.toolCalls ?? [];
  const [texts, setTexts] = useState(calls.map(() => ""));
  return (
    <form
      class="tool-answers"
      onSubmit={(event) => {
        event.preventDefault();
        onAnswer(calls.map((call, at) => ({ role: "tool", toolCallId: call.id, content: texts[at] ?? "" })));
      }}
    >
      {calls.map((call, at) => (
        <label key={call.id || at}>
          Result of {call.name}
          <textarea
            rows={2}
            value={texts[at] ?? ""}
            onInput={(event) => setTexts((all) => all.map((text, index) => (index === at ? event.currentTarget.value : text)))}
          />
        </label>
      ))}
      <button type="submit" class="small primary">
        Answer {calls.length > 1 ? "the calls" : "the call"}
      </button>
    </form>
  );
}

function SettingsForm({ settings, onChange }: { settings: Settings; onChange: (part: Partial<Settings>) => void }) {
  const text = (name: keyof Settings, label: string, hint: string) => (
    <label>
      {label}
      <input
        inputMode="decimal"
        placeholder={hint}
        value={settings[name] as string}
        onInput={(event) => onChange({ [name]: event.currentTarget.value })}
      />
    </label>
  );
  return (
    <details class="settings card" open={matchMedia("(min-width: 60rem)").matches}>
      <summary>Settings</summary>
      <label>
        System prompt
        <textarea rows={3} value={settings.system} onInput={(event) => onChange({ system: event.currentTarget.value })} />
      </label>
      <div class="grid">
        {text("temperature", "Temperature", "model's own")}
        {text("topP", "Top-p", "1")}
        {text("maxTokens", "Most tokens", "as many as fit")}
        {text("seed", "Seed", "random")}
      </div>
      <label>
        Thinking
        <select value={settings.thinking} onChange={(event) => onChange({ thinking: event.currentTarget.value as Settings["thinking"] })}>
          <option value="">as the model does</option>
          <option value="medium">on</option>
          <option value="none">off</option>
        </select>
      </label>
      <label>
        Tools (JSON)
        <textarea
          rows={3}
          spellcheck={false}
          placeholder='[{"name": "weather", "parameters": {…}}]'
          value={settings.tools}
          onInput={(event) => onChange({ tools: event.currentTarget.value })}
        />
      </label>
      <label>
        Tool choice
        <select value={settings.toolChoice} onChange={(event) => onChange({ toolChoice: event.currentTarget.value })}>
          <option>auto</option>
          <option>required</option>
          <option>none</option>
        </select>
      </label>
      <label>
        JSON schema of the answer
        <textarea
          rows={3}
          spellcheck={false}
          placeholder='{"type": "object", "properties": {…}}'
          value={settings.schema}
          onInput={(event) => onChange({ schema: event.currentTarget.value })}
        />
      </label>
      <label class="check">
        <input type="checkbox" checked={settings.logprobs} onChange={(event) => onChange({ logprobs: event.currentTarget.checked })} />
        Log probabilities (point at a token)
      </label>
      <button type="button" class="small" onClick={() => onChange(DEFAULTS)}>
        Reset
      </button>
    </details>
  );
}

function CopyAs(props: { body: () => Record<string, unknown>; session: Session; onProblem: (text: string) => void }) {
  const [copied, setCopied] = useState("");
  async function copy(language: Language) {
    try {
      const text = snippet(language, props.body(), location.origin, props.session.needs_key);
      await copyText(text);
      setCopied(language);
      setTimeout(() => setCopied(""), 1500);
    } catch (error) {
      props.onProblem((error as Error).message);
    }
  }
  return (
    <span class="copy-as" role="group" aria-label="Copy the chat as code">
      Copy as
      {(["curl", "Python", "JavaScript"] as Language[]).map((language) => (
        <button type="button" class="small" key={language} onClick={() => void copy(language)}>
          {copied === language ? "copied" : language}
        </button>
      ))}
    </span>
  );
}
