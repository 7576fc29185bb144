// Requests that ended, the newest first.

import { make, parts } from "./dom.js";
import { brief, clock, count, seconds } from "./format.js";
import { needed } from "./key.js";
import { recordKey } from "./lanes.js";

const KEPT = 50;

export class Requests {
  #body;
  #none;
  #records = new Map();

  constructor(table, none) {
    this.#body = table.querySelector("tbody");
    this.#none = none;
    table.querySelector("[data-column=key]").hidden = !needed;
  }

  clear() {
    this.#records.clear();
    this.#body.replaceChildren();
  }

  /** Those of all models are kept, those of `model` are shown. */
  add(records, model) {
    let changed = false;
    for (const record of records) {
      const key = recordKey(record);
      if (this.#records.has(key)) continue;
      this.#records.set(key, { record, row: null });
      changed = true;
    }
    while (this.#records.size > 4 * KEPT) this.#records.delete(this.#records.keys().next().value);
    if (changed) this.show(model);
  }

  show(model) {
    const shown = [...this.#records.values()].filter(({ record }) => record.model === model).slice(-KEPT).reverse();
    for (const one of shown) one.row ??= row(one.record);
    this.#body.replaceChildren(...shown.map((one) => one.row));
    this.#none.hidden = shown.length > 0;
  }
}

function row(one) {
  const number = (text) => make("td", { class: "number" }, text);
  return make("tr", {},
    make("td", {}, clock(one.ended_at + one.unix_offset)),
    make("td", { class: "mono", title: `${one.request_id} ${one.endpoint}` }, brief(one.request_id)),
    needed ? make("td", {}, one.key) : null,
    number(count(one.prompt_tokens)), number(count(one.cached_tokens)), number(count(one.generated_tokens)),
    make("td", {}, phases(one)), number(seconds(one.ended_at - one.arrived_at)),
    make("td", { "data-end": one.reason, title: one.code || null }, one.reason));
}

/** Queue, prefill and decode as shares of the whole; in words for whoever cannot see them. */
function phases(one) {
  const began = one.admitted_at ?? one.ended_at, first = one.first_token_at ?? one.ended_at, last = one.last_token_at ?? first;
  const shares = { queue: began - one.arrived_at, prefill: first - began, decode: last - first };
  const said = Object.entries(shares).map(([name, s]) => `${name} ${seconds(Math.max(0, s))} s`).join(", ");
  return make("div", { class: "phases", role: "img", "aria-label": said, title: said }, ...parts(Object.entries(shares)));
}
