// The API key: in this tab only, sent as a header, never part of an address.

const PLACE = "trouper-key";

export const needed = document.documentElement.dataset.keyed === "true";
export const get = () => sessionStorage.getItem(PLACE) ?? "";
export const keep = (key) => sessionStorage.setItem(PLACE, key);
export const forget = () => sessionStorage.removeItem(PLACE);

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
