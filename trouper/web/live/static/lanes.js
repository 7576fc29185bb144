// Which request is shown in which lane, from when to when. Pure: times are the server's.

export const WINDOW_S = 30;
const SAME_S = 0.01;

const keyOf = (row) => `${row.row} ${row.since}`;

/** What tells a record from others, also from those of requests of the same name. */
export const recordKey = (one) => `${one.request_id} ${one.arrived_at} ${one.ended_at} ${one.admitted_at}`;

/** Note whether it is preempted at that time: [from, to] of each pause, without an end while it lasts. */
function pause(bar, preempted, at) {
  const last = bar.pauses.at(-1), lasts = last?.[1] === null;
  if (preempted && !lasts) bar.pauses.push([at, null]);
  if (!preempted && lasts) last[1] = at;
}

export class Lanes {
  bars = [];
  #server = null;

  /** Take what a snapshot says of one model. */
  update(server, at, rows, ended) {
    if (server !== this.#server) this.bars = [];
    this.#server = server;
    this.bars = this.bars.filter((bar) => bar.end === null || bar.end > at - WINDOW_S);
    const keys = new Set(rows.map(keyOf)), running = new Set(rows.map((row) => this.#row(row, keys, at)));
    for (const record of ended) this.#record(record, at);
    for (const bar of this.bars) if (bar.end === null && !running.has(bar)) bar.end = at;
  }

  get count() {
    return this.bars.reduce((most, bar) => Math.max(most, bar.lane + 1), 0);
  }

  /** A row that was preempted and returned has another number: its bar is the one of that request that no row has. */
  #row(row, keys, at) {
    const key = keyOf(row);
    let bar = this.bars.find((one) => one.key === key)
      ?? this.bars.find((one) => (one.key === null || !(one.known || keys.has(one.key))) && one.id === row.request_id
        && Math.abs(one.since - row.since) < SAME_S);
    if (!bar) {
      bar = { key, id: row.request_id, since: row.since, end: null, known: false, pauses: [], lane: this.#free(row.since) };
      this.bars.push(bar);
    }
    bar.key = key;
    if (!bar.known) {
      bar.end = null;
      Object.assign(bar, {
        first: row.first_token_at, prompt: row.prompt_tokens, cached: row.cached_tokens,
        prefilled: row.prefilled_tokens, generated: row.generated_tokens, most: row.max_tokens,
        state: row.state, restored: row.restored_tokens, toRestore: row.tokens_to_restore,
      });
      pause(bar, row.state === "preempted", at);
    }
    return bar;
  }

  /** What a record says is exact, and the last word. It comes again at the beginning, and where snapshots were missed. */
  #record(record, at) {
    const end = record.last_token_at ?? record.ended_at, key = recordKey(record);
    if (record.admitted_at == null || end < at - WINDOW_S || this.bars.some((one) => one.record === key)) return;
    let bar = this.bars.find((one) => !one.known && one.id === record.request_id
      && Math.abs(one.since - record.admitted_at) < SAME_S);
    if (!bar) {
      bar = { key: null, id: record.request_id, since: record.admitted_at, pauses: [], lane: this.#free(record.admitted_at) };
      this.bars.push(bar);
    }
    Object.assign(bar, {
      known: true, record: key, end, first: record.first_token_at, prompt: record.prompt_tokens, cached: record.cached_tokens,
      prefilled: record.prompt_tokens, generated: record.generated_tokens, most: record.max_tokens, reason: record.reason,
    });
    pause(bar, false, end);
  }

  /** The first lane where nobody is at that time. */
  #free(since) {
    const taken = new Set(this.bars.filter((bar) => bar.end === null || bar.end > since).map((bar) => bar.lane));
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
  }
}
