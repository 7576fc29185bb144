// One of four views at a time, by the address's fragment. The page stays: an answer goes on while somebody looks at the server.

import { byId, mark } from "./dom.js";

const NAMES = ["chat", "models", "server", "actors"];
const links = [...byId("views").querySelectorAll("a")];

export class Views {
  current = "chat";
  #canSeeAll = false;
  #changed;

  /** changed(): another view is shown. */
  constructor(changed) {
    this.#changed = changed;
    addEventListener("hashchange", () => this.#show());
    this.#show();
  }

  /** Whether there are others than the chat. */
  allow(canSeeAll) {
    this.#canSeeAll = canSeeAll;
    byId("views").hidden = !canSeeAll;
    this.#show();
  }

  #show() {
    const wanted = location.hash.slice(1);
    this.current = this.#canSeeAll && NAMES.includes(wanted) ? wanted : "chat";
    mark(document.documentElement, "data-view", this.current);
    for (const link of links) {
      if (link.hash === `#${this.current}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    this.#changed();
  }
}
