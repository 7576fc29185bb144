// The rows of the batch as a table, for whoever cannot see the timeline, or wants the numbers.

import { make } from "./dom.js";
import { brief, count, seconds } from "./format.js";

const HEADS = ["Request", "State", "Priority", "Prompt", "Cached", "Prefilled", "Answer", "At most", "Seconds"];

export class Rows {
  #details;
  #place;

  constructor(details) {
    this.#details = details;
    this.#place = details.querySelector("div");
  }

  show(batch, waits, at) {
    if (!this.#details.open) return;
    if (!batch.rows.length && !waits.length) {
      this.#place.replaceChildren(make("p", { class: "soft" }, "No row is in use."));
      return;
    }
    const head = make("tr", {}, ...HEADS.map((name, place) => make("th", { scope: "col", class: place > 1 ? "number" : null }, name)));
    const body = batch.rows.map((row) => make("tr", {},
      make("th", { scope: "row", class: "mono", title: row.request_id }, brief(row.request_id)),
      make("td", {}, state(row)),
      ...[count(row.priority), count(row.prompt_tokens), count(row.cached_tokens), count(row.prefilled_tokens), count(row.generated_tokens),
        count(row.max_tokens), seconds(at - row.since)].map((text) => make("td", { class: "number" }, text))));
    this.#place.replaceChildren(
      make("table", { "aria-label": "Rows of the batch" }, make("thead", {}, head), make("tbody", {}, ...body)),
      ...waits.map((one) => make("p", {}, `${brief(one.request_id)} ${one.message} (${seconds(at - one.since)} s)`)));
  }
}

/** A preempted row says how much of what it had is back. */
function state({ state: name, restored_tokens: restored, tokens_to_restore: all }) {
  return restored ? `${name}, ${count(restored)} of ${count(all)}` : name;
}
