// Renders Markdown as elements, token by token: no HTML is ever parsed, so no text of a model becomes markup or script.
// Pictures become links: nothing is loaded from elsewhere.
import { Lexer, type Token, type Tokens } from "marked";
import type { ComponentChild } from "preact";
import { useState } from "preact/hooks";
import { copyText } from "./clipboard";

const LINKED = /^(https?:|mailto:)/i;

export function Markdown({ text }: { text: string }) {
  let tokens: Token[];
  try {
    tokens = Lexer.lex(text, { gfm: true, breaks: true });
  } catch {
    return <p class="plain">{text}</p>;
  }
  return <div class="markdown">{blocks(tokens)}</div>;
}

function blocks(tokens: Token[]): ComponentChild[] {
  return tokens.map((token, key) => block(token, key));
}

function block(token: Token, key: number): ComponentChild {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      // The page has its own h1 and h2.
      const Heading = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Heading key={key}>{inline(token.tokens ?? [])}</Heading>;
    }
    case "paragraph":
      return <p key={key}>{inline(token.tokens ?? [])}</p>;
    case "code":
      return <Code key={key} text={token.text} language={(token as Tokens.Code).lang ?? ""} />;
    case "blockquote":
      return <blockquote key={key}>{blocks(token.tokens ?? [])}</blockquote>;
    case "hr":
      return <hr key={key} />;
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item, at) => <li key={at}>{blocks(item.tokens)}</li>);
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
                    {inline(cell.tokens)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {table.rows.map((row, at) => (
                <tr key={at}>
                  {row.map((cell, column) => (
                    <td key={column}>{inline(cell.tokens)}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      );
    }
    case "text":
      return <span key={key}>{token.tokens ? inline(token.tokens) : unescaped(token.text)}</span>;
    default:
      return (
        <span key={key} class="plain">
          {token.raw}
        </span>
      );
  }
}

function inline(tokens: Token[]): ComponentChild[] {
  return tokens.map((token, key) => {
    switch (token.type) {
      case "strong":
        return <strong key={key}>{inline(token.tokens ?? [])}</strong>;
      case "em":
        return <em key={key}>{inline(token.tokens ?? [])}</em>;
      case "del":
        return <del key={key}>{inline(token.tokens ?? [])}</del>;
      case "codespan":
        return <code key={key}>{token.text}</code>;
      case "br":
        return <br key={key} />;
      case "link":
      case "image":
        return <Link key={key} href={token.href} text={token.text || token.href} />;
      case "text":
        return token.tokens ? <span key={key}>{inline(token.tokens)}</span> : unescaped(token.text);
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
  const [copied, setCopied] = useState(false);
  async function copy() {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  }
  return (
    <div class="code">
      <div class="code-head">
        <span>{language || "text"}</span>
        <button type="button" class="small" onClick={copy}>
          {copied ? "Copied" : "Copy"}
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
