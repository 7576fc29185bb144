// A chat with the model: POST /v1/chat/completions, streamed.

import { byId, make } from "./dom.js";
import { modelName, plural, seconds, short } from "./format.js";
import { headers } from "./key.js";
import { contentOf, Pictures } from "./pictures.js";
import { problemOf } from "./problem.js";
import { events } from "./sse.js";

export class Chat {
  #messages = [];
  #list = byId("messages");
  #prompt = byId("prompt");
  #pictures = new Pictures(byId("pictures"), byId("picture-problem"));
  #running = null;
  #model = "";

  constructor() {
    this.#pictures.listen(this.#prompt, byId("chat"));
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.#ask(); });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
  }

  use(model) {
    this.#model = model;
    byId("chat-model").textContent = modelName(model);
  }

  clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#list.replaceChildren();
    this.#pictures.taken();
    this.#prompt.focus();
  }

  async #ask() {
    const text = this.#prompt.value.trim();
    if (this.#running) return;
    const pictures = this.#pictures.taken();
    if (!text && !pictures.length) return;
    this.#prompt.value = "";
    this.#messages.push({ role: "user", content: contentOf(text, pictures) });
    const asked = this.#messages;
    const message = this.#show("user", text, pictures);
    const answer = new Reply(this.#list);
    this.#running = new AbortController();
    this.#busy(true);
    let failed = null;
    try {
      await this.#stream(answer);
    } catch (error) {
      if (!this.#running.signal.aborted) failed = answer.reached ? "Not answered" : "Not sent";
      if (failed) answer.fail(error instanceof TypeError ? "The server does not answer." : error.message);
      else answer.note("stopped");
    }
    this.#running = null;
    this.#busy(false);
    answer.end();
    if (asked !== this.#messages) return; // Cleared meanwhile.
    if (answer.text) asked.push({ role: "assistant", content: answer.text });
    else this.#takeBack(message, text, pictures, failed);
  }

  /** What has no answer is no part of the conversation; what failed can be sent again as it was. */
  #takeBack(message, text, pictures, failed) {
    this.#messages.pop();
    if (!failed) return;
    message.dataset.failed = "";
    message.append(make("p", { class: "told" }, failed));
    this.#prompt.value ||= text;
    this.#pictures.putBack(pictures);
  }

  async #stream(answer) {
    const system = byId("system").value.trim();
    const body = {
      model: this.#model, stream: true, stream_options: { include_usage: true },
      temperature: numberIn("temperature"), max_tokens: numberIn("most"),
      messages: system ? [{ role: "system", content: system }, ...this.#messages] : this.#messages,
    };
    const response = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: this.#running.signal,
      headers: headers({ "Content-Type": "application/json" }),
    });
    answer.reached = true;
    if (!response.ok) throw new Error(await problemOf(response));
    const ignored = response.headers.get("X-Trouper-Ignored") ?? "";
    if (ignored.includes("image_url")) answer.note("the model reads text only, and saw no picture");
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
    }
    throw new Error("The answer has ended in the middle.");
  }

  #show(role, text, pictures) {
    const views = pictures.map(({ view }) => view);
    const message = make("div", { "data-role": role }, ...views, make("div", { class: "said" }, text));
    this.#list.append(message);
    this.#list.scrollTop = this.#list.scrollHeight;
    return message;
  }

  #busy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    (busy ? byId("stop") : this.#prompt).focus({ preventScroll: true });
  }
}

/** Nothing where the field is empty: the server has defaults. */
const numberIn = (id) => (byId(id).value ? Number(byId(id).value) : undefined);

/** One answer as it comes. */
class Reply {
  text = "";
  reached = false; // The server; else nobody has read what was said.
  #said = make("div", { class: "said" });
  #told = make("p", { class: "told" }, "…");
  #thought = null;
  #item = make("div", { "data-role": "assistant", "aria-busy": "true" }, this.#said, this.#told);
  #list;
  #began = performance.now();
  #first = null;
  #usage = null;
  #reason = null;
  #note = null;

  constructor(list) {
    this.#list = list;
    list.append(this.#item);
    list.scrollTop = list.scrollHeight;
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.#reason = choice.finish_reason ?? this.#reason;
    if (choice.delta.reasoning_content) this.#think(choice.delta.reasoning_content);
    if (choice.delta.content) this.#say(choice.delta.content);
  }

  #say(text) {
    this.#first ??= performance.now();
    this.text += text;
    this.#append(this.#said, text);
  }

  #think(text) {
    this.#first ??= performance.now();
    if (!this.#thought) {
      this.#thought = make("div", { class: "thought" });
      this.#item.prepend(make("details", { open: true }, make("summary", {}, "Thought"), this.#thought));
    }
    this.#append(this.#thought, text);
  }

  /** Follow the end, unless somebody scrolled up to read. */
  #append(place, text) {
    const list = this.#list, follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    place.append(text);
    place.normalize();
    if (follows) list.scrollTop = list.scrollHeight;
  }

  note(text) {
    this.#note = text;
  }

  fail(message) {
    this.#said.append(make("p", { class: "problem", role: "alert" }, message));
  }

  end() {
    this.#item.removeAttribute("aria-busy");
    this.#told.textContent = this.#summary();
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
