// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** 0.031, 0.31, 3.1, 31, 310: two digits that matter. */
export function short(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value >= 100) return whole.format(value);
  if (value >= 10) return value.toFixed(value % 1 < 0.05 ? 0 : 1);
  return value === 0 ? "0" : value.toPrecision(2).replace(/\.0$/, "");
}

/** [number, unit] of a size in bytes. */
export function size(bytes) {
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < 4) { value /= 1000; unit += 1; }
  return [unit && value < 10 ? value.toFixed(1) : Math.round(value).toString(), ["B", "kB", "MB", "GB", "TB"][unit]];
}

export const bytes = (value) => size(value).join(" ");

export const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part && part / all < 0.1 ? 1 : 0)} %` : "–");

export const seconds = (value) => (value == null ? "–" : value.toFixed(value < 10 ? 2 : 1));

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

export function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

/** Said of every request of its kind. */
const PREFIX = /^(chatcmpl-|cmpl-|resp_|msg_)/;
/** A further choice of a request, or one of a client's that counts: 973851bb-2, 973851bb-2-1, job.0007. */
const NUMBER = /[-_.:]\d{1,4}$|(-\d{1,2}){2}$/;
/** An id that was drawn here: any part of it tells it from others. */
const DRAWN = /^[0-9a-f]{32}$/;

/** Enough of an id to tell it from others: its first eight characters and its number. Of a long one that a client made and that has
 * none, both ends: what it has in common with the others is mostly at the beginning. `most` characters at most, from nine. */
export function brief(id, most = 10) {
  const own = id.replace(PREFIX, "");
  if (own.length <= most) return own;
  const number = own.match(NUMBER)?.[0] ?? "", name = own.slice(0, own.length - number.length);
  if (!number && name.length > 16 && !DRAWN.test(name)) return `${name.slice(0, 4)}…${name.slice(5 - most)}`;
  return name.slice(0, Math.min(8, most - number.length)) + number;
}

/** A model that was named by its directory goes by the last part. */
export const modelName = (name) => (name.startsWith("/") ? name.split("/").findLast(Boolean) : name);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
