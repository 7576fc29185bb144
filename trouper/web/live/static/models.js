// All models, and what a key with the right to may do with them.

import { confirm } from "./dialog.js";
import { byId, make, mark, parts, say } from "./dom.js";
import { bytes, modelName, percent, plural, span } from "./format.js";
import { WrongKey } from "./key.js";
import { operate } from "./operations.js";
import { Pull } from "./pull.js";

/** What can be done in each state: the last part of the endpoint's path, and the word for it. */
const ACTIONS = {
  unloaded: [["load", "Load"]],
  asleep: [["wake", "Wake"], ["unload", "Unload"]],
  ready: [["sleep", "Sleep"], ["unload", "Unload"]],
};

export class Models {
  #section;
  #body;
  #problem;
  #room = new Room(byId("room"));
  #locked;
  #pull;
  #manages = false;
  #all = [];
  #rows = new Map(); // By name.
  #busy = new Set(); // Names of models of which something has been requested.

  /** locked(): the key is none any more. */
  constructor(section, locked) {
    this.#section = section;
    this.#body = section.querySelector("tbody");
    this.#problem = section.querySelector("[role=alert]");
    this.#locked = locked;
    this.#pull = new Pull(byId("pull"), locked);
  }

  /** Whether there are buttons. */
  allow(manages) {
    this.#manages = manages;
    this.#pull.allow(manages);
    this.#draw();
  }

  show(models, found) {
    this.#all = [...models, ...found.map((one) => ({ ...one, state: "unloaded" }))];
    this.#room.show(models);
    this.#draw();
  }

  #draw() {
    mark(this.#section, "data-manages", this.#manages);
    for (const model of this.#all) {
      if (!this.#rows.has(model.name)) this.#rows.set(model.name, new Row(model.name));
      this.#rows.get(model.name).show(model, this.#manages ? this.#buttonsOf(model) : []);
    }
    const rows = this.#all.map((model) => this.#rows.get(model.name).element);
    if (rows.length !== this.#body.children.length || rows.some((row, place) => row !== this.#body.children[place])) {
      this.#body.replaceChildren(...rows);
    }
  }

  /** [word, what it does, whether it is pressed, whether it can be]. */
  #buttonsOf({ name, state, pinned }) {
    const free = !this.#busy.has(name);
    const actions = (ACTIONS[state] ?? []).filter(([verb]) => !pinned || verb === "load" || verb === "wake");
    return [
      ...actions.map(([verb, word]) => [word, () => this.#actIfSure(verb, word, name), null, free]),
      ["Pin", () => this.#act("pin", name, { pinned: !pinned }), Boolean(pinned), free],
    ];
  }

  /** Others may be using a model that is taken out of memory. */
  async #actIfSure(verb, word, name) {
    const users = ["unload", "sleep"].includes(verb) ? usersOf(this.#all.find((one) => one.name === name)) : 0;
    const detail = `${plural(users, "request")} ${users === 1 ? "uses" : "use"} it now, and will be answered first. Until it is loaded again, others have to wait.`;
    if (users && !(await confirm(`${word} ${modelName(name)}?`, detail, word))) return;
    await this.#act(verb, name, { stream: true });
  }

  async #act(verb, name, more) {
    this.#busy.add(name);
    this.#draw();
    say(this.#problem, "");
    let problem = "";
    try {
      problem = await operate(verb, { model: name, ...more });
    } catch (error) {
      if (error instanceof WrongKey) this.#locked();
      else problem = "the server does not answer";
    }
    this.#busy.delete(name);
    if (problem) say(this.#problem, `${modelName(name)}: ${problem}`);
    this.#draw();
  }
}

const usersOf = ({ scheduler, waiting }) => (scheduler ? scheduler.active_sequences + scheduler.queued_requests : 0) + waiting;

/** What models take of the memory that there is. */
class Room {
  #place;
  #shown = "";

  constructor(place) {
    this.#place = place;
  }

  show(models) {
    const loaded = models.filter((one) => one.memory);
    const weights = loaded.reduce((sum, one) => sum + one.weights_bytes, 0);
    const { active_bytes: used, limit_bytes: limit } = loaded[0]?.memory ?? {};
    const told = JSON.stringify([weights, used, limit]);
    if (told === this.#shown) return;
    this.#shown = told;
    this.#place.hidden = !limit;
    if (!limit) return;
    const shares = [["decode", weights], ["cached", used - weights], ["", limit - Math.max(used, weights)]];
    this.#place.replaceChildren(
      make("p", { class: "ends" }, make("span", {}, `Loaded models take ${bytes(weights)}`), make("b", {}, `${bytes(used)} of ${bytes(limit)} memory in use`)),
      make("div", { class: "meter", "aria-hidden": "true" }, ...parts(shares)));
  }
}

class Row {
  #name;
  #state = make("td");
  #weights = make("td", { class: "number" });
  #notes = make("td", { class: "soft" });
  #does = make("td", { class: "does" });
  #drawn = "";

  constructor(name) {
    this.#name = make("th", { scope: "row", title: name, tabindex: "-1" }, modelName(name));
    this.element = make("tr", { "data-model": name }, this.#name, this.#state, this.#weights, this.#notes, this.#does);
  }

  show(model, buttons) {
    mark(this.element, "data-state", model.state);
    say(this.#state, stateOf(model));
    mark(this.#state, "title", model.problem ?? "");
    say(this.#weights, model.weights_bytes ? bytes(model.weights_bytes) : "–");
    say(this.#notes, notesOf(model));
    this.#offer(buttons, modelName(model.name));
  }

  /** New buttons only where they differ: else the one that has the focus would lose it at every snapshot. */
  #offer(buttons, name) {
    const drawn = JSON.stringify(buttons.map(([word, , pressed, free]) => [word, pressed, free]));
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const focused = this.#does.contains(document.activeElement);
    this.#does.replaceChildren(...buttons.map(([word, act, pressed, free]) => {
      const button = make("button", { type: "button", "aria-label": `${word} ${name}`, "aria-pressed": pressed === null ? null : String(pressed), disabled: !free }, word);
      button.addEventListener("click", act);
      return button;
    }));
    if (focused) (this.#does.querySelector("button:enabled") ?? this.#name).focus({ preventScroll: true });
  }
}

function stateOf({ state, progress, waiting, problem }) {
  const far = progress ? `: ${progress.stage}${progress.total ? ` ${percent(progress.done, progress.total)}` : ""}` : "";
  const wait = waiting ? `, ${plural(waiting, "request")} waiting` : "";
  return `${state}${far}${wait}${problem ? ", could not be loaded" : ""}`;
}

function notesOf({ pinned, ttl_s: ttl, fits }) {
  return [pinned && "pinned", ttl && `sleeps after ${span(ttl)}`, fits === false && "does not fit now", fits && "fits"].filter(Boolean).join(", ");
}
