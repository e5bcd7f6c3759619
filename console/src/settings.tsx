import { DEFAULTS, type Settings } from "./chat";

/** The settings of all chats. */
export function SettingsForm({ settings, onChange }: { settings: Settings; onChange: (part: Partial<Settings>) => void }) {
  const text = (name: keyof Settings, label: string, hint: string) => (
    <label>
      {label}
      <input
        inputMode="decimal"
        placeholder={hint}
        value={settings[name] as string}
        onInput={(event) => onChange({ [name]: event.currentTarget.value })}
      />
    </label>
  );
  return (
    <details class="settings card" open={matchMedia("(min-width: 60rem)").matches}>
      <summary>Settings</summary>
      <label>
        System prompt
        <textarea rows={3} value={settings.system} onInput={(event) => onChange({ system: event.currentTarget.value })} />
      </label>
      <div class="grid">
        {text("temperature", "Temperature", "model's own")}
        {text("topP", "Top-p", "1")}
        {text("maxTokens", "Most tokens", "as many as fit")}
        {text("seed", "Seed", "random")}
      </div>
      <label>
        Thinking
        <select value={settings.thinking} onChange={(event) => onChange({ thinking: event.currentTarget.value as Settings["thinking"] })}>
          <option value="">as the model does</option>
          <option value="medium">on</option>
          <option value="none">off</option>
        </select>
      </label>
      <label>
        Tools (JSON)
        <textarea
          rows={3}
          spellcheck={false}
          placeholder='[{"name": "weather", "parameters": {…}}]'
          value={settings.tools}
          onInput={(event) => onChange({ tools: event.currentTarget.value })}
        />
      </label>
      <label>
        Tool choice
        <select value={settings.toolChoice} onChange={(event) => onChange({ toolChoice: event.currentTarget.value })}>
          <option>auto</option>
          <option>required</option>
          <option>none</option>
        </select>
      </label>
      <label>
        JSON schema of the answer
        <textarea
          rows={3}
          spellcheck={false}
          placeholder='{"type": "object", "properties": {…}}'
          value={settings.schema}
          onInput={(event) => onChange({ schema: event.currentTarget.value })}
        />
      </label>
      <label class="check">
        <input type="checkbox" checked={settings.logprobs} onChange={(event) => onChange({ logprobs: event.currentTarget.checked })} />
        Log probabilities (point at a token)
      </label>
      <button type="button" class="small" onClick={() => onChange(DEFAULTS)}>
        Reset
      </button>
    </details>
  );
}
