// What the gateway sends; the dataclasses in gateway/mini_infer_gateway/console have the same fields.

export interface Session {
  version: string;
  everything: boolean;
  key: string;
  can_chat: boolean;
  /** False if the gateway lists none of the requests that this page makes. */
  sees_requests: boolean;
  keeps_texts: boolean;
  needs_key: boolean;
  docs: string;
  grafana: string;
  policy: string;
  sample_every_s: number;
}

export interface Condition {
  type: string;
  status: string;
  reason?: string;
  message?: string;
  lastTransitionTime?: string;
}

export interface ServiceStatus {
  conditions?: Condition[];
  model?: string | null;
  revision?: string | null;
  roles?: { name: string; ready?: string; gpus?: number }[];
}

export interface Service {
  name: string;
  models: string[];
  engines: Record<string, number>;
  status: ServiceStatus;
  revisions: Record<string, number>;
}

export interface Sample {
  running: number;
  waiting: number;
  queued_tokens: number;
  kv_usage: number;
  requests_per_s: number;
  tokens_per_s: number;
  hit_share: number | null;
}

export interface Engine {
  name: string;
  service: string;
  model: string;
  role: string;
  revision: string;
  state: string;
  reason: string;
  url: string;
  group: string;
  transfer: string;
  breaker: string;
  retry_in_s: number;
  failures: number;
  index: string;
  events: string;
  not_tokenized_here: string;
  cached_blocks: number;
  in_flight: number;
  now: Sample | null;
  history: Sample[];
}

export interface Fleet {
  services: Service[];
  engines: Engine[];
  pairs: { service: string; revision: string; prefill: string[]; decode: string[] }[];
  waiting_here: Record<string, number>;
  in_flight: number;
}

export interface RequestRow {
  serial: number;
  id: string;
  time: number;
  path: string;
  model: string;
  key: string;
  status: number;
  outcome: string;
  error: string;
  duration_s: number;
  queue_s: number;
  first_byte_s: number | null;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number | null;
  attempts: number;
  engine: string;
  reason: string;
}

export interface RequestDetail {
  request: RequestRow;
  timeline: { at_s: number; step: string; engine: string; detail: string }[];
  text: string;
}

export interface PrefixMap {
  engines: {
    name: string;
    model: string;
    index: string;
    cached_tokens: number;
    guessed_tokens: number;
    conversations: number;
  }[];
  prefixes: {
    id: string;
    parent: string;
    tokens: number;
    conversations: number;
    engines: Record<string, { conversations: number; age_s: number }>;
  }[];
  shared: number;
}

export interface Explained {
  model: string;
  prompt_tokens: number;
  exact: boolean;
  cached_tokens: number;
  policy: string;
  chosen: string[];
  reason: string;
  prefill: string;
  prefill_reason: string;
  engines: {
    engine: string;
    cached_tokens: number;
    index: string;
    filtered_by: string;
    total: number;
    behind_s: number;
    scores: Record<string, number>;
    facts: Record<string, number>;
  }[];
}

export interface Model {
  id: string;
  owned_by?: string;
  max_model_len?: number | null;
}
