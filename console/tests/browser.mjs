// Drives a Chromium over the console: reads one command a line as JSON from standard input, and answers with one line.
// Usage: node tests/browser.mjs /usr/bin/chromium
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const LIMIT_MS = Number(process.env.BROWSER_LIMIT_MS ?? 60_000);
/** Pages are looked at so often; at each frame, as is usual, looking would cost more than what is tested. */
const POLL_MS = 50;
const browser = await chromium.launch({
  executablePath: process.argv[2],
  args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--in-process-gpu"],
});
let context;
let options = "";
let tabs = [];
let page;
let problems = [];

/** Opens a tab in the present profile, whose errors are collected. */
async function openTab() {
  page = await context.newPage();
  tabs.push(page);
  page.on("pageerror", (error) => problems.push(`page error: ${error.message}`));
  page.on("console", (message) => {
    if (message.type() === "error") problems.push(`console: ${message.text()}`);
  });
  page.on("requestfailed", (request) => {
    const why = request.failure()?.errorText ?? "";
    if (!why.includes("ERR_ABORTED")) problems.push(`request failed: ${request.url()} ${why}`);
  });
  page.hosts = new Set();
  page.on("request", (request) => page.hosts.add(new URL(request.url()).host));
}

const commands = {
  /** Opens the console as a new user would, with nothing stored but `storage`. */
  async open({ url, scheme = "light", width = 1280, height = 900, bypassCsp = false, storage = {} }) {
    const given = JSON.stringify({ scheme, width, height, bypassCsp });
    if (given === options) {
      for (const other of tabs.slice(1)) await other.close();
      [page] = tabs = tabs.slice(0, 1);
    } else {
      await context?.close();
      context = await browser.newContext({ colorScheme: scheme, viewport: { width, height }, bypassCSP: bypassCsp });
      context.setDefaultTimeout(LIMIT_MS);
      options = given;
      tabs = [];
      await openTab();
    }
    // Nothing of the console runs in its icon, and so nothing stores anything again.
    await page.goto(new URL("/console/icon.svg", url).href);
    await page.evaluate((stored) => {
      sessionStorage.clear();
      localStorage.clear();
      for (const [name, value] of Object.entries(stored)) localStorage.setItem(name, value);
    }, storage);
    page.hosts.clear();
    problems = [];
    const began = Date.now();
    await page.goto(url, { waitUntil: "domcontentloaded" });
    await page.waitForSelector("h1");
    return { took_ms: Date.now() - began };
  },
  /** Opens another tab of the same profile. */
  async another({ url }) {
    await openTab();
    await page.goto(url, { waitUntil: "domcontentloaded" });
    await page.waitForSelector("h1");
  },
  /** Goes back to the tab with this number. */
  async turn({ to }) {
    page = tabs[to];
    await page.bringToFront();
  },
  async go({ page: name }) {
    await page.evaluate((target) => (location.hash = `#/${target}`), name);
    await page.waitForFunction((target) => document.querySelector(`nav a[href="#/${target}"]`)?.ariaCurrent === "page", name, {
      polling: 20,
    });
  },
  async key({ key }) {
    await page.getByLabel("API key").fill(key);
    await page.getByRole("button", { name: "Open the console" }).click();
  },
  /** Sends a message and returns the last answer, when `answers` of them are whole. */
  async ask({ text, answers = 1, limit_ms = LIMIT_MS }) {
    const before = await answersNow();
    await page.getByLabel("Message", { exact: true }).fill(text);
    await page.getByRole("button", { name: "Send", exact: true }).click();
    return answered(before + answers, limit_ms);
  },
  /** Presses Enter twice before the page can draw itself again. */
  async send_twice() {
    await page.evaluate(() => {
      const field = document.getElementById("draft");
      for (let time = 0; time < 2; time++) field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
    });
  },
  /** Types a key into the page of the API's description, executes a GET, and returns the status of its answer. */
  async try_it({ key, path }) {
    await page.locator(".btn.authorize").click();
    const dialog = page.locator(".modal-ux");
    const logout = dialog.getByRole("button", { name: "Remove authorization" });
    if (await logout.count()) await logout.first().click();
    await dialog.locator("input").first().fill(key);
    await dialog.getByRole("button", { name: "Apply credentials" }).first().click();
    await dialog.locator(".close-modal").click();
    const block = page.locator(`.opblock-get:has([data-path="${path}"])`);
    if (!(await block.locator(".execute").count())) {
      await block.locator(".opblock-summary-control").click();
      await block.locator(".try-out__btn").click();
    }
    const answered = page.waitForResponse((response) => new URL(response.url()).pathname === path);
    await block.locator(".execute").click();
    return (await answered).status();
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
  /** Types as a person does, into what has the focus. */
  async type({ text }) {
    await page.keyboard.type(text);
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
      { timeout: limit_ms, polling: POLL_MS },
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
  /** Changes colours and size, as a person's system and window may. */
  async look({ scheme, width, height }) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.setViewportSize({ width, height });
  },
  async value({ label }) {
    return page.getByLabel(new RegExp(`^${label}`)).last().inputValue();
  },
  /** Stores under another name until nothing more fits. */
  async fill_storage() {
    await page.evaluate(() => {
      for (let more = 1 << 22, stored = ""; more >= 1; more >>= 1) {
        try {
          localStorage.setItem("other", stored + "x".repeat(more));
          stored += "x".repeat(more);
        } catch {
          // So much does not fit: half of it may.
        }
      }
    });
  },
  /** How far the end of the conversation is below what is seen of it, in pixels. */
  async below() {
    return page.evaluate(() => {
      const log = document.querySelector(".messages");
      return log.scrollHeight - log.scrollTop - log.clientHeight;
    });
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

async function answered(most, limit_ms = LIMIT_MS) {
  await page.waitForFunction((number) => Number(document.querySelector("[data-answers]").dataset.answers) >= number, most, {
    timeout: limit_ms,
    polling: POLL_MS,
  });
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
