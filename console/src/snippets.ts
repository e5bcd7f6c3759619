// The present chat as code to paste.
import type { Body } from "./chat";

export type Language = "curl" | "Python" | "JavaScript";

/** `engine` is the only one that may answer; "" leaves the choice to the gateway. */
export function snippet(language: Language, body: Body, origin: string, needsKey: boolean, engine: string): string {
  const pretty = JSON.stringify(body, null, 2);
  const headers = engine ? { "x-mini-infer-engine": engine } : null;
  if (language === "curl") {
    const key = needsKey ? ` \\\n  -H "authorization: Bearer $OPENAI_API_KEY"` : "";
    const pin = engine ? ` \\\n  -H ${shell(`x-mini-infer-engine: ${engine}`)}` : "";
    return `curl ${origin}/v1/chat/completions -H 'content-type: application/json'${key}${pin} \\\n  -d ${shell(pretty)}\n`;
  }
  if (language === "Python") {
    const key = needsKey ? "" : `, api_key="any"`;
    const pin = headers ? `, extra_headers=${JSON.stringify(headers)}` : "";
    return [
      "import json",
      "",
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${origin}/v1"${key})`,
      `body = json.loads(${python(pretty)})`,
      `for piece in client.chat.completions.create(**body, stream=True${pin}):`,
      "    if piece.choices:",
      `        print(piece.choices[0].delta.content or "", end="")`,
      "",
    ].join("\n");
  }
  const pin = headers ? `, { headers: ${JSON.stringify(headers)} }` : "";
  return [
    `import OpenAI from "openai";`,
    "",
    `const client = new OpenAI({ baseURL: "${origin}/v1"${needsKey ? "" : `, apiKey: "any"`} });`,
    `const body = ${pretty};`,
    `for await (const piece of await client.chat.completions.create({ ...body, stream: true }${pin})) {`,
    `  process.stdout.write(piece.choices[0]?.delta.content ?? "");`,
    "}",
    "",
  ].join("\n");
}

function shell(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** A JSON text as Python's literal: escapes of JSON strings would be read twice in a plain one. */
function python(text: string): string {
  return text.includes(`"""`) ? JSON.stringify(text) : `r"""${text}"""`;
}
