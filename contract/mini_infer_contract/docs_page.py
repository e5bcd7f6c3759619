"""The page at /docs: a reader of /openapi.json that needs nothing from elsewhere, so that it works without internet."""

DOCS_PATH = "/docs"
OPENAPI_PATH = "/openapi.json"

DOCS_PAGE = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>mini-infer: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .3rem } details details { margin-left: 1.2rem }
table { border-collapse: collapse; margin: .4rem 1.2rem } td { border-top: 1px solid #ddd; padding: .15rem .6rem;
vertical-align: top } code, pre { font: 13px/1.5 ui-monospace, monospace } b { display: inline-block; width: 4rem }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; margin: .4rem 1.2rem } i { color: #666 }
</style></head><body><h1>mini-infer</h1><p id="about"></p><p><a href="openapi.json">openapi.json</a></p>
<div id="paths">The description is being read.</div>
<script>
const make = (tag, text) => { const node = document.createElement(tag); node.textContent = text ?? ""; return node };
let schemas = {};
const short = schema => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(short).join(" or ");
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return "list of " + short(schema.items ?? {});
  return schema.type ?? "anything";
};
const named = (schema, found = []) => {
  if (schema.$ref) found.push(schema.$ref.split("/").pop());
  for (const part of [...(schema.anyOf ?? []), schema.items].filter(Boolean)) named(part, found);
  return found;
};
const fields = (schema, seen) => {
  const box = document.createElement("div"), table = box.appendChild(make("table"));
  if (schema.description) box.prepend(make("i", schema.description));
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = table.insertRow(), limits = ["minimum", "maximum", "minItems", "pattern"].filter(key => key in field);
    row.insertCell().append(make("code", name + ((schema.required ?? []).includes(name) ? " *" : "")));
    row.insertCell().append(make("code", short(field) + limits.map(key => `, ${key} ${field[key]}`).join("")));
    row.insertCell().append(make("span", field.description));
    for (const other of named(field)) if (!seen.has(other)) { seen.add(other); box.append(schema_of(other, seen)) }
  }
  return box;
};
const schema_of = (name, seen) => {
  const part = make("details"), schema = schemas[name] ?? {};
  part.append(make("summary", name));
  part.addEventListener("toggle", () => part.children.length > 1 || part.append(fields(schema, seen)));
  return part;
};
const operation_of = (path, method, operation) => {
  const part = make("details"), title = part.appendChild(make("summary"));
  title.append(make("b", method.toUpperCase()), make("code", path + "  "), make("span", operation.summary));
  const given = operation.parameters ?? [], needed = given.filter(one => one.required).map(one => one.name);
  const described = Object.fromEntries(given.map(one => [one.name, one.schema]));
  const parameters = fields({ properties: described, required: needed }, new Set());
  if (given.length) part.append(make("h4", "Parameters"), parameters);
  const body = operation.requestBody?.content["application/json"].schema;
  if (body) part.append(make("h4", "Request"), fields(schemas[short(body)], new Set([short(body)])));
  for (const [status, answer] of Object.entries(operation.responses)) {
    part.append(make("h4", `${status}: ${answer.description}`));
    for (const [kind, { schema }] of Object.entries(answer.content ?? {})) {
      part.append(make("pre", `${kind}: ${schema.description ?? short(schema)}`));
      for (const name of named(schema)) part.append(schema_of(name, new Set([name])));
    }
  }
  return part;
};
fetch("openapi.json").then(answer => answer.json()).then(api => {
  schemas = api.components.schemas;
  document.getElementById("about").textContent = `${api.info.version}. ${api.info.description}`;
  document.getElementById("paths").replaceChildren(...Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => operation_of(path, method, operation))));
}).catch(error => document.getElementById("paths").textContent = `openapi.json could not be read: ${error}`);
</script></body></html>
"""
