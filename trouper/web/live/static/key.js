// The API key: in this tab only, sent as a header, never part of an address.

const PLACE = "trouper-key";

export const needed = document.documentElement.dataset.keyed === "true";
export const get = () => sessionStorage.getItem(PLACE) ?? "";
export const keep = (key) => sessionStorage.setItem(PLACE, key);
export const forget = () => sessionStorage.removeItem(PLACE);

export function headers(more = {}) {
  return get() ? { ...more, Authorization: `Bearer ${get()}` } : more;
}

export class WrongKey extends Error {}
