import { useEffect, useMemo, useState } from "preact/hooks";
import { getJson } from "../api";
import { clock, count, seconds, why } from "../format";
import type { Live } from "../live";
import { Table } from "../table";
import type { RequestDetail, RequestRow, Session } from "../types";

const SHOWN = 200;
const COLUMNS = ["Time", "Model", "Status", "Total", "First byte", "Queue", "Prompt (cached)", "Output"];

export function RequestsPage({ session, live }: { session: Session; live: Live }) {
  const [filter, setFilter] = useState("");
  const [outcome, setOutcome] = useState("");
  const [open, setOpen] = useState(idInAddress());
  useEffect(() => {
    const moved = () => setOpen(idInAddress());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const found = useMemo(() => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return live.requests.filter((row) => {
      const text = `${row.id} ${row.model} ${row.key} ${row.engine} ${row.path} ${row.status} ${row.outcome} ${row.reason}`.toLowerCase();
      return (!outcome || row.outcome === outcome) && words.every((word) => text.includes(word));
    });
  }, [live.requests, filter, outcome]);
  if (!session.sees_requests) {
    return (
      <>
        <h1>Requests</h1>
        <p class="hint">
          This gateway has no keys, so it cannot tell whose requests are whose, and lists none here: its admin port lists all.
        </p>
      </>
    );
  }
  const outcomes = [...new Set(live.requests.map((row) => row.outcome))].sort();
  return (
    <>
      <h1>Requests</h1>
      <p class="hint">
        The latest {count(live.requests.length)} that have ended{session.everything ? "" : ", of your key"}.{" "}
        {session.keeps_texts ? "The beginnings of prompts are kept (--console-texts)." : "No text is kept."}
      </p>
      <form class="toolbar" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>
          Filter{" "}
          <input
            type="search"
            placeholder="model, key, engine, status, id"
            value={filter}
            onInput={(event) => setFilter(event.currentTarget.value)}
          />
        </label>
        <label>
          Outcome{" "}
          <select value={outcome} onChange={(event) => setOutcome(event.currentTarget.value)}>
            <option value="">all</option>
            {outcomes.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <span role="status">{count(found.length)} found</span>
      </form>
      {open && <Detail id={open} onClose={() => (location.hash = "#/requests")} />}
      <Table label="Requests" class="requests" columns={session.everything ? [...COLUMNS, "Key", "Engine, and why"] : COLUMNS} empty="None yet.">
        {found.slice(0, SHOWN).map((row) => (
          <Row key={row.serial} row={row} everything={session.everything} />
        ))}
      </Table>
      {found.length > SHOWN && <p class="hint">The newest {SHOWN} are shown: filter to find others.</p>}
    </>
  );
}

function idInAddress(): string {
  return new URLSearchParams(location.hash.split("?")[1] ?? "").get("id") ?? "";
}

function Row({ row, everything }: { row: RequestRow; everything: boolean }) {
  return (
    <tr>
      <th scope="row">
        <a href={`#/requests?id=${encodeURIComponent(row.id)}`}>
          {clock(row.time)}
          <span class="visually-hidden"> timeline</span>
        </a>
      </th>
      <td>
        {row.model || "–"}
        <div class="hint">{row.path}</div>
      </td>
      <td>
        <span class={row.outcome === "ok" ? "pill good" : row.status >= 500 || row.outcome === "broke" ? "pill bad" : "pill warn"}>
          {row.status || ""} {row.outcome}
        </span>
      </td>
      <td>{seconds(row.duration_s)}</td>
      <td>{seconds(row.first_byte_s)}</td>
      <td>{row.queue_s ? seconds(row.queue_s) : "–"}</td>
      <td>
        {count(row.prompt_tokens)} ({count(row.cached_tokens)})
      </td>
      <td>{row.completion_tokens === null ? "–" : count(row.completion_tokens)}</td>
      {everything && <td>{row.key || "–"}</td>}
      {everything && (
        <td>
          {row.engine || "–"}
          {row.attempts > 1 && ` (attempt ${row.attempts})`}
          <div class="hint">{row.reason && why(row.reason)}</div>
        </td>
      )}
    </tr>
  );
}

function Detail({ id, onClose }: { id: string; onClose: () => void }) {
  const [detail, setDetail] = useState<RequestDetail | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    setDetail(null);
    getJson<RequestDetail>(`/console/api/requests/${encodeURIComponent(id)}`).then(
      (found) => (setDetail(found), setProblem("")),
      (error: Error) => setProblem(error.message),
    );
  }, [id]);
  return (
    <section class="card detail" aria-label="One request">
      <div class="toolbar">
        <h2>{id}</h2>
        <button type="button" class="small" onClick={onClose}>
          Close
        </button>
      </div>
      {problem && <p class="error">{problem}</p>}
      {detail && (
        <>
          {detail.request.error && <p class="error">{detail.request.error}</p>}
          {detail.text && <blockquote class="plain">{detail.text}</blockquote>}
          <Timeline detail={detail} />
        </>
      )}
    </section>
  );
}

const STEPS: Record<string, string> = {
  arrived: "arrived",
  tokenized: "read and tokenised",
  queued: "waits for an engine with room",
  sent: "sent to an engine",
  first_byte: "first byte of the answer",
  failed: "attempt failed",
  ended: "ended",
};

function Timeline({ detail }: { detail: RequestDetail }) {
  const total = Math.max(detail.request.duration_s, 1e-6);
  return (
    <ol class="timeline">
      {detail.timeline.map((step, at) => {
        const end = detail.timeline[at + 1]?.at_s ?? step.at_s;
        return (
          <li key={at}>
            <span class="at">{seconds(step.at_s)}</span>
            <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
              <rect x={(100 * step.at_s) / total} width={Math.max(0.5, (100 * (end - step.at_s)) / total)} y="1" height="4" />
            </svg>
            <span>
              {STEPS[step.step] ?? step.step}
              {step.engine && `: ${step.engine}`}
              {step.detail && <span class="hint"> {step.detail}</span>}
            </span>
          </li>
        );
      })}
    </ol>
  );
}
