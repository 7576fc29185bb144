// The messages of one conversation.

import { viewInMessage, viewOfFile } from "./attachments.js";
import { make } from "./dom.js";
import { iconButton } from "./icons.js";
import { Reply } from "./reply.js";

export class Thread {
  #list;
  #on;

  /** on: {edit(message, element, text), retry(message, element), picture(id)} */
  constructor(list, on) {
    this.#list = list;
    this.#on = on;
  }

  async show(messages) {
    this.#list.replaceChildren();
    for (const message of messages) {
      if (message.role === "user") await this.addQuestion(message);
      else this.addReply(message);
    }
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** The place is taken before pictures are there: what follows stands below. */
  async addQuestion(message) {
    const said = make("div", { class: "said" }, message.text);
    const shown = make("div", { class: "shown" }, ...message.files.map(({ name }) => viewOfFile(name)));
    const edit = iconButton("edit", "Edit the message", () => this.#edit(message, element));
    const element = make("div", { "data-role": "user" }, message.files.length + message.pictures.length ? shown : null, said, make("p", { class: "tools" }, edit));
    this.#list.append(element);
    for (const { id, name } of message.pictures) {
      const blob = await this.#on.picture(id);
      shown.append(blob ? await viewInMessage(blob, name) : viewOfFile(name));
    }
    this.#list.scrollTop = this.#list.scrollHeight;
    return element;
  }

  addReply(message) {
    const reply = new Reply(this.#list, message, () => this.#on.retry(message, reply.element));
    return reply;
  }

  /** This one and all that follow. */
  removeFrom(element) {
    while (element.nextElementSibling) element.nextElementSibling.remove();
    element.remove();
  }

  #edit(message, element) {
    if (element.querySelector("form")) return;
    const field = make("textarea", { "aria-label": "Edited message", rows: Math.min(12, message.text.split("\n").length + 1) });
    const cancel = make("button", { type: "button" }, "Cancel");
    const follows = element.nextElementSibling?.nextElementSibling;
    const form = make("form", { class: "edits" }, field,
      make("div", { class: "actions" }, make("span", { class: "soft" }, follows ? "What follows is dropped." : ""), cancel,
        make("button", { type: "submit", class: "primary" }, "Send")));
    const close = () => {
      form.remove();
      element.removeAttribute("data-edited");
      element.querySelector(".tools button").focus();
    };
    field.value = message.text;
    cancel.addEventListener("click", close);
    form.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.#on.edit(message, element, field.value.trim());
    });
    element.setAttribute("data-edited", "");
    element.append(form);
    field.focus();
  }
}
