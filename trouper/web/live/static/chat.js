// Conversations with a model: POST /v1/chat/completions, streamed.

import { Attachments, contentOf } from "./attachments.js";
import { Conversations } from "./conversations.js";
import { byId, make } from "./dom.js";
import { modelName } from "./format.js";
import { headers } from "./key.js";
import { problemOf } from "./problem.js";
import { events } from "./sse.js";
import { Store } from "./store.js";
import { Thread } from "./thread.js";

const OPTIONS = ["temperature", "most", "system"];
/** How much of an answer is lost when the page is closed in the middle. */
const SAVED_MS = 1000;
const TITLE = 60;

export class Chat {
  #store = new Store();
  #all = [];
  #current = begin();
  #model = "";
  #running = null;
  #prompt = byId("prompt");
  #attachments = new Attachments(byId("pictures"), byId("picture-problem"));
  #thread = new Thread(byId("messages"), {
    edit: (message, element, text) => this.#askAgain(message, element, text),
    retry: (message, element) => this.#retry(message, element),
    picture: (id) => this.#store.picture(id),
  });
  #conversations = new Conversations({
    open: (one) => this.#open(one),
    remove: (one) => this.#remove(one),
    clear: () => this.#clear(),
  });

  constructor() {
    this.#attachments.listen(this.#prompt, byId("chat"), byId("attach"), byId("files"));
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.#ask(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("chat-clear").addEventListener("click", () => { this.leave(); this.#prompt.focus(); });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    this.#restore();
  }

  use(model, readsPictures) {
    this.#model = model;
    byId("chat-model").textContent = modelName(model);
    this.#attachments.allowPictures(readsPictures ?? true);
  }

  stop() {
    this.#running?.abort();
  }

  /** A new conversation; the last one stays in the list. */
  leave() {
    return this.#open(begin());
  }

  /** The conversation that was the last one, unless somebody has begun another meanwhile. */
  async #restore() {
    const begun = this.#current;
    const stored = await this.#store.all();
    // Whoever types at once has begun one before the browser's are there.
    this.#all.push(...stored.filter(({ id }) => this.#all.every((one) => one.id !== id)));
    if (!(await this.#store.keeps())) byId("kept").textContent = "This browser keeps nothing: conversations end with the page.";
    if (this.#all.length && this.#current === begun && !begun.messages.length) await this.#open(this.#all[0]);
    else this.#conversations.show(this.#all, this.#current);
  }

  async #open(conversation) {
    this.stop();
    this.#current = conversation;
    for (const id of OPTIONS) if (id in conversation.options) byId(id).value = conversation.options[id];
    this.#attachments.taken();
    this.#conversations.show(this.#all, conversation);
    await this.#thread.show(conversation.messages);
  }

  async #remove(conversation) {
    this.#all = this.#all.filter((one) => one !== conversation);
    if (conversation === this.#current) await this.leave();
    else this.#conversations.show(this.#all, this.#current);
    await this.#store.remove(conversation.id);
  }

  async #clear() {
    this.#all = [];
    await this.leave();
    await this.#store.clear();
  }

  async #save(conversation) {
    if (!this.#all.includes(conversation)) return; // It was deleted while its answer came.
    conversation.at = Date.now();
    this.#conversations.show(this.#all, this.#current);
    if (conversation.messages.length) return this.#store.put(conversation);
    this.#all = this.#all.filter((one) => one !== conversation);
    this.#conversations.show(this.#all, this.#current);
    return this.#store.remove(conversation.id);
  }

  async #ask() {
    const text = this.#prompt.value.trim();
    if (this.#running) return;
    const attached = this.#attachments.taken();
    if (!text && !attached.length) return;
    this.#prompt.value = "";
    const message = await this.#questionOf(text, attached);
    await this.#answer(message, { attached });
  }

  async #questionOf(text, attached) {
    const message = { role: "user", text, files: [], pictures: [] };
    for (const { name, text: inside, blob } of attached) {
      if (!blob) { message.files.push({ name, text: inside }); continue; }
      const id = `${this.#current.id}/${newId()}`;
      await this.#store.putPicture(id, blob);
      message.pictures.push({ id, name });
    }
    return message;
  }

  /** An edited message takes the place of what was said there, with its files. */
  #askAgain(message, element, text) {
    if (this.#running) return;
    const dropped = this.#drop(message, element);
    this.#answer({ ...message, text }, { dropped });
  }

  #retry(reply, element) {
    const place = this.#current.messages.indexOf(reply);
    if (this.#running || place < 1) return;
    const question = this.#current.messages[place - 1], asked = element.previousElementSibling;
    const dropped = this.#drop(question, asked);
    this.#answer(question, { dropped });
  }

  #drop(message, element) {
    const { messages } = this.#current;
    this.#thread.removeFrom(element);
    return messages.splice(messages.indexOf(message));
  }

  /** `attached`: what waits again if it fails. `dropped`: messages that stand here again if it fails. */
  async #answer(question, { attached = [], dropped = [] }) {
    const conversation = this.#current, reply = { role: "assistant", text: "", thought: "", told: "" };
    this.#running = new AbortController();
    this.#busy(true);
    conversation.title ||= titleOf(question);
    conversation.options = Object.fromEntries(OPTIONS.map((id) => [id, byId(id).value]));
    conversation.messages.push(question);
    this.#all = [conversation, ...this.#all.filter((one) => one !== conversation)];
    await this.#save(conversation); // So a page that is left before the answer keeps the question.
    const element = await this.#thread.addQuestion(question), shown = this.#thread.addReply(reply);
    shown.begin();
    let failed = null;
    try {
      await this.#stream(conversation, reply, shown);
    } catch (error) {
      if (!this.#running.signal.aborted) failed = shown.reached ? "Not answered" : "Not sent";
      if (failed) shown.fail(error instanceof TypeError ? "The server does not answer." : error.message);
      else shown.note("stopped");
    }
    this.#running = null;
    this.#busy(false);
    shown.end();
    if (reply.text) add(conversation, reply);
    else await this.#takeBack(conversation, question, { element, shown, attached, dropped, failed });
    await this.#save(conversation);
  }

  async #stream(conversation, reply, shown) {
    const response = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(await this.#bodyOf(conversation)), signal: this.#running.signal,
      headers: headers({ "Content-Type": "application/json" }),
    });
    shown.reached = true;
    if (!response.ok) throw new Error(await problemOf(response));
    const ignored = response.headers.get("X-Trouper-Ignored") ?? "";
    if (ignored.includes("image_url")) shown.note("the model reads text only, and saw no picture");
    let savedAt = -Infinity;
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      shown.take(chunk);
      if (reply.text && performance.now() - savedAt > SAVED_MS) {
        savedAt = performance.now();
        add(conversation, reply);
        await this.#save(conversation);
      }
    }
    throw new Error("The answer has ended in the middle.");
  }

  async #bodyOf({ messages, options }) {
    const { system, temperature, most } = options, number = (text) => (text ? Number(text) : undefined);
    const said = await Promise.all(messages.map((message) => this.#asSent(message)));
    return {
      model: this.#model, stream: true, stream_options: { include_usage: true },
      // Nothing where the field is empty: the server has defaults.
      temperature: number(temperature), max_tokens: number(most),
      messages: system.trim() ? [{ role: "system", content: system.trim() }, ...said] : said,
    };
  }

  async #asSent({ role, text, files = [], pictures = [] }) {
    const blobs = await Promise.all(pictures.map(({ id }) => this.#store.picture(id)));
    return { role, content: await contentOf(text, files, blobs.filter(Boolean)) };
  }

  /** What has no answer is no part of the conversation; what failed can be sent again as it was. */
  async #takeBack(conversation, question, { element, shown, attached, dropped, failed }) {
    conversation.messages.splice(conversation.messages.indexOf(question), 1, ...dropped);
    if (conversation !== this.#current) return;
    if (dropped.length) {
      await this.#thread.show(conversation.messages);
      byId("messages").append(element, shown.element);
    }
    if (!failed) return;
    element.dataset.failed = "";
    element.append(make("p", { class: "told" }, failed));
    if (!dropped.length) this.#prompt.value ||= question.text;
    this.#attachments.putBack(attached);
  }

  #busy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (!busy && document.activeElement === document.body) this.#prompt.focus({ preventScroll: true });
  }
}

function add({ messages }, message) {
  if (!messages.includes(message)) messages.push(message);
}

function begin() {
  return { id: newId(), title: "", at: Date.now(), options: {}, messages: [] };
}

/** `crypto.randomUUID` is there only on HTTPS and on this machine. */
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((one) => one.toString(16).padStart(2, "0")).join("");
}

function titleOf({ text, files, pictures }) {
  const line = text.split("\n")[0] || [...files, ...pictures][0]?.name || "Conversation";
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}
