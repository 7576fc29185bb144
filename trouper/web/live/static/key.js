// The API key: in this tab only, sent as a header, never part of an address.

const PLACE = "trouper-key";

export const needed = document.documentElement.dataset.keyed === "true";
/** Of a browser that keeps nothing, and throws where it is asked to (cookies are blocked): until the page is left. */
let unkept = "";

export function get() {
  try { return sessionStorage.getItem(PLACE) ?? ""; } catch { return unkept; }
}

export function keep(key) {
  try { sessionStorage.setItem(PLACE, key); } catch { unkept = key; }
}

export function forget() {
  unkept = "";
  try { sessionStorage.removeItem(PLACE); } catch { /* as above */ }
}

/** Whether it can be one: a server takes no other, since clients do not agree on how more than ASCII is sent. */
export const fits = (key) => /^[\x20-\x7e]+$/.test(key);

/** Throws `WrongKey`, not the TypeError of a fetch, which is a server that is away. */
export function headers(more = {}) {
  if (get() && !fits(get())) throw new WrongKey();
  return get() ? { ...more, Authorization: `Bearer ${get()}` } : more;
}

export const WRONG = "The key is wrong.";

export class WrongKey extends Error {
  message = WRONG;
}
