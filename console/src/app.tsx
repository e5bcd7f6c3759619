import { useCallback, useEffect, useState } from "preact/hooks";
import { getJson, isRefusal, storeKey, storedKey } from "./api";
import { Boundary } from "./boundary";
import { saveConversations } from "./conversations";
import { useLive } from "./live";
import { FleetPage } from "./pages/fleet";
import { Playground } from "./pages/playground";
import { PrefixPage } from "./pages/prefixes";
import { RequestsPage } from "./pages/requests";
import { load, save } from "./storage";
import type { Session } from "./types";

const NO_LONGER_VALID = "This key is no longer valid: type another one.";

const PAGES = { chat: "Playground", fleet: "Fleet", prefixes: "Prefix map", requests: "Requests" } as const;
type Page = keyof typeof PAGES;

type State = { session: Session } | { asksKey: true; problem: string } | { failed: string } | null;

export function App() {
  const [state, setState] = useState<State>(null);
  const begin = useCallback(async () => {
    const hadKey = Boolean(storedKey());
    try {
      setState({ session: await getJson<Session>("/console/api/session") });
    } catch (error) {
      if (isRefusal(error)) refuse(hadKey ? (error as Error).message : "");
      else setState({ failed: (error as Error).message });
    }
  }, []);
  /** Takes over what the viewer may see now. A gateway that cannot be reached changes nothing. */
  const refresh = useCallback(async () => {
    try {
      const session = await getJson<Session>("/console/api/session");
      setState((now) => (now && "session" in now ? { session } : now));
    } catch (error) {
      if (isRefusal(error)) refuse(NO_LONGER_VALID);
    }
  }, []);
  function refuse(problem: string) {
    storeKey("");
    setState({ asksKey: true, problem });
  }
  useEffect(() => void begin(), []);
  if (!state) return <main class="center">Loading…</main>;
  if ("session" in state) {
    return (
      <Console
        session={state.session}
        onForget={() => refuse("")}
        onRefused={() => refuse(NO_LONGER_VALID)}
        onAgain={() => void refresh()}
      />
    );
  }
  if ("asksKey" in state) return <KeyForm problem={state.problem} onKey={begin} />;
  return (
    <main class="center">
      <section class="card">
        <h1>mini-infer</h1>
        <p class="error" role="alert">
          The gateway does not answer: {state.failed}
        </p>
        <button type="button" onClick={() => void begin()}>
          Try again
        </button>
      </section>
    </main>
  );
}

function KeyForm({ problem, onKey }: { problem: string; onKey: () => Promise<void> }) {
  const [key, setKey] = useState("");
  function submit(event: Event) {
    event.preventDefault();
    storeKey(key.trim());
    void onKey();
  }
  return (
    <main class="center">
      <form class="card key" onSubmit={submit}>
        <h1>mini-infer</h1>
        <label for="key">API key</label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          required
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
        />
        {problem && (
          <p class="error" role="alert">
            {problem}
          </p>
        )}
        <button type="submit" class="primary">
          Open the console
        </button>
        <p class="hint">The key stays in this tab until you close it. It is sent to this gateway alone.</p>
      </form>
    </main>
  );
}

function pageNow(session: Session): Page {
  const name = location.hash.replace(/^#\/?/, "").split("?")[0] as Page;
  return name in PAGES && (name !== "chat" || session.can_chat) ? name : session.can_chat ? "chat" : "fleet";
}

function Console(props: { session: Session; onForget: () => void; onRefused: () => void; onAgain: () => void }) {
  const { session } = props;
  const [page, setPage] = useState<Page>(pageNow(session));
  const live = useLive(props.onRefused, props.onAgain);
  useEffect(() => {
    const moved = () => setPage(pageNow(session));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    document.title = `${PAGES[page]} · mini-infer`;
  }, [page]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header>
        <span class="brand">
          <img src="/console/icon.svg" alt="" width="22" height="22" /> mini-infer
        </span>
        <nav aria-label="Pages">
          {(Object.keys(PAGES) as Page[])
            .filter((name) => name !== "chat" || session.can_chat)
            .map((name) => (
              <a key={name} href={`#/${name}`} aria-current={page === name ? "page" : undefined}>
                {PAGES[name]}
              </a>
            ))}
          {session.docs && <a href={session.docs}>API docs</a>}
          {session.grafana && (
            <a href={session.grafana} target="_blank" rel="noopener noreferrer">
              Grafana
            </a>
          )}
        </nav>
        <span class="status">
          <span class={live.connected ? "dot good" : "dot bad"} aria-hidden="true" />
          <span role="status">{live.connected ? "live" : live.error ? "not connected" : "connecting"}</span>
          {session.key && <span class="hint">key {session.key}</span>}
          {session.needs_key && (
            <button type="button" class="small" onClick={props.onForget}>
              Forget key
            </button>
          )}
          <Theme />
        </span>
      </header>
      <main id="main" tabIndex={-1}>
        {/* The playground stays, so that an answer goes on while another page is looked at. */}
        {session.can_chat && (
          <div hidden={page !== "chat"}>
            <Boundary onReset={() => saveConversations(session.key, null)}>
              <Playground session={session} live={live} />
            </Boundary>
          </div>
        )}
        <Boundary key={page}>
          {page === "fleet" && <FleetPage session={session} live={live} />}
          {page === "prefixes" && <PrefixPage session={session} live={live} />}
          {page === "requests" && <RequestsPage session={session} live={live} />}
        </Boundary>
      </main>
      <footer class="hint">mini-infer {session.version}</footer>
    </>
  );
}

const THEME = "mini-infer-theme";

function Theme() {
  const [theme, setTheme] = useState(load("localStorage", THEME) ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    save("localStorage", THEME, theme);
  }, [theme]);
  return (
    <select aria-label="Colours" value={theme} onChange={(event) => setTheme(event.currentTarget.value)}>
      <option value="">System</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}
