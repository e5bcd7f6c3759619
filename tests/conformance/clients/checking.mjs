// What checks in JavaScript have in common: each that is named, or all, and a line of JSON for each.
export const assert = (truth, what) => { if (!truth) throw new Error("not so: " + what); };

export async function report(checks) {
  const chosen = process.argv.slice(2);
  for (const [name, run] of Object.entries(checks)) {
    if (chosen.length && !chosen.includes(name)) continue;
    const start = Date.now();
    const line = { check: name, ok: true };
    try { await run(); } catch (error) { line.ok = false; line.saw = `${error.name}: ${error.message}`.slice(0, 600); }
    console.log(JSON.stringify({ ...line, seconds: (Date.now() - start) / 1000 }));
  }
}
