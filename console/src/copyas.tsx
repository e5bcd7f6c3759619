import { useState } from "preact/hooks";
import type { Body } from "./chat";
import { copyText } from "./clipboard";
import { snippet, type Language } from "./snippets";

/** Copies the chat as code in a language. */
export function CopyAs(props: { body: () => Body; engine: string; needsKey: boolean; onProblem: (text: string) => void }) {
  const [copied, setCopied] = useState("");
  async function copy(language: Language) {
    try {
      await copyText(snippet(language, props.body(), location.origin, props.needsKey, props.engine));
      setCopied(language);
      setTimeout(() => setCopied(""), 1500);
    } catch (error) {
      props.onProblem((error as Error).message);
    }
  }
  return (
    <span class="copy-as" role="group" aria-label="Copy the chat as code">
      Copy as
      {(["curl", "Python", "JavaScript"] as Language[]).map((language) => (
        <button type="button" class="small" key={language} onClick={() => void copy(language)}>
          {copied === language ? "copied" : language}
        </button>
      ))}
    </span>
  );
}
