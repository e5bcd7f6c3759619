// Browser storage that may be blocked or full: the page works without it, and forgets.

type Area = "localStorage" | "sessionStorage";

/** Returns null if there is nothing by this name, or no storage. */
export function load(area: Area, name: string): string | null {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

/** Removes the item if `text` is empty. Returns false if the browser keeps nothing, or no more. */
export function save(area: Area, name: string, text: string): boolean {
  try {
    if (text) window[area].setItem(name, text);
    else window[area].removeItem(name);
    return true;
  } catch {
    return false;
  }
}
