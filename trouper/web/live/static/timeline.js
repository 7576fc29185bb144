// The batch over time: a lane a row, what runs now at the right edge.

import { colour, widthOf } from "./dom.js";
import { brief } from "./format.js";
import { WINDOW_S } from "./lanes.js";

const LEAST_LANES = 8;
const AXIS = 18;
const FONT = '11px ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, monospace';

export class Timeline {
  #canvas;
  #colours = {};
  #lanes = LEAST_LANES;
  #width;
  #still = null; // What stands there, if nothing of it moves.

  constructor(canvas) {
    this.#canvas = canvas;
    this.#width = widthOf(canvas);
    this.recolour();
  }

  recolour() {
    this.#still = null;
    for (const name of ["decode", "prefill", "cached", "queue", "line", "soft", "text", "card"]) this.#colours[name] = colour(name);
  }

  draw(lanes, at) {
    const width = this.#width(), wide = width > 560, still = lanes.bars.length ? null : width;
    if (still !== null && still === this.#still) return;
    this.#still = still;
    const wanted = Math.max(LEAST_LANES, lanes.count);
    // It grows at once and shrinks slowly, so that what is below does not jump.
    this.#lanes = wanted > this.#lanes || wanted < this.#lanes - 4 ? wanted : this.#lanes;
    const step = this.#lanes <= 12 ? 19 : this.#lanes <= 32 ? 13 : Math.max(3, Math.floor(416 / this.#lanes));
    const height = this.#lanes * step + AXIS;
    const pen = this.#fit(width, height);
    const left = step < 13 ? 4 : wide ? 74 : 62, right = step < 13 ? 4 : wide ? 78 : 62;
    const x = (time) => left + (width - left - right) * (1 - (at - time) / WINDOW_S);
    this.#grid(pen, x, at, left, width - right, height);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left - right, height);
    pen.clip();
    for (const bar of lanes.bars) this.#bar(pen, bar, x, at, bar.lane * step + 2, Math.max(2, step - 4), left);
    pen.restore();
    if (step >= 13) for (const bar of lanes.bars) if (bar.end === null) this.#label(pen, bar, bar.lane * step + step / 2, left, width - right, wide);
  }

  #fit(width, height) {
    const ratio = devicePixelRatio || 1, canvas = this.#canvas;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    return pen;
  }

  #grid(pen, x, at, left, right, height) {
    pen.strokeStyle = this.#colours.line;
    pen.fillStyle = this.#colours.soft;
    pen.lineWidth = 1;
    for (let back = 0; back <= WINDOW_S; back += 10) {
      const place = Math.min(right - 0.5, Math.max(left + 0.5, Math.round(x(at - back)) + 0.5));
      pen.beginPath();
      pen.moveTo(place, 0);
      pen.lineTo(place, height - AXIS + 3);
      pen.stroke();
      pen.textAlign = back === 0 ? "right" : back === WINDOW_S ? "left" : "center";
      pen.fillText(back ? `-${back} s` : "now", place, height - AXIS / 2 + 1);
    }
  }

  #bar(pen, bar, x, at, top, height, left) {
    const begin = Math.max(left, x(bar.since)), end = x(bar.end ?? at);
    const turn = Math.min(end, Math.max(begin, x(bar.first ?? bar.end ?? at)));
    pen.globalAlpha = bar.end === null ? 1 : 0.5;
    const shown = Math.max(turn - begin, Math.min(3, end - begin));
    const cached = bar.prompt ? shown * (bar.cached / bar.prompt) : 0, strip = Math.max(1, Math.round(height * 0.4));
    pen.fillStyle = this.#colours.prefill;
    pen.fillRect(begin, top, cached, height - strip);
    pen.fillRect(begin + cached, top, shown - cached, height);
    pen.fillStyle = this.#colours.cached;
    pen.fillRect(begin, top + height - strip, cached, strip);
    pen.fillStyle = this.#colours.decode;
    pen.fillRect(begin + shown, top, Math.max(0, end - begin - shown), height);
    for (const [from, to] of bar.pauses) this.#pause(pen, Math.max(left, x(from)), Math.min(end, x(to ?? at)), top, height);
    pen.globalAlpha = 1;
  }

  /** A thin line: nothing was computed. */
  #pause(pen, from, to, top, height) {
    if (to <= from) return;
    const line = Math.max(1, Math.round(height * 0.25));
    pen.clearRect(from, top, to - from, height);
    pen.fillStyle = this.#colours.queue;
    pen.fillRect(from, top + Math.round((height - line) / 2), to - from, line);
  }

  #label(pen, bar, middle, left, right, wide) {
    pen.textAlign = "left";
    pen.fillStyle = this.#colours.soft;
    pen.fillText(brief(bar.id, wide ? 10 : 9), 0, middle);
    pen.textAlign = "right";
    const place = right + (wide ? 76 : 60), [kind, done, all] = progress(bar, wide);
    pen.fillStyle = this.#colours[kind];
    pen.fillText(all == null ? done : `${done}/${all}`, place, middle);
  }
}

/** [colour, what is done, of how much] of a row: what it prefills or has to get back, or its answer. */
function progress(bar, wide) {
  if (bar.state === "restoring") return ["prefill", bar.restored, bar.toRestore];
  if (bar.state === "preempted") return bar.restored ? ["soft", bar.restored, bar.toRestore] : ["soft", wide ? "preempted" : "paused"];
  return bar.first == null ? ["prefill", bar.prefilled, bar.prompt] : ["text", bar.generated, bar.most];
}
