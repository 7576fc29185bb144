// Pictures and files of text for the next message: pasted, dropped, or chosen.

import { make } from "./dom.js";
import { iconButton } from "./icons.js";

const LARGEST_PICTURE = 20 * 2 ** 20; // As the server's bound.
const LARGEST_TEXT = 2 ** 20; // More than any model's context.
const EDGES = { strip: 56, message: 240 }; // In pixels.

export class Attachments {
  #kept = [];
  #strip;
  #told;
  #readsPictures = true;

  /** `strip` shows them; `told` says what is wrong with one. */
  constructor(strip, told) {
    this.#strip = strip;
    this.#told = told;
  }

  /** Take what is pasted into `prompt`, dropped on `place` or chosen by `button`; pasted text stays the browser's. */
  listen(prompt, place, button, field) {
    prompt.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    place.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    place.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    button.addEventListener("click", () => field.click());
    field.addEventListener("change", () => { this.add([...field.files]); field.value = ""; });
  }

  /** Whether the model reads pictures; true also where that is not known. */
  allowPictures(reads) {
    this.#readsPictures = reads;
  }

  #take(event, data) {
    if (!data.files.length) return;
    event.preventDefault();
    this.add([...data.files]);
  }

  async add(files) {
    this.#told.textContent = "";
    for (const file of files) {
      try {
        this.#show(file.type.startsWith("image/") ? await readPicture(file) : await readText(file));
      } catch (error) {
        this.#told.textContent = error.message;
      }
    }
    const hasPictures = this.#kept.some(({ blob }) => blob);
    if (hasPictures && !this.#readsPictures) this.#told.textContent ||= "This model reads text only, and sees no pictures.";
  }

  #show(attached) {
    const remove = iconButton("remove", `Remove ${attached.name}`, () => {
      this.#kept = this.#kept.filter((one) => one !== attached);
      attached.item.remove();
      if (!this.#kept.length) this.#told.textContent = "";
    });
    attached.item = make("span", { class: "picture" }, attached.view, remove);
    this.#kept.push(attached);
    this.#strip.append(attached.item);
  }

  /** Those that wait, which then wait no more. */
  taken() {
    const taken = this.#kept;
    this.#kept = [];
    this.#strip.replaceChildren();
    this.#told.textContent = "";
    return taken;
  }

  /** What was not sent waits again. */
  putBack(attached) {
    for (const one of attached) this.#show(one);
  }
}

async function readPicture(file) {
  if (file.size > LARGEST_PICTURE) throw new Error(`${file.name} is larger than 20 MiB.`);
  return { name: file.name, blob: file, view: await viewOf(file, file.name, EDGES.strip) };
}

async function readText(file) {
  if (file.size > LARGEST_TEXT) throw new Error(`${file.name} is larger than 1 MiB.`);
  const text = decode(await file.arrayBuffer());
  if (text === null) throw new Error(`${file.name} is neither text nor a picture.`);
  return { name: file.name, text, view: viewOfFile(file.name) };
}

/** Null for what is no text. */
function decode(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

export const viewOfFile = (name) => make("span", { class: "file" }, name);

export const viewInMessage = (blob, name) => viewOf(blob, name, EDGES.message);

/** A canvas, for which the page's rules need no further source of images; the name, where a browser cannot draw it. */
async function viewOf(blob, name, edge) {
  try {
    const bitmap = await createImageBitmap(blob), scale = edge / Math.max(bitmap.width, bitmap.height);
    const size = (side) => Math.max(1, Math.round(side * Math.min(1, scale)));
    const canvas = make("canvas", { width: size(bitmap.width), height: size(bitmap.height), role: "img", "aria-label": name });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas;
  } catch {
    return viewOfFile(name);
  }
}

/** A message's content, as the API has it. `pictures`: blobs. */
export async function contentOf(text, files, pictures) {
  const whole = [...files.map(quoted), text].filter(Boolean).join("\n\n");
  if (!pictures.length) return whole;
  const urls = await Promise.all(pictures.map(urlOf));
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, ...(whole ? [{ type: "text", text: whole }] : [])];
}

/** The fence is longer than any in the file. */
function quoted({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

const urlOf = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});
