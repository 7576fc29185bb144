// KV memory: what rows and cached blocks hold of their limit, and the banks that the rows are in.

import { make, parts, say } from "./dom.js";
import { bytes, count, plural } from "./format.js";

export class Kv {
  #place;
  #note;
  #shown = "";

  constructor(place, note) {
    this.#place = place;
    this.#note = note;
  }

  show({ scheduler: facts, cache, banks }) {
    const { kv_row_bytes: rows, kv_limit_bytes: limit, preemptions, preempted_sequences: preempted } = facts;
    const told = JSON.stringify([rows, limit, preemptions, preempted, cache.bytes, banks]);
    if (told === this.#shown) return;
    this.#shown = told;
    say(this.#note, [limit ? "" : "no limit is known", preemptions ? plural(preemptions, "preemption") : "",
      preempted ? `${plural(preempted, "request")} waiting to return` : ""].filter(Boolean).join(", "));
    const list = banks.length ? make("ul", { class: "banks", "aria-label": "Banks" }, ...banks.map(bank))
      : make("p", { class: "soft banks" }, "No row is in use.");
    this.#place.replaceChildren(total(rows, cache.bytes, limit), list);
  }
}

function total(rows, cached, limit) {
  const free = Math.max(0, limit - rows - cached);
  const bound = limit ? `${bytes(rows + cached)} of ${bytes(limit)}` : bytes(rows + cached);
  return make("div", { class: "kv-total" },
    make("p", { class: "ends" }, make("span", {}, `${bytes(rows)} of rows, ${bytes(cached)} cached`), make("b", {}, bound)),
    make("div", { class: "meter", "aria-hidden": "true" }, ...parts([["decode", rows], ["cached", cached], ["", free]])));
}

/** A part of its meter for each slot, as far as they can be told apart. */
function bank({ max_tokens: longest, capacity_tokens: capacity, rows, slots, bytes: size }) {
  const cells = slots <= 32 ? Array.from({ length: slots }, (_, slot) => make("div", { class: "cell", "data-kind": slot < rows ? "decode" : null }))
    : parts([["decode", rows], ["", slots - rows]]);
  return make("li", { class: "bank" },
    make("p", { class: "ends" }, make("b", {}, longest === null ? "rows of any length" : `up to ${plural(longest, "token")}`), make("span", {}, bytes(size))),
    make("div", { class: slots <= 32 ? "meter slots" : "meter", "aria-hidden": "true" }, ...cells),
    make("p", { class: "ends soft" }, make("span", {}, `${count(rows)} of ${plural(slots, "slot")}`), make("span", {}, capacity ? `${count(capacity)} tokens long` : "")));
}
