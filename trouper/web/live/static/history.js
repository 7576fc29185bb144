// What one model did of late: counters become rates over the last two seconds.

const KEPT = 120; // two minutes of snapshots
const WINDOW_S = 2;

export class History {
  /** Columns as uPlot takes them. */
  columns = { at: [], generated: [], computed: [], cached: [], median: [], longest: [] };
  steps = 0;
  #seen = [];

  /** `at` is the server's clock, `now` ours. */
  add(model, at, now) {
    const facts = model.scheduler, last = this.#seen.at(-1);
    if (last && (!facts || facts.tokens_generated < last.facts.tokens_generated || at < last.at || at - last.at > 3)) {
      this.#seen = [];
      if (this.columns.at.length) this.#push(now - 0.001, null, null, null, null, null);
    }
    if (!facts) return;
    this.#seen.push({ at, facts });
    while (this.#seen.length > 2 && at - this.#seen[1].at >= WINDOW_S) this.#seen.shift();
    if (this.#seen.length < 2) return;
    const first = this.#seen[0];
    const rate = (name) => (facts[name] - first.facts[name]) / (at - first.at);
    this.steps = rate("steps");
    this.#push(now, rate("tokens_generated"), rate("total_prefill_tokens"), rate("total_cached_tokens"), ...this.#gaps(model.batch));
  }

  /** In ms. Steps may be longer than looks are apart: while streams run, the last gap stands until the next. */
  #gaps({ gap_median_s: median, gap_longest_s: longest, rows }) {
    if (median != null) return [median * 1000, longest * 1000];
    return rows.some((row) => row.first_token_at != null) ? [this.last("median"), this.last("longest")] : [null, null];
  }

  /** The newest value of a column that is one. */
  last(name) {
    return this.columns[name].at(-1) ?? null;
  }

  #push(...values) {
    Object.values(this.columns).forEach((column, place) => {
      column.push(values[place]);
      if (column.length > KEPT) column.shift();
    });
  }
}
