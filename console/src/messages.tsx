import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Message, Stats, TokenLogprob } from "./chat";
import { count, seconds, why } from "./format";
import { Code, Markdown } from "./markdown";

/** A conversation, with what a person may do to it. `links` is true if a request's timeline can be looked at. */
export function Messages(props: { messages: Message[]; running: boolean; links: boolean; onRun: (messages: Message[]) => void }) {
  const { messages, running, links, onRun } = props;
  const log = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [editing, setEditing] = useState<number | null>(null);
  useEffect(() => {
    if (follows.current && log.current) log.current.scrollTop = log.current.scrollHeight;
  }, [messages]);
  return (
    <div
      ref={log}
      class="messages"
      role="log"
      aria-label="Conversation"
      aria-busy={running}
      tabIndex={0}
      onScroll={({ currentTarget: at }) => (follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < 40)}
    >
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
            {message.role === "assistant" && message.stats && <StatsLine stats={message.stats} finish={message.finish} links={links} />}
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
      <Content message={message} />
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

function Content({ message: { role, content, logprobs } }: { message: Message }) {
  const json = useMemo(() => role === "assistant" && isJson(content), [role, content]);
  if (logprobs?.length) return <Logprobs tokens={logprobs} />;
  if (role === "user") return <div class="plain">{content}</div>;
  if (role === "tool") return <pre tabIndex={0}>{content}</pre>;
  return json ? <Code text={content} language="json" /> : <Markdown text={content} />;
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
  return useMemo(
    () => (
      <div class="logprobs plain">
        {tokens.map((one, at) => {
          const others = one.top.map((other) => `${JSON.stringify(other.token)} ${chance(other.logprob)}`);
          const level = one.logprob > -0.1 ? "sure" : one.logprob > -1.2 ? "likely" : "unsure";
          return (
            <span key={at} class={`token ${level}`} title={`${chance(one.logprob)}\n${others.join("\n")}`}>
              {one.token}
            </span>
          );
        })}
      </div>
    ),
    [tokens],
  );
}

function chance(logprob: number): string {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function StatsLine({ stats, finish, links }: { stats: Stats; finish?: string; links: boolean }) {
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
      {links && stats.requestId && (
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
