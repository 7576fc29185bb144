// A button that copies a text.

import { make } from "./dom.js";

const SHOWN_MS = 1500;

export function copyButton(label, textOf) {
  const word = make("span", { "aria-live": "polite" }, "Copy");
  const button = make("button", { type: "button", class: "plain copy", "aria-label": label }, word);
  button.addEventListener("click", async () => {
    word.textContent = (await copy(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => { word.textContent = "Copy"; }, SHOWN_MS);
  });
  return button;
}

/** The clipboard is there only on HTTPS and on this machine; elsewhere a selection is copied. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement, field = make("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return isCopied;
}
