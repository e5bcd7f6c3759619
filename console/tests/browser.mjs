// Drives a Chromium over the console: reads one command a line as JSON from standard input, and answers with one line.
// Usage: node tests/browser.mjs /usr/bin/chromium
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const LIMIT_MS = Number(process.env.BROWSER_LIMIT_MS ?? 60_000);
const browser = await chromium.launch({ executablePath: process.argv[2], args: ["--no-sandbox", "--disable-dev-shm-usage"] });
let context;
let page;
let problems = [];

const commands = {
  /** Opens the console in a fresh browser profile. */
  async open({ url, scheme = "light", width = 1280, height = 900, bypassCsp = false, storage = {} }) {
    await context?.close();
    context = await browser.newContext({ colorScheme: scheme, viewport: { width, height }, bypassCSP: bypassCsp });
    context.setDefaultTimeout(LIMIT_MS);
    await context.addInitScript((given) => {
      for (const [name, value] of Object.entries(given)) localStorage.setItem(name, value);
    }, storage);
    page = await context.newPage();
    problems = [];
    page.on("pageerror", (error) => problems.push(`page error: ${error.message}`));
    page.on("console", (message) => {
      if (message.type() === "error") problems.push(`console: ${message.text()}`);
    });
    page.on("requestfailed", (request) => {
      const why = request.failure()?.errorText ?? "";
      if (!why.includes("ERR_ABORTED")) problems.push(`request failed: ${request.url()} ${why}`);
    });
    const hosts = new Set();
    page.on("request", (request) => hosts.add(new URL(request.url()).host));
    page.hosts = hosts;
    const began = Date.now();
    await page.goto(url, { waitUntil: "domcontentloaded" });
    await page.waitForSelector("h1");
    return { took_ms: Date.now() - began };
  },
  async go({ page: name }) {
    await page.evaluate((target) => (location.hash = `#/${target}`), name);
    await page.waitForFunction((target) => document.querySelector(`nav a[href="#/${target}"]`)?.ariaCurrent === "page", name);
  },
  async key({ key }) {
    await page.getByLabel("API key").fill(key);
    await page.getByRole("button", { name: "Open the console" }).click();
  },
  /** Sends a message and returns the last answer, when `answers` of them are whole. */
  async ask({ text, answers = 1 }) {
    const before = await answersNow();
    await page.getByLabel("Message", { exact: true }).fill(text);
    await page.getByRole("button", { name: "Send", exact: true }).click();
    return answered(before + answers);
  },
  /** Presses a button; with `answers`, returns the last answer when so many more are whole. */
  async press({ name, answers = 0, last = false }) {
    const before = await answersNow();
    const buttons = page.getByRole("button", { name, exact: true });
    await (last ? buttons.last() : buttons.first()).click();
    return answers ? answered(before + answers) : null;
  },
  async fill({ label, text }) {
    await page.getByLabel(label).first().fill(text);
  },
  async choose({ label, value }) {
    await page.getByLabel(new RegExp(`^${label}`)).last().selectOption(value);
  },
  async check({ label }) {
    await page.getByLabel(label).check();
  },
  async text({ selector = "main" }) {
    return page.locator(selector).first().innerText();
  },
  async texts({ selector }) {
    return page.locator(selector).allInnerTexts();
  },
  async html({ selector }) {
    return page.locator(selector).first().innerHTML();
  },
  async click({ selector }) {
    await page.locator(selector).first().click();
  },
  /** Goes to a page of the gateway that is not the console's. */
  async visit({ url, waits_for }) {
    await page.goto(url);
    await page.waitForSelector(waits_for);
  },
  async title({ selector }) {
    return page.locator(selector).first().getAttribute("title");
  },
  /** Waits until the text of an element matches a pattern. */
  async until({ selector = "main", matches, limit_ms = LIMIT_MS }) {
    await page.waitForFunction(
      ([where, pattern]) => new RegExp(pattern, "s").test(document.querySelector(where)?.innerText ?? ""),
      [selector, matches],
      { timeout: limit_ms },
    );
  },
  async count({ selector }) {
    return page.locator(selector).count();
  },
  async reload() {
    await page.reload();
    await page.waitForSelector("h1");
  },
  /** Returns serious findings of axe-core about the page as it is. */
  async axe() {
    await page.evaluate(AXE);
    const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
    return found.violations
      .filter((one) => one.impact === "serious" || one.impact === "critical")
      .map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
  },
  /** True if nothing is wider than the window. */
  async fits() {
    return page.evaluate(() => document.documentElement.scrollWidth <= innerWidth + 1);
  },
  async colour({ selector = "body" }) {
    return page.evaluate((where) => getComputedStyle(document.querySelector(where)).backgroundColor, selector);
  },
  async shoot({ path }) {
    await page.screenshot({ path });
  },
  async stored() {
    return page.evaluate(() => ({ session: { ...sessionStorage }, local: { ...localStorage } }));
  },
  async clipboard() {
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  },
  async pasted() {
    return page.evaluate(() => navigator.clipboard.readText());
  },
  async tab({ times }) {
    const seen = [];
    for (let number = 0; number < times; number++) {
      await page.keyboard.press("Tab");
      seen.push(await page.evaluate(() => document.activeElement?.textContent?.trim() || document.activeElement?.ariaLabel || document.activeElement?.tagName));
    }
    return seen;
  },
  /** Everything that went wrong in the page since it was opened: errors, blocked content, requests to other hosts. */
  async problems() {
    const others = [...page.hosts].filter((host) => host !== new URL(page.url()).host);
    return [...problems, ...others.map((host) => `request to ${host}`)];
  },
};

async function answersNow() {
  const talk = page.locator("[data-answers]");
  return (await talk.count()) ? Number(await talk.getAttribute("data-answers")) : 0;
}

async function answered(most) {
  await page.waitForFunction((number) => Number(document.querySelector("[data-answers]").dataset.answers) >= number, most, { timeout: LIMIT_MS });
  const last = page.locator(".message.assistant").last();
  return { text: await last.innerText(), html: await last.innerHTML() };
}

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...given } = JSON.parse(line);
  let reply;
  try {
    reply = { value: (await commands[command](given)) ?? null };
  } catch (error) {
    const shown = page ? await page.locator("body").innerText().catch(() => "") : "";
    reply = { error: `${command}: ${error.message}\nthe page: ${shown.slice(0, 3000)}\nproblems: ${problems.join("; ")}` };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
await browser.close();
