// The line of figures at the top.

import { make, say } from "./dom.js";
import { count, percent, short, size } from "./format.js";

const NAMES = {
  generated: "answer tok/s", computed: "prompt tok/s", gap: "token gap", running: "running", waiting: "waiting",
  answered: "answered", cached: "from cache", memory: "memory",
};

export class Figures {
  #cells = {};

  constructor(list) {
    for (const [key, name] of Object.entries(NAMES)) {
      const value = make("span"), unit = make("b"), bound = make("span"), small = make("small", {}, unit, bound);
      list.append(make("div", { id: `figure-${key}` }, make("dt", {}, name), make("dd", {}, value, small)));
      this.#cells[key] = (text, of = "", most = "") => { say(value, text); say(unit, of); say(bound, most && ` of ${most}`); };
    }
    this.blank();
  }

  blank() {
    for (const tell of Object.values(this.#cells)) tell("–");
  }

  show(model, rates) {
    const { scheduler: facts, memory, card } = model, cells = this.#cells;
    const prompts = facts.total_prefill_tokens + facts.total_cached_tokens;
    const gap = rates.last("median");
    cells.generated(short(rates.last("generated")));
    cells.computed(short(rates.last("computed")));
    cells.gap(short(gap), gap == null ? "" : "ms");
    cells.running(count(facts.active_sequences), "", count(card.rows));
    cells.answered(count(facts.requests_completed));
    cells.waiting(count(facts.queued_requests), "", count(card.queue));
    cells.cached(...percent(facts.total_cached_tokens, prompts).split(" "));
    const [used, unit] = size(memory.active_bytes);
    cells.memory(used, unit, memory.limit_bytes > memory.active_bytes ? size(memory.limit_bytes).join(" ") : "");
  }
}
