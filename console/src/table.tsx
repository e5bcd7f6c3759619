import { toChildArray, type ComponentChildren } from "preact";

/** A table that scrolls by itself where the window is narrow. Its children are rows. */
export function Table(props: {
  label: string;
  columns: string[];
  children: ComponentChildren;
  /** Stands where there is no row. */
  empty?: string;
  caption?: ComponentChildren;
  class?: string;
}) {
  const { label, columns, children, empty, caption } = props;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table class={props.class}>
        {caption && <caption>{caption}</caption>}
        <thead>
          <tr>
            {columns.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {children}
          {empty && !toChildArray(children).length && (
            <tr>
              <td colSpan={columns.length}>{empty}</td>
            </tr>
          )}
        </tbody>
      </table>
    </div>
  );
}
