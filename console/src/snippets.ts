// The present chat as code to paste.
import type { Body } from "./chat";

export type Language = "curl" | "Python" | "JavaScript";

export function snippet(language: Language, body: Body, origin: string, needsKey: boolean): string {
  const pretty = JSON.stringify(body, null, 2);
  if (language === "curl") {
    const key = needsKey ? ` \\\n  -H "authorization: Bearer $OPENAI_API_KEY"` : "";
    const quoted = pretty.replaceAll("'", `'\\''`);
    return `curl ${origin}/v1/chat/completions -H 'content-type: application/json'${key} \\\n  -d '${quoted}'\n`;
  }
  if (language === "Python") {
    const key = needsKey ? "" : `, api_key="any"`;
    return [
      "import json",
      "",
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${origin}/v1"${key})`,
      `body = json.loads(${python(pretty)})`,
      "for piece in client.chat.completions.create(**body, stream=True):",
      "    if piece.choices:",
      `        print(piece.choices[0].delta.content or "", end="")`,
      "",
    ].join("\n");
  }
  return [
    `import OpenAI from "openai";`,
    "",
    `const client = new OpenAI({ baseURL: "${origin}/v1"${needsKey ? "" : `, apiKey: "any"`} });`,
    `const body = ${pretty};`,
    "for await (const piece of await client.chat.completions.create({ ...body, stream: true })) {",
    `  process.stdout.write(piece.choices[0]?.delta.content ?? "");`,
    "}",
    "",
  ].join("\n");
}

/** A JSON text as Python's literal: escapes of JSON strings would be read twice in a plain one. */
function python(text: string): string {
  return text.includes(`"""`) ? JSON.stringify(text) : `r"""${text}"""`;
}
