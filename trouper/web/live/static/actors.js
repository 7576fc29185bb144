// The graph of actors with each channel's fill. It is laid out for the width that there is.

import { draw, mark, say, widthOf } from "./dom.js";
import { bytes, count, plural, short } from "./format.js";

const NODES = ["clients", "RequestIntake", "Scheduler", "RankMirror", "ModelStepper", "SSDWriter", "CacheJanitor"];
const NODE_H = 44;

/** Boxes as [x, y, width]; wires as points; channels as [x, y, how text stands]. */
function across(width) {
  const box = Math.min(132, Math.floor((width - 4 * 56) / 5)), gap = (width - 5 * box) / 4;
  const at = (place) => Math.round(place * (box + gap)), top = 4, low = 128, right = NODE_H / 2 + top;
  const boxes = {}, wires = {}, labels = {};
  NODES.slice(0, 5).forEach((name, place) => { boxes[name] = [at(place), top, box]; });
  boxes.SSDWriter = [at(2), low, box];
  boxes.CacheJanitor = [at(3), low, box];
  ["requests", "admitted", "plans", "mirrored"].forEach((name, place) => {
    wires[name] = [[at(place) + box, right], [at(place + 1), right]];
    labels[name] = [at(place) + box + gap / 2, right, "middle"];
  });
  const under = top + NODE_H, back = under + 26, middle = at(2) + box / 2;
  wires.results = [[at(4) + box / 2, under], [at(4) + box / 2, back], [middle + box / 4, back], [middle + box / 4, under]];
  labels.results = [at(3) + box / 2 + gap, back, "middle"];
  wires.orders = [[middle - box / 4, under], [middle - box / 4, low]];
  labels.orders = [middle - box / 4 - 8, (under + low) / 2 + 10, "end"];
  wires.news = [[middle, low], [middle, under]];
  wires.tidy = [[at(3), low + NODE_H / 2], [at(2) + box, low + NODE_H / 2]];
  wires.replies = [[at(2) + 10, under], [at(2) + 10, back], [at(0) + box / 2, back], [at(0) + box / 2, under]];
  return { boxes, wires, labels, height: low + NODE_H + 4 };
}

function down(width) {
  const box = Math.min(176, width - 130), x = Math.round((width - box) / 2), step = 78, boxes = {}, wires = {}, labels = {};
  const y = (place) => 4 + place * step, middle = x + box / 2;
  ["clients", "RequestIntake", "Scheduler", "RankMirror", "ModelStepper"].forEach((name, place) => { boxes[name] = [x, y(place), box]; });
  const half = Math.floor((width - 16) / 2), low = y(5) + 18;
  boxes.SSDWriter = [0, low, half];
  boxes.CacheJanitor = [width - half, low, half];
  ["requests", "admitted", "plans", "mirrored"].forEach((name, place) => {
    wires[name] = [[middle, y(place) + NODE_H], [middle, y(place + 1)]];
    labels[name] = [middle + 10, y(place) + (NODE_H + step) / 2, "start"];
  });
  const out = x + box + 20, side = x - 22, scheduler = y(2) + NODE_H / 2;
  wires.results = [[x + box, y(4) + NODE_H / 2], [out, y(4) + NODE_H / 2], [out, scheduler], [x + box, scheduler]];
  labels.results = [out - 6, y(3) - 17, "end"];
  wires.replies = [[x, scheduler - 10], [side, scheduler - 10], [side, y(0) + NODE_H / 2], [x, y(0) + NODE_H / 2]];
  wires.orders = [[x, scheduler + 10], [side, scheduler + 10], [side, low]];
  labels.orders = [side + 8, y(4) + NODE_H + 18, "start"];
  wires.tidy = [[width - half, low + NODE_H / 2], [half, low + NODE_H / 2]];
  return { boxes, wires, labels, height: low + NODE_H + 4 };
}

export class Actors {
  #place;
  #available;
  #width = 0;
  #nodes = {};
  #channels = {};
  #capacities = {};
  #svg = null;
  #told = 0;

  constructor(place) {
    this.#place = place;
    this.#available = widthOf(place);
  }

