import { useCallback, useEffect, useState } from "preact/hooks";
import { ApiError, getJson, storeKey, storedKey } from "./api";
import { useLive } from "./live";
import { FleetPage } from "./pages/fleet";
import { Playground } from "./pages/playground";
import { PrefixPage } from "./pages/prefixes";
import { RequestsPage } from "./pages/requests";
import type { Session } from "./types";

const PAGES = { chat: "Playground", fleet: "Fleet", prefixes: "Prefix map", requests: "Requests" } as const;
type Page = keyof typeof PAGES;

export function App() {
  const [session, setSession] = useState<Session | null>(null);
  const [problem, setProblem] = useState("");
  const [asks, setAsks] = useState(false);
  const begin = useCallback(async () => {
    try {
      setSession(await getJson<Session>("/console/api/session"));
      setProblem("");
      setAsks(false);
    } catch (error) {
      const refused = error instanceof ApiError && error.status === 401;
      setProblem(refused && !storedKey() ? "" : (error as Error).message);
      if (refused) storeKey("");
      setSession(null);
      setAsks(true);
    }
  }, []);
  useEffect(() => void begin(), []);
  function forget() {
    storeKey("");
    void begin();
  }
  if (session) return <Console session={session} onForget={forget} onRefused={forget} />;
  return asks ? <KeyForm problem={problem} onKey={begin} /> : <main class="center">Loading…</main>;
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

function Console(props: { session: Session; onForget: () => void; onRefused: () => void }) {
  const { session } = props;
  const [page, setPage] = useState<Page>(pageNow(session));
  const live = useLive(props.onRefused);
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
            <Playground session={session} live={live} />
          </div>
        )}
        {page === "fleet" && <FleetPage session={session} live={live} />}
        {page === "prefixes" && <PrefixPage session={session} />}
        {page === "requests" && <RequestsPage session={session} live={live} />}
      </main>
      <footer class="hint">mini-infer {session.version}</footer>
    </>
  );
}

const THEME = "mini-infer-theme";

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return (
    <select aria-label="Colours" value={theme} onChange={(event) => setTheme(event.currentTarget.value)}>
      <option value="">System</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}
