// A series as a small line. Its numbers are in the text beside it, so that a screen reader has them.

export function Sparkline({ values, most, label }: { values: (number | null)[]; most?: number; label: string }) {
  const width = 96;
  const height = 22;
  const top = Math.max(most ?? 0, ...values.map((value) => value ?? 0)) || 1;
  const step = width / Math.max(1, values.length - 1);
  const points = values
    .map((value, at) => (value === null ? "" : `${(at * step).toFixed(1)},${(height - 1 - (value / top) * (height - 3)).toFixed(1)}`))
    .filter(Boolean);
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
      <polyline points={points.join(" ")} />
    </svg>
  );
}
