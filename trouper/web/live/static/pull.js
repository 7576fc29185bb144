// A model of the hub is downloaded by the server, and is then in the table above.

import { byId, say } from "./dom.js";
import { bytes, percent } from "./format.js";
import { WrongKey } from "./key.js";
import { operate } from "./operations.js";

export class Pull {
  #form;
  #locked;
  #field = byId("pull-name");
  #bar = byId("pull-bar");
  #told = byId("pull-told");
  #problem = byId("pull-problem");

  /** locked(): the key is none any more. */
  constructor(form, locked) {
    this.#form = form;
    this.#locked = locked;
    form.addEventListener("submit", (event) => { event.preventDefault(); this.#pull(this.#field.value.trim()); });
  }

  allow(manages) {
    this.#form.hidden = !manages;
  }

  async #pull(name) {
    const button = this.#form.querySelector("button");
    if (!name || button.disabled) return;
    button.disabled = true;
    say(this.#problem, "");
    say(this.#told, `Looking for ${name}`);
    let problem = "";
    try {
      problem = await operate("pull", { model: name, stream: true }, (progress) => this.#show(name, progress));
    } catch (error) {
      if (error instanceof WrongKey) this.#locked();
      else problem = "The server does not answer.";
    }
    button.disabled = false;
    this.#bar.hidden = true;
    say(this.#problem, problem);
    say(this.#told, problem ? "" : `${name} is here, and can be loaded.`);
    if (!problem) this.#field.value = "";
  }

  #show(name, { done, total }) {
    if (!total) return;
    this.#bar.hidden = false;
    this.#bar.max = total;
    this.#bar.value = done;
    say(this.#told, `${name}: ${bytes(done)} of ${bytes(total)}, ${percent(done, total)}`);
  }
}
