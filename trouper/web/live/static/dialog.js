// A question before something that cannot be undone. The browser keeps the focus inside, and Escape is no.

import { byId } from "./dom.js";

const dialog = byId("question");

/** Whether it is confirmed. `word`: what the button says that does it. */
export function confirm(title, detail, word) {
  byId("question-title").textContent = title;
  byId("question-detail").textContent = detail;
  dialog.querySelector("[value=yes]").textContent = word;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
