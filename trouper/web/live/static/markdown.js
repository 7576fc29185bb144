// Markdown on the page. Everything is made of elements and text nodes, so that no text of a model is markup.

import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import { parseBlocks } from "./markdown_blocks.js";

/** A text that grows: blocks that are as they were keep their elements, and with them what is selected there. */
export class Rendered {
  #place;
  #sources = [];

  constructor(place) {
    this.#place = place;
  }

  show(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < this.#sources.length && same < blocks.length && this.#sources[same] === blocks[same].source) same += 1;
    while (this.#place.children.length > same) this.#place.lastElementChild.remove();
    this.#place.append(...blocks.slice(same).map(build));
    this.#sources = blocks.map((block) => block.source);
  }
}

function build(node) {
  if (typeof node === "string") return node;
  if (node.tag === "pre") return buildCode(node);
  const inside = node.inside.map(build);
  if (node.tag === "table") {
    return make("div", { class: "scrolls", tabindex: "0" }, make("table", {}, ...inside));
  }
  const isLink = node.tag === "a";
  return make(node.tag, { ...node.attributes, ...(isLink && { target: "_blank", rel: "noopener noreferrer", title: node.attributes.href }) }, ...inside);
}

function buildCode({ language, text }) {
  return make("div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, language || "text"), copyButton("Copy the code", () => text)),
    make("pre", { tabindex: "0" }, make("code", { class: language ? `language-${language}` : null }, text)));
}
