// Numbers as people read them.

export function seconds(value: number | null): string {
  if (value === null) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export function age(value: number): string {
  if (value < 10) return "now";
  if (value < 120) return `${Math.round(value)} s ago`;
  return value < 7200 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

export function count(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 && value % 1 ? 1 : 0 });
}

export function percent(value: number): string {
  return `${Math.round(100 * value)} %`;
}

export function clock(time: number): string {
  return new Date(1000 * time).toLocaleTimeString("en", { hour12: false });
}

const WORDS: Record<string, string> = {
  cached_prefix: "it computes least of the prompt: the rest is cached there",
  queue_wait: "it can begin sooner",
  decode_slots: "its batch is smaller",
  cache_room: "its cache has more room",
  only: "it is the only one",
  tie: "nothing set it apart: chosen at random among equals",
  random: "the policy chooses at random",
  round_robin: "it was its turn",
};

export function why(reason: string): string {
  return WORDS[reason] ?? reason;
}