  show(model, rates) {
    const width = this.#available();
    const capacities = Object.fromEntries(model.channels.map((one) => [one.name, one.capacity]));
    if (width !== this.#width || JSON.stringify(capacities) !== JSON.stringify(this.#capacities)) this.#lay(width, capacities);
    this.#fill(model, rates);
  }

  #lay(width, capacities) {
    this.#width = width;
    this.#capacities = capacities;
    const { boxes, wires, labels, height } = width >= 640 ? across(width) : down(width);
    const head = draw("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      draw("path", { d: "M0,1 L7,4 L0,7 z", class: "head" }));
    this.#svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, draw("defs", {}, head));
    for (const points of Object.values(wires)) {
      this.#svg.append(draw("polyline", { class: "wire", points: points.map((one) => one.join(",")).join(" "), "marker-end": "url(#head)" }));
    }
    this.#channels = {};
    for (const [name, place] of Object.entries(labels)) if (name in capacities) this.#channel(name, place, capacities[name]);
    for (const [name, place] of Object.entries(boxes)) this.#node(name, place);
    this.#place.replaceChildren(this.#svg);
  }

  #node(name, [x, y, width]) {
    const fact = draw("text", { class: "fact", x: 10, y: 34 });
    const title = draw("text", { class: "name", x: 20, y: 18 }, name);
    const node = draw("g", { class: "node", transform: `translate(${x},${y})` },
      draw("rect", { width, height: NODE_H, rx: 7 }), draw("circle", { cx: 12, cy: 14, r: 3 }), title, fact);
    this.#svg.append(node);
    this.#nodes[name] = { node, fact };
  }

  /** A row of cells, as many as messages fit; a bar if they are many. */
  #channel(name, [x, y, anchor], capacity) {
    const shown = Math.min(capacity, 16), cell = capacity <= 4 ? 8 : 2.5, step = cell + 1, long = shown * step - 1;
    const left = anchor === "middle" ? x - long / 2 : anchor === "end" ? x - long : x;
    const label = draw("text", { class: "channel", x, y: y - 6, "text-anchor": anchor }, name);
    const cells = Array.from({ length: shown }, (_, place) =>
      draw("rect", { class: "cell", x: left + place * step, y: y + 4, width: cell, height: 6, rx: 1 }));
    const title = draw("title");
    this.#svg.append(draw("g", {}, title, label, ...cells));
    this.#channels[name] = { cells, title, capacity };
  }

  #fill(model, rates) {
    const { scheduler: facts, memory, directory, ranks } = model;
    const states = Object.fromEntries(model.actors.flatMap((one) => one.name.split("+").map((name) => [name, one])));
    const said = {
      clients: plural(facts.active_sequences + facts.queued_requests, "request"),
      RequestIntake: `${count(facts.total_requests)} taken in`,
      Scheduler: `${plural(facts.active_sequences, "row")}, ${count(facts.queued_requests)} wait`,
      RankMirror: ranks.ranks.length > 1 ? plural(ranks.ranks.length, "rank") : plural(facts.steps, "plan"),
      ModelStepper: `${short(rates.steps)} steps/s`,
      SSDWriter: directory.attached ? `${bytes(directory.bytes)} on disk` : "no disk",
      CacheJanitor: `${bytes(memory.active_bytes)} used`,
    };
    for (const [name, { node, fact }] of Object.entries(this.#nodes)) {
      const state = name === "clients" ? "edge" : states[name]?.state ?? "starting";
      mark(node, "data-state", state);
      say(fact, ["running", "edge"].includes(state) ? said[name] : state);
    }
    for (const one of model.channels) this.#level(one);
    this.#describe(model, states);
  }

  #level({ name, used, capacity, policy }) {
    const channel = this.#channels[name];
    if (!channel) return;
    say(channel.title, `${name}: ${used} of ${capacity} (when full: ${policy})`);
    const lit = Math.ceil((used / capacity) * channel.cells.length), tight = policy !== "never full" && used >= capacity;
    channel.cells.forEach((cell, place) => mark(cell, "class", `cell${place < lit ? " used" : ""}${tight ? " tight" : ""}`));
  }

  /** In words, now and then: a description that changes every second cannot be read out. */
  #describe(model, states) {
    if (Date.now() - this.#told < 5000) return;
    this.#told = Date.now();
    const actors = NODES.slice(1).map((name) => `${name} ${states[name]?.state ?? "starting"}`).join(", ");
    const channels = model.channels.map((one) => `${one.name} ${one.used} of ${one.capacity}`).join(", ");
    mark(this.#svg, "aria-label", `Actors: ${actors}. Channels: ${channels}.`);
  }
}
