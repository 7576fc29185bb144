// One answer, as it comes and afterwards.

import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import { plural, seconds, short } from "./format.js";
import { iconButton } from "./icons.js";
import { Rendered } from "./markdown.js";

/** Text arrives more often than anybody sees. */
const REDRAW_MS = 80;

export class Reply {
  reached = false; // The server; else nobody has read what was said.
  #message;
  #said = make("div", { class: "said prose" });
  #rendered = new Rendered(this.#said);
  #told = make("p", { class: "told" });
  #thought = null;
  #list;
  #due = 0;
  #began = performance.now();
  #first = null;
  #usage = null;
  #reason = null;
  #note = null;

  /** `message`: {role, text, thought, told}, which this fills. retry(): the user wants another answer. */
  constructor(list, message, retry) {
    this.#list = list;
    this.#message = message;
    const tools = make("p", { class: "tools" }, copyButton("Copy the answer", () => message.text), iconButton("retry", "Another answer", retry));
    this.element = make("div", { "data-role": "assistant" }, this.#said, make("div", { class: "under" }, this.#told, tools));
    list.append(this.element);
    this.#paint();
    this.#told.textContent = message.told;
  }

  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.#told.textContent = "…";
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.#reason = choice.finish_reason ?? this.#reason;
    const { content, reasoning_content: thought } = choice.delta;
    if (!content && !thought) return;
    this.#first ??= performance.now();
    this.#message.text += content ?? "";
    this.#message.thought += thought ?? "";
    this.#due ||= setTimeout(() => this.#paint(), REDRAW_MS);
  }

  /** Follow the end, unless somebody scrolled up to read. */
  #paint() {
    clearTimeout(this.#due);
    this.#due = 0;
    const list = this.#list, follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    if (this.#message.thought) this.#think();
    this.#rendered.show(this.#message.text);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  #think() {
    if (!this.#thought) {
      this.#thought = make("div", { class: "thought" });
      this.element.prepend(make("details", { open: !this.#message.told }, make("summary", {}, "Thought"), this.#thought));
    }
    this.#thought.textContent = this.#message.thought;
  }

  note(text) {
    this.#note = text;
  }

  fail(message) {
    this.#paint();
    this.#said.append(make("p", { class: "problem", role: "alert" }, message));
  }

  end() {
    if (this.#due) this.#paint();
    this.element.removeAttribute("aria-busy");
    this.#message.told = this.#summary();
    this.#told.textContent = this.#message.told;
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  #summary() {
    const now = performance.now(), said = [];
    if (this.#usage) said.push(plural(this.#usage.completion_tokens, "token"));
    if (this.#first !== null) said.push(`first after ${seconds((this.#first - this.#began) / 1000)} s`);
    if (this.#usage && this.#usage.completion_tokens > 1) {
      said.push(`${short((this.#usage.completion_tokens - 1) / ((now - this.#first) / 1000))} a second`);
    }
    if (this.#reason === "length") said.push("cut at the most tokens");
    if (this.#note) said.push(this.#note);
    return said.join(" · ");
  }
}
