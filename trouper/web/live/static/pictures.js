// Pictures for the next question: pasted, or dropped on the chat.

import { make } from "./dom.js";

const LARGEST = 20 * 2 ** 20; // As the server's bound.
const EDGE = 56; // Of a thumbnail, in pixels.

export class Pictures {
  #kept = [];
  #strip;
  #told;

  /** `strip` shows them; `told` says what is wrong with one. */
  constructor(strip, told) {
    this.#strip = strip;
    this.#told = told;
  }

  /** Take what is pasted into `prompt` or dropped on `place`; text stays the browser's. */
  listen(prompt, place) {
    prompt.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    place.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    place.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  #take(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    this.#told.textContent = "";
    for (const file of files) {
      if (file.size > LARGEST) this.#told.textContent = `${file.name} is larger than 20 MiB.`;
      else this.#show({ name: file.name, url: await urlOf(file), view: await viewOf(file) });
    }
  }

  #show(picture) {
    const remove = make("button", { type: "button", class: "plain", "aria-label": `Remove ${picture.name}` }, "×");
    picture.item = make("span", { class: "picture" }, picture.view, remove);
    remove.addEventListener("click", () => this.#drop(picture));
    this.#kept.push(picture);
    this.#strip.append(picture.item);
  }

  #drop(picture) {
    this.#kept = this.#kept.filter((one) => one !== picture);
    picture.item.remove();
  }

  /** Those that wait, which then wait no more. */
  taken() {
    const taken = this.#kept;
    this.#kept = [];
    this.#strip.replaceChildren();
    return taken;
  }

  /** What was not sent waits again. */
  putBack(pictures) {
    for (const picture of pictures) this.#show(picture);
  }
}

/** A message's content, as the API has it. */
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return [...parts, ...(text ? [{ type: "text", text }] : [])];
}

const urlOf = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/** A canvas, for which the page's rules need no further source of images; the name, where a browser cannot draw it. */
async function viewOf(file) {
  try {
    const bitmap = await createImageBitmap(file), scale = EDGE / Math.max(bitmap.width, bitmap.height);
    const size = (side) => Math.max(1, Math.round(side * Math.min(1, scale)));
    const canvas = make("canvas", { width: size(bitmap.width), height: size(bitmap.height), role: "img", "aria-label": file.name });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas;
  } catch {
    return make("span", {}, file.name);
  }
}
