import { count, percent } from "../format";
import type { Live } from "../live";
import { Sparkline } from "../sparkline";
import { Table } from "../table";
import type { Condition, Engine, Service, Session } from "../types";

export function FleetPage({ session, live }: { session: Session; live: Live }) {
  const fleet = live.fleet;
  if (!fleet) return <p class="hint">Waiting for the gateway's numbers…</p>;
  const waiting = Object.entries(fleet.waiting_here);
  return (
    <>
      <h1>Fleet</h1>
      {!session.everything && (
        <p class="hint">Engines and their load tell of other keys' use: an administrator's key shows them.</p>
      )}
      {session.everything && (
        <p class="summary">
          <strong>{fleet.engines.filter((engine) => engine.state === "ready").length}</strong> of {fleet.engines.length} engines
          ready · <strong>{fleet.in_flight}</strong> requests in flight ·{" "}
          {waiting.length ? waiting.map(([model, number]) => `${number} wait for ${model}`).join(", ") : "none waits"}
          {session.policy && ` · policy ${session.policy}`}
        </p>
      )}
      <div class="cards">
        {fleet.services.map((service) => (
          <ServiceCard key={service.name} service={service} everything={session.everything} />
        ))}
        {!fleet.services.length && <p class="hint">There is no service yet.</p>}
      </div>
      {session.everything && <Engines engines={fleet.engines} />}
      {fleet.pairs.length > 0 && (
        <section>
          <h2>Prefill and decode apart</h2>
          <ul>
            {fleet.pairs.map((pair) => (
              <li key={pair.service + pair.revision}>
                {pair.service} {pair.revision}: {pair.prefill.join(", ") || "no prefill engine"} → {pair.decode.join(", ") || "no decode engine"}
              </li>
            ))}
          </ul>
        </section>
      )}
    </>
  );
}

function condition(service: Service, type: string): Condition | undefined {
  return service.status.conditions?.find((one) => one.type === type);
}

function ServiceCard({ service, everything }: { service: Service; everything: boolean }) {
  const ready = condition(service, "Ready");
  const progressing = condition(service, "Progressing");
  const stalled = condition(service, "Stalled");
  const good = ready ? ready.status === "True" : (service.engines.ready ?? 0) > 0;
  const revisions = Object.entries(service.revisions);
  return (
    <section class="card" aria-label={`Service ${service.name || "without a name"}`}>
      <h2>{service.name || "engines without a service"}</h2>
      <p>
        <span class={good ? "pill good" : "pill bad"}>{ready?.reason ?? (good ? "Ready" : "NotReady")}</span>{" "}
        {service.models.length ? `model ${service.models.join(", ")}` : "no model name"}
      </p>
      {ready?.message && <p class="why">{ready.message}</p>}
      {stalled?.status === "True" && <p class="error">{stalled.message ?? stalled.reason}</p>}
      {everything && revisions.length > 1 && (
        <p class="rollout" role="status">
          Rollout: {revisions.map(([revision, number]) => `${number} of ${revision}`).join(", ")}
          {service.status.revision && `; wanted: ${service.status.revision}`}
          {progressing?.message && `. ${progressing.message}`}
        </p>
      )}
      {service.status.roles && service.status.roles.length > 0 && (
        <p class="hint">{service.status.roles.map((role) => `${role.name} ${role.ready ?? ""}`).join(" · ")}</p>
      )}
    </section>
  );
}

const COLUMNS = ["Engine", "State", "Running", "Waiting", "KV cache", "Hit rate", "Tokens/s", "Requests/s"];

function Engines({ engines }: { engines: Engine[] }) {
  return (
    <section>
      <h2>Engines</h2>
      <Table label="Engines" class="engines" columns={COLUMNS} empty="There is no engine yet.">
        {engines.map((engine) => (
          <Row key={engine.name} engine={engine} />
        ))}
      </Table>
    </section>
  );
}

const GOOD = new Set(["ready"]);
const BAD = new Set(["broken", "silent"]);

function Row({ engine }: { engine: Engine }) {
  const now = engine.now;
  const series = (name: "running" | "waiting" | "kv_usage" | "hit_share" | "tokens_per_s" | "requests_per_s") =>
    engine.history.map((sample) => sample[name]);
  const cell = (text: string, name: Parameters<typeof series>[0], label: string, most?: number) => (
    <td class="number">
      <span>{text}</span>
      <Sparkline values={series(name)} most={most} label={`${label} of ${engine.name} in the last minutes, now ${text}`} />
    </td>
  );
  const details = [
    engine.role !== "unified" && engine.role,
    engine.revision && `revision ${engine.revision}`,
    engine.index && `cache known: ${engine.index}`,
    engine.cached_blocks > 0 && `${count(engine.cached_blocks * 16)} tokens cached`,
    engine.group && `group ${engine.group}`,
    engine.transfer && "moves KV cache",
  ].filter(Boolean);
  return (
    <tr data-engine={engine.name} data-state={engine.state}>
      <th scope="row">
        {engine.name}
        <div class="hint">{details.join(" · ")}</div>
      </th>
      <td>
        <span class={GOOD.has(engine.state) ? "pill good" : BAD.has(engine.state) ? "pill bad" : "pill warn"}>{engine.state}</span>
        {engine.reason && <div class="why">{engine.reason}</div>}
        {engine.breaker && <div class="hint">circuit open: {engine.breaker}, {engine.failures} failures</div>}
        {engine.events === "refused" && <div class="why">its event socket refuses the gateway's keys</div>}
        {engine.not_tokenized_here && <div class="hint">it tokenises itself: {engine.not_tokenized_here}</div>}
      </td>
      {cell(String(now?.running ?? engine.in_flight), "running", "Running requests")}
      {cell(`${now?.waiting ?? 0}${now?.queued_tokens ? ` (${count(now.queued_tokens)} tokens)` : ""}`, "waiting", "Waiting requests")}
      {cell(percent(now?.kv_usage ?? 0), "kv_usage", "KV cache use", 1)}
      {cell(lastHit(engine), "hit_share", "Prefix hit rate", 1)}
      {cell(count(now?.tokens_per_s ?? 0), "tokens_per_s", "Tokens per second")}
      {cell(count(now?.requests_per_s ?? 0), "requests_per_s", "Requests per second")}
    </tr>
  );
}

/** The hit rate of the last interval in which a prompt came. */
function lastHit(engine: Engine): string {
  const known = engine.history.filter((sample) => sample.hit_share !== null);
  return known.length ? percent(known[known.length - 1]!.hit_share!) : "–";
}
