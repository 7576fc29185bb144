// The list of conversations beside the chat.

import { confirm } from "./dialog.js";
import { byId, make } from "./dom.js";
import { iconButton } from "./icons.js";

export class Conversations {
  #place = byId("conversations");
  #list = this.#place.querySelector("ul");
  #opener = byId("show-conversations");
  #shown = "";
  #on;

  /** on: {open(conversation), remove(conversation), clear()} */
  constructor(on) {
    this.#on = on;
    this.#opener.addEventListener("click", () => this.#fold(this.#opener.getAttribute("aria-expanded") === "true"));
    this.#place.addEventListener("keydown", (event) => { if (event.key === "Escape") this.#close(); });
    byId("forget-all").addEventListener("click", async () => {
      if (await confirm("Delete all conversations?", "They are in this browser only.", "Delete all")) on.clear();
    });
  }

  /** New items only where they differ: else one that has the focus would lose it whenever an answer is saved. */
  show(all, current) {
    const shown = JSON.stringify([current.id, ...all.map(({ id, title }) => [id, title])]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    byId("forget-all").hidden = all.length < 2;
    this.#list.replaceChildren(...all.map((one) => this.#item(one, one === current)));
  }

  #item(conversation, isCurrent) {
    const title = make("button", { type: "button", class: "plain title", title: conversation.title, "aria-current": isCurrent ? "true" : null }, conversation.title);
    title.addEventListener("click", () => { this.#close(); this.#on.open(conversation); });
    const remove = iconButton("remove", `Delete ${conversation.title}`, async () => {
      if (await confirm("Delete this conversation?", conversation.title, "Delete")) this.#on.remove(conversation);
    });
    return make("li", {}, title, remove);
  }

  /** On a narrow screen the list covers the chat. */
  #fold(isFolded) {
    this.#opener.setAttribute("aria-expanded", String(!isFolded));
    this.#place.toggleAttribute("data-open", !isFolded);
  }

  #close() {
    if (!this.#place.hasAttribute("data-open")) return;
    this.#fold(true);
    this.#opener.focus();
  }
}
