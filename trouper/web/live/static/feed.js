// The stream of snapshots. It comes back by itself, and rests while nobody sees the page.

import { WrongKey, headers } from "./key.js";
import { Refused, problemOf } from "./problem.js";
import { events } from "./sse.js";

const PAUSES_MS = [300, 600, 1200, 2500, 5000];
/** Silence after which a connection is taken for dead: there is a snapshot every two seconds, whatever happens. */
const SILENCE_MS = 5000;

export class Feed {
  #open = false; // Whether it may run at all.
  #running = null;
  #on;

  /** on: {snapshot(data), recent(data), viewer(data), away(), locked(error)} */
  constructor(on) {
    this.#on = on;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#rest() : this.#go()));
    addEventListener("pagehide", () => this.#rest());
    addEventListener("pageshow", () => this.#go());
  }

  start() {
    this.#open = true;
    this.#go();
  }

  stop() {
    this.#open = false;
    this.#rest();
  }

  #go() {
    if (!this.#open || this.#running || document.hidden) return;
    this.#running = new AbortController();
    this.#run(this.#running.signal);
  }

  #rest() {
    this.#running?.abort();
    this.#running = null;
  }

  async #run(stopped) {
    for (let failures = 0; !stopped.aborted;) {
      try {
        await this.#read(stopped, () => { failures = 0; });
      } catch (error) {
        if (stopped.aborted) return;
        if (error instanceof WrongKey || error instanceof Refused) {
          this.stop();
          this.#on.locked(error);
          return;
        }
      }
      if (stopped.aborted) return;
      this.#on.away();
      await pause(PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)], stopped);
      failures += 1;
    }
  }

  async #read(stopped, heard) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    try {
      const response = await fetch("v1/live", {
        headers: headers({ Accept: "text/event-stream" }), cache: "no-store",
        signal: AbortSignal.any([stopped, silence.signal]),
      });
      if (response.status === 401) throw new WrongKey();
      if (response.status === 403) throw new Refused(await problemOf(response));
      if (!response.ok) throw new Error(`status ${response.status}`);
      for await (const { event, data } of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        heard();
        this.#on[event]?.(JSON.parse(data));
      }
    } finally {
      clearTimeout(timer);
    }
  }
}

function pause(ms, stopped) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stopped.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
