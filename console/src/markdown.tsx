// Renders Markdown as elements, token by token: no HTML is ever parsed, so no text of a model becomes markup or script.
// Pictures become links: nothing is loaded from elsewhere.
import { Lexer, type Token, type Tokens } from "marked";
import type { ComponentChild } from "preact";
import { useMemo, useState } from "preact/hooks";
import { copyText } from "./clipboard";

const LINKED = /^(https?:|mailto:)/i;

/** Characters up to which a text is shown as Markdown: the lexer takes long for some that are longer. */
const MAX_CHARACTERS = 50_000;
/** Lists, quotes and emphasis that lie in each other, at most. */
const MAX_DEPTH = 32;

export function Markdown({ text }: { text: string }) {
  return useMemo(() => {
    try {
      if (text.length <= MAX_CHARACTERS) return <div class="markdown">{blocks(Lexer.lex(text, { gfm: true, breaks: true }), 0)}</div>;
    } catch {
      // The text is nested too deep for the lexer.
    }
    return <div class="plain">{text}</div>;
  }, [text]);
}

function blocks(tokens: Token[], depth: number): ComponentChild[] {
  return tokens.map((token, key) => (depth > MAX_DEPTH ? token.raw : block(token, key, depth + 1)));
}

function block(token: Token, key: number, depth: number): ComponentChild {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      // The page has its own h1 and h2.
      const Heading = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Heading key={key}>{inline(token.tokens ?? [], depth)}</Heading>;
    }
    case "paragraph":
      return <p key={key}>{inline(token.tokens ?? [], depth)}</p>;
    case "code":
      return <Code key={key} text={token.text} language={(token as Tokens.Code).lang ?? ""} />;
    case "blockquote":
      return <blockquote key={key}>{blocks(token.tokens ?? [], depth)}</blockquote>;
    case "hr":
      return <hr key={key} />;
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item, at) => <li key={at}>{blocks(item.tokens, depth)}</li>);
      return list.ordered ? (
        <ol key={key} start={Number(list.start) || 1}>
          {items}
        </ol>
      ) : (
        <ul key={key}>{items}</ul>
      );
    }
    case "table": {
      const table = token as Tokens.Table;
      return (
        <div class="scroll" key={key} tabIndex={0} role="region" aria-label="Table in the answer">
          <table>
            <thead>
              <tr>
                {table.header.map((cell, at) => (
                  <th key={at} scope="col">
                    {inline(cell.tokens, depth)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {table.rows.map((row, at) => (
                <tr key={at}>
                  {row.map((cell, column) => (
                    <td key={column}>{inline(cell.tokens, depth)}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      );
    }
    case "text":
      return <span key={key}>{token.tokens ? inline(token.tokens, depth) : unescaped(token.text)}</span>;
    default:
      return (
        <span key={key} class="plain">
          {token.raw}
        </span>
      );
  }
}

function inline(tokens: Token[], depth: number): ComponentChild[] {
  return tokens.map((token, key) => {
    if (depth > MAX_DEPTH) return token.raw;
    switch (token.type) {
      case "strong":
        return <strong key={key}>{inline(token.tokens ?? [], depth + 1)}</strong>;
      case "em":
        return <em key={key}>{inline(token.tokens ?? [], depth + 1)}</em>;
      case "del":
        return <del key={key}>{inline(token.tokens ?? [], depth + 1)}</del>;
      case "codespan":
        return <code key={key}>{token.text}</code>;
      case "br":
        return <br key={key} />;
      case "link":
      case "image":
        return <Link key={key} href={token.href} text={token.text || token.href} />;
      case "text":
        return token.tokens ? <span key={key}>{inline(token.tokens, depth + 1)}</span> : unescaped(token.text);
      case "escape":
        return unescaped(token.text);
      default:
        return token.raw;
    }
  });
}

function Link({ href, text }: { href: string; text: string }) {
  return LINKED.test(href) ? (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow">
      {text}
    </a>
  ) : (
    <>{text}</>
  );
}

export function Code({ text, language }: { text: string; language: string }) {
  const [done, setDone] = useState("");
  async function copy() {
    setDone(await copyText(text).then(() => "Copied", () => "Not copied"));
    setTimeout(() => setDone(""), 1500);
  }
  return (
    <div class="code">
      <div class="code-head">
        <span>{language || "text"}</span>
        <button type="button" class="small" onClick={copy}>
          {done || "Copy"}
        </button>
      </div>
      <pre tabIndex={0}>
        <code>{text}</code>
      </pre>
    </div>
  );
}

const ENTITIES: Record<string, string> = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&amp;": "&" };

/** Character references of Markdown's text; there are none in code. */
function unescaped(text: string): string {
  return text.replace(/&(?:lt|gt|quot|#39|amp);/g, (entity) => ENTITIES[entity]!);
}
